"""`cache.sequence_view` on host memory: until when a view shows something, and who waits for that."""

import threading
from typing import Any

import pytest

import kvtier
from kvtier.cache.leases import Lease
from kvtier.errors import ClosedError, DriverError, UsageError
from kvtier.types import PAGE_BYTES, Remap, Status
from tests.sequence_views import LAYERS, cache, config_for, keys_of, lease_of, same, write

__all__ = ["cache"]


def end_by_close(cache: Any, lease: Lease, view: Any) -> None:
    view.close()
    view.close()


def end_by_release(cache: Any, lease: Lease, view: Any) -> None:
    cache.release(lease)
    cache.release(lease)


def end_by_owner(cache: Any, lease: Lease, view: Any) -> None:
    assert cache.release_owner("req") == 1


@pytest.mark.parametrize("end", [end_by_close, end_by_release, end_by_owner])
def test_a_view_that_has_ended_shows_nothing(cache: Any, end: Any) -> None:
    """Whoever keeps a view reads the blocks of whoever has the slots next."""
    lease, other = lease_of(cache, keys_of(cache, 1, 4)), lease_of(cache, keys_of(cache, 2, 4), owner="other")
    write(cache, lease)
    view, second, kept = cache.sequence_view(lease), cache.sequence_view(lease), cache.sequence_view(other)
    array = view.kv(0)["k"]
    assert array.any()
    end(cache, lease, view)
    assert not array.any()
    with pytest.raises(UsageError, match="has ended"):
        view.kv(0)
    if end is end_by_close:
        assert same(cache, lease, second)
        cache.release(lease)
    with pytest.raises(UsageError, match="has ended"):
        second.kv(0)
    assert same(cache, other, kept)
    write(cache, lease_of(cache, keys_of(cache, 3, 8)))
    assert not array.any()
    cache.release(other)
    assert cache.top_tier.sequences._ranges.blocks_shown == 0


def test_slots_are_free_only_when_the_view_is_unmapped(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment a view shows what the next request writes."""
    lease = lease_of(cache, keys_of(cache, 1, 4))
    cache.sequence_view(lease)
    sequences, free = cache.top_tier.sequences, []
    hide = sequences.hide

    def counted(shown: Any) -> None:
        free.append(cache.stats()["tiers"]["gpu"]["slots_free"])
        hide(shown)
        free.append(cache.stats()["tiers"]["gpu"]["slots_free"])

    monkeypatch.setattr(sequences, "hide", counted)
    cache.release(lease)
    assert [*free, cache.stats()["tiers"]["gpu"]["slots_free"]] == [11, 11, 15]


def test_a_lease_that_is_being_released_gets_no_view(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view made at the same moment outlives its lease for ever."""
    lease = lease_of(cache, keys_of(cache, 1, 4))
    cache.sequence_view(lease)
    sequences, refused = cache.top_tier.sequences, []
    hide = sequences.hide

    def meanwhile(shown: Any) -> None:
        with pytest.raises(UsageError, match="is being released") as error:
            cache.sequence_view(lease)
        refused.append(error)
        hide(shown)

    monkeypatch.setattr(sequences, "hide", meanwhile)
    cache.release(lease)
    assert len(refused) == 1
    with pytest.raises(UsageError, match="was released"):
        cache.sequence_view(lease)
    assert cache._sequences._leaving == set()


def test_a_view_that_cannot_be_unmapped_does_not_keep_the_lease(
    cache: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver's refusal leaks slots for good, or lets their memory go while it is mapped."""
    lease = lease_of(cache, keys_of(cache, 1, 4))
    write(cache, lease)
    view = cache.sequence_view(lease)
    ranges = cache.top_tier.sequences._ranges

    def refuse(shown: Any) -> None:
        raise DriverError("unmap", 12, "no")

    with monkeypatch.context() as patch:
        patch.setattr(ranges, "hide", refuse)
        cache.release(lease)
    assert "stays mapped until the cache is closed" in caplog.text
    assert cache.stats()["leases"] == 0
    with pytest.raises(UsageError, match="has ended"):
        view.kv(0)
    outcome = cache.top_tier.remap(Remap(unmap=(4,), unused=frozenset({4})))
    assert (outcome.status, cache.top_tier.check()) == (Status.FAILED, [])
    assert cache.resize("gpu", 2 * PAGE_BYTES) > 2 * PAGE_BYTES  # as far as it came


def test_closing_the_cache_ends_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array shows memory that another part of the process has by now, or reading it kills the process."""
    cache = kvtier.open_sync(config_for())
    driver, left = cache.top_tier._driver, []
    close = driver.close
    monkeypatch.setattr(driver, "close", lambda: (left.append(driver._ledger.ranges()), close()))
    lease = lease_of(cache, keys_of(cache, 1, 4))
    write(cache, lease)
    view, other = cache.sequence_view(lease), cache.sequence_view(lease)
    kept, array = view.kv(0), view.kv(1)["v"]
    cache.close()
    assert left == [[]]  # whoever made a range has freed it
    assert not array.any()
    assert not kept["k"].any()
    for call in (lambda: view.kv(0), lambda: other.kv(0), lambda: cache.sequence_view(lease)):
        with pytest.raises(ClosedError):
            call()
    view.close()


def test_a_resize_leaves_what_a_view_shows(cache: Any) -> None:
    """Memory goes from under a view, or a view keeps the tier from giving back what nobody uses."""
    idle = lease_of(cache, keys_of(cache, 9, 8), owner="idle")
    lease = lease_of(cache, keys_of(cache, 1, 4))
    write(cache, lease)
    view = cache.sequence_view(lease)
    cache.release(idle)
    assert cache.resize("gpu", 2 * PAGE_BYTES) == 5 * PAGE_BYTES  # its slots, and the null block
    assert same(cache, lease, view)
    assert cache.resize("gpu", 128 << 10) == 128 << 10
    late = lease_of(cache, keys_of(cache, 2, 24), owner="late")
    write(cache, late)
    assert same(cache, late, cache.sequence_view(late))
    assert same(cache, lease, view)
    cache.release(lease)
    cache.release(late)
    assert cache.resize("gpu", 2 * PAGE_BYTES) == 2 * PAGE_BYTES
    assert cache.top_tier._driver.used_bytes == 2 * PAGE_BYTES


def test_views_of_many_threads(cache: Any) -> None:
    """The driver's books are torn by callers and the executor at once."""
    failures: list[BaseException] = []

    def serve(number: int) -> None:
        try:
            for _ in range(25):
                lease = cache.reserve(cache.match(keys_of(cache, number, 3), f"r{number}"), 3)
                if isinstance(lease, Lease):
                    write(cache, lease)
                    assert same(cache, lease, cache.sequence_view(lease))
                    cache.release(lease)
        except BaseException as error:  # noqa: BLE001  the main thread asserts
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for pages in (8, 24, 12, 32) * 3:
        cache.resize("gpu", pages * PAGE_BYTES)
    for thread in threads:
        thread.join()
    assert failures == []


def test_whoever_maps_or_unmaps_has_the_tiers_lock(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers and the executor change the driver's books at once."""
    tier, held = cache.top_tier, {}

    def watched(owner: Any, verb: str) -> None:
        inner = getattr(owner, verb)
        monkeypatch.setattr(
            owner, verb, lambda *more: (held.setdefault(verb, tier._changing.locked()), inner(*more))[1]
        )

    for verb in ("show", "hide", "check"):
        watched(tier.sequences._ranges, verb)
    for verb in ("fill", "map", "shrink", "sleep", "wake"):
        watched(tier._arena, verb)
    watched(tier._driver, "view")
    lease = lease_of(cache, keys_of(cache, 1, 2))
    view = cache.sequence_view(lease)
    view.kv(0)
    view.close()
    cache.resize("gpu", 32 << 10)
    cache.resize("gpu", 64 << 10)
    cache.release(lease)
    cache.sleep()
    cache.wake()
    assert tier.check() == []
    assert held == dict.fromkeys(("show", "hide", "check", "fill", "map", "shrink", "sleep", "wake", "view"), True)


def test_a_range_serves_the_next_lease(cache: Any) -> None:
    """Each request reserves addresses of its own, since the last one's arrays are kept by nobody but us."""
    addresses = set()
    for number in range(4):
        lease = lease_of(cache, keys_of(cache, number, 3))
        view = cache.sequence_view(lease)
        assert len([view.kv(layer) for layer in range(LAYERS)]) == LAYERS
        addresses.add(view.address)
        cache.release(lease)
    assert len(addresses) == 1
