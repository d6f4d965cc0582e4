"""`cache.sequence_view` on host memory: what a view shows, until when, and what is refused."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.cache.leases import Lease
from kvtier.engine.managed_cache import open_managed
from kvtier.errors import ClosedError, ConfigError, DriverError, OutOfMemory, UsageError
from kvtier.testing.fork import in_child
from kvtier.types import PAGE_BYTES, Remap, Status

BLOCK_TOKENS = 8
LAYERS, HEADS, DIM = 2, 2, 16
BLOCK_BYTES = BLOCK_TOKENS * LAYERS * 2 * HEADS * DIM * 4  # a page
MODEL = {
    "name": "tiny",
    "weights_epoch": "v1",
    "layers": LAYERS,
    "kv_heads": HEADS,
    "head_dim": DIM,
    "dtype": "float32",
    "block_tokens": BLOCK_TOKENS,
    "layout": "token_major",
}


def config_for(gpu: Any = None, model: Any = None, below: Any = (), **more: Any) -> kvtier.config.Config:
    """15 usable slots of a page on the gpu tier, 64 in host memory."""
    first = {"type": "gpu", "capacity": "64KiB", "capacity_max": "128KiB", "sequence_views": True} | (gpu or {})
    tiers = [first, {"type": "host", "capacity": "256KiB", "pin": "off", "hugepages": "off"}, *below]
    return kvtier.load_config({"model": MODEL | (model or {}), "tiers": tiers} | more)


@pytest.fixture
def cache() -> Iterator[Any]:
    """Afterwards all books agree."""
    with kvtier.open_sync(config_for()) as cache:
        yield cache
        assert [*cache.check(), *cache.top_tier.check()] == []


def keys_of(cache: Any, number: int, blocks: int, shared: int = 0) -> Any:
    """Keys of a prompt of its own, behind a prefix of `shared` blocks that all have."""
    own = [number * 1000 + i for i in range((blocks - shared) * BLOCK_TOKENS)]
    return kvtier.hash_blocks([*range(shared * BLOCK_TOKENS), *own], cache.config.model)


def lease_of(cache: Any, keys: Any, owner: str = "req", blocks: int | None = None) -> Lease:
    lease = cache.reserve(cache.match(keys, owner), blocks or len(keys.groups[0]))
    assert isinstance(lease, Lease)
    return lease


def write(cache: Any, lease: Lease, first: int = 0) -> None:
    """Each value of each block from the first one on tells its slot, layer, segment and place."""
    for slot in lease.slots()[first:]:
        for layer in range(LAYERS):
            for name, array in cache.kv(0, layer).items():
                array[slot] = values(slot, layer, name)


def values(slot: int, layer: int, name: str) -> Any:
    place = np.arange(BLOCK_TOKENS * HEADS * DIM, dtype=np.float32).reshape(BLOCK_TOKENS, HEADS, DIM)
    return place + 1000 * (slot + 100 * layer + 1000 * (name == "v"))


def expected(cache: Any, lease: Lease, layer: int, name: str) -> Any:
    """The tokens of a lease by a copy from its slots."""
    return np.concatenate([cache.kv(0, layer)[name][slot] for slot in lease.slots()])


def same(cache: Any, lease: Lease, view: Any) -> bool:
    return all(
        np.array_equal(view.kv(layer)[name], expected(cache, lease, layer, name))
        for layer in range(LAYERS)
        for name in ("k", "v")
    )


def test_two_sequences_share_a_prefix_and_see_what_is_written(cache: Any) -> None:
    """A sequence shows other tokens than its blocks hold, or a prefix is copied."""
    keys = keys_of(cache, 1, 5, shared=3)
    first = lease_of(cache, keys)
    write(cache, first)
    cache.commit(first, list(zip(first.slots(), keys.groups[0], strict=True)))
    second = lease_of(cache, keys_of(cache, 2, 6, shared=3))
    assert second.tokens_ready == 3 * BLOCK_TOKENS
    assert second.slots()[:3] == first.slots()[:3]
    views = [cache.sequence_view(lease) for lease in (first, second)]
    assert [(view.tokens, view.blocks, view.group) for view in views] == [(40, 5, 0), (48, 6, 0)]
    before = views[1].kv(1)["k"]
    write(cache, second, first=3)  # written after the view was made, and seen
    for lease, view in zip((first, second), views, strict=True):
        assert same(cache, lease, view)
        for name, array in view.kv(1).items():
            assert array.shape == (view.tokens, HEADS, DIM)
            assert array.strides == (BLOCK_BYTES // BLOCK_TOKENS, DIM * 4, 4)
            assert array[0, 0, 0] == values(first.slots()[0], 1, name)[0, 0, 0]
    assert np.array_equal(before, expected(cache, second, 1, "k"))
    assert views[0].address != views[1].address
    assert views[0].kv(0) is views[0].kv(0)  # a step asks for every layer


@pytest.mark.torch
def test_torchs_attention_over_a_view_is_that_over_a_copy_to_the_bit(cache: Any) -> None:
    """An engine that reads a view computes other logits than one that gathers the blocks."""
    torch = pytest.importorskip("torch")
    lease = lease_of(cache, keys_of(cache, 1, 9))
    rng = np.random.default_rng(0)
    for layer in range(LAYERS):
        for array in cache.kv(0, layer).values():
            array[:16] = rng.standard_normal((16, *array.shape[1:]), dtype=np.float32)
    view, layer, tokens = cache.sequence_view(lease), 1, 9 * BLOCK_TOKENS - 3
    attend = torch.nn.functional.scaled_dot_product_attention
    for queries in (1, 7):
        asked = torch.from_numpy(rng.standard_normal((1, HEADS, queries, DIM), dtype=np.float32))
        shown = [torch.from_dlpack(view.kv(layer)[n])[:tokens].permute(1, 0, 2)[None] for n in ("k", "v")]
        copied = [
            torch.from_dlpack(expected(cache, lease, layer, n))[:tokens].permute(1, 0, 2)[None] for n in ("k", "v")
        ]
        assert shown[0].data_ptr() == view.kv(layer)["k"].ctypes.data
        assert torch.equal(attend(asked, *shown), attend(asked, *copied))


def test_blocks_that_come_back_from_below_are_seen(tmp_path: Path) -> None:
    """A promoted prefix lies in other slots than the view maps."""
    disk = {"type": "lmdb", "path": str(tmp_path / "store"), "capacity": "16MiB"}
    with kvtier.open_sync(config_for(below=[disk], limits={"governor": False, "load_deadline": "60s"})) as cache:
        keys = keys_of(cache, 1, 4)
        lease = lease_of(cache, keys)
        write(cache, lease)
        wanted = [expected(cache, lease, 0, "v"), expected(cache, lease, 1, "k")]
        cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True)))
        cache.release(lease)
        assert cache.flush().failed == 0
        cache.release(lease_of(cache, keys_of(cache, 2, 15)))  # takes all slots
        back = lease_of(cache, keys)
        assert (back.tokens_ready, back.tiers["gpu"]) == (4 * BLOCK_TOKENS, 0)
        view = cache.sequence_view(back)
        assert np.array_equal(view.kv(0)["v"], wanted[0])
        assert np.array_equal(view.kv(1)["k"], wanted[1])


# ---------------------------------------------------------------- until when


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


def test_asyncio_callers_have_them_too() -> None:
    """The asyncio cache has no views."""

    async def run() -> None:
        async with kvtier.open(config_for()) as cache:
            lease = await cache.reserve(cache.match(keys_of(cache, 1, 3), "req"), 3)
            assert isinstance(lease, Lease)
            view = cache.sequence_view(lease)
            write(cache, lease)
            assert same(cache, lease, view)
            cache.release(lease)

    asyncio.run(run())


# ---------------------------------------------------------------- for reading only


def test_an_array_of_a_view_refuses_to_be_written(cache: Any) -> None:
    """A reader changes a prefix that others share, or dies of trying."""
    view = cache.sequence_view(lease_of(cache, keys_of(cache, 1, 2)))
    with pytest.raises(ValueError, match="read-only"):
        view.kv(0)["k"][0] = 1


WRITING = """
import ctypes, sys
from tests.unit.test_sequence_view import *
with kvtier.open_sync(config_for()) as cache:
    lease = lease_of(cache, keys_of(cache, 1, 2))
    view = cache.sequence_view(lease)
    assert ctypes.string_at(view.address, 4) == bytes(4)
    print("read", flush=True)
    ctypes.memset(view.address, 1, 4)
"""


def test_memory_of_a_view_cannot_be_written() -> None:
    """Code that is no Python writes through a view into a prefix that others share."""
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", WRITING], cwd=root, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.returncode) == ("read\n", -11), ended.stderr


def test_a_forked_child_is_refused(cache: Any) -> None:
    """A child ends its parent's views."""
    lease = lease_of(cache, keys_of(cache, 1, 2))
    write(cache, lease)
    view = cache.sequence_view(lease)

    def child() -> int:
        refused = 0
        for call in (lambda: view.kv(0), view.close, lambda: cache.sequence_view(lease)):
            try:
                call()
            except ClosedError:
                refused += 1
        return refused

    assert in_child(child) == 3
    assert same(cache, lease, view)


# ---------------------------------------------------------------- refused


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as told:
        config_for(**changes)
    assert told.value.path == "tiers[0].sequence_views"
    return str(told.value)


def test_configurations_that_cannot_have_views_are_refused_with_numbers() -> None:
    """Views show garbage, or the mistake is found far from where it was made."""
    assert "layout layer_token_major" in refusal(model={"layout": "layer_token_major"})
    text = refusal(model={"block_tokens": 12})
    assert "6144 bytes is not whole pages of 4096" in text
    assert "block_tokens: 8 or" in text
    groups = [
        {"kind": "full", "layers": layers, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"} for layers in (2, 4)
    ]
    mixed = {name: MODEL[name] for name in ("name", "weights_epoch", "block_tokens", "layout")} | {"groups": groups}
    with pytest.raises(ConfigError, match="blocks of 4096 and 8192 bytes"):
        kvtier.load_config({"model": mixed, "tiers": [{"type": "gpu", "capacity": "64KiB", "sequence_views": True}]})
    with pytest.raises(ConfigError, match="neither true nor false"):
        config_for(gpu={"sequence_views": "perhaps"})


def test_groups_of_equal_blocks_have_views_each() -> None:
    """The second group's view shows the blocks of the first, or none."""
    groups = [
        {"kind": "full", "layers": [layer], "kv_heads": HEADS, "head_dim": 2 * DIM, "dtype": "float32"}
        for layer in (0, 1)
    ]
    mixed = {name: MODEL[name] for name in ("name", "weights_epoch", "block_tokens", "layout")} | {"groups": groups}
    with kvtier.open_sync(
        {"model": mixed, "tiers": [{"type": "gpu", "capacity": "64KiB", "sequence_views": True}]}
    ) as cache:
        lease = lease_of(cache, keys_of(cache, 1, 3))
        for group in (0, 1):
            for slot in lease.slots(group):
                cache.kv(group, group)["v"][slot] = slot
        for group in (0, 1):
            view = cache.sequence_view(lease, group)
            assert [int(view.kv(group)["v"][i * BLOCK_TOKENS, 0, 0]) for i in range(3)] == [*lease.slots(group)]
            with pytest.raises(UsageError, match="no layer"):
                view.kv(1 - group)


def test_a_configuration_made_by_hand_is_tested_when_it_is_opened() -> None:
    """Who makes a Config in code gets views of other tokens."""
    gpu, host = config_for().tiers
    small = replace(config_for(gpu={"sequence_views": False}, model={"block_tokens": 12}), tiers=(gpu, host))
    with pytest.raises(ConfigError, match=r"tiers\[0\].sequence_views: a block of 6144 bytes .* 2 times"):
        kvtier.open_sync(small)
    layered = config_for(gpu={"sequence_views": False}, model={"layout": "layer_token_major"})
    with kvtier.open_sync(replace(layered, tiers=(gpu, host))) as cache:
        lease = lease_of(cache, keys_of(cache, 1, 2))
        with pytest.raises(UsageError, match="layout token_major"):
            cache.sequence_view(lease)


def test_a_managers_pages_have_none() -> None:
    """The key is accepted where it does nothing."""
    with pytest.raises(ConfigError, match="sequence_views"):
        open_managed(config_for(), tokens_max=64)


def test_what_cannot_be_viewed_is_told(cache: Any) -> None:
    """A mistake looks like a bug, or shows another's memory."""
    lease = lease_of(cache, keys_of(cache, 1, 2))
    view = cache.sequence_view(lease)
    for wrong in (
        lambda: cache.sequence_view(view),
        lambda: cache.sequence_view(lease, 1),
        lambda: cache.sequence_view(lease, "0"),
        lambda: view.kv(LAYERS),
        lambda: view.kv("k"),
    ):
        with pytest.raises(UsageError):
            wrong()
    with kvtier.open_sync(config_for(gpu={"sequence_views": False})) as other:
        with pytest.raises(UsageError, match="another cache"):
            cache.sequence_view(foreign := lease_of(other, keys_of(other, 1, 2)))
        with pytest.raises(UsageError, match="sequence_views: true"):
            other.sequence_view(foreign)


def test_more_blocks_than_the_machine_maps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with too many views fails in its next allocation, whatever that is for."""
    monkeypatch.setattr("kvtier.allocator.host_memory.mappings_max", lambda: 16)
    with kvtier.open_sync(config_for()) as cache:
        lease = lease_of(cache, keys_of(cache, 1, 5))
        view = cache.sequence_view(lease)
        with pytest.raises(OutOfMemory, match="5 blocks more than the 5 shown exceed the 8"):
            cache.sequence_view(lease)
        view.close()
        cache.sequence_view(lease)


def test_mappings_are_joined_where_slots_follow_each_other() -> None:
    """A tier or a view takes a mapping for each slot, and a process has 65530."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:kvtier-gpu")

    before = mappings()
    with kvtier.open_sync(config_for()) as cache:
        assert mappings() == before + 1
        lease = lease_of(cache, keys_of(cache, 1, 5))
        assert lease.slots() == (1, 2, 3, 4, 5)
        cache.sequence_view(lease)
        assert mappings() == before + 2
        cache.top_tier.sequences.show((1, 3, 5, 2))
        assert mappings() == before + 6


def test_the_default_way_is_as_it_was() -> None:
    """A tier without views pays for them with small granules."""
    size = {"capacity": "1MiB", "capacity_max": "1MiB"}
    with kvtier.open_sync(config_for(gpu=size | {"sequence_views": False})) as cache:
        assert cache.top_tier.geometry.granule_bytes == 16 << 10
        assert cache.top_tier.sequences is None


def test_a_granule_is_a_slot_of_any_size() -> None:
    """Slots straddle granules, or a tier has fewer than its memory holds."""
    size = {"capacity": "1MiB", "capacity_max": "1MiB"}
    with kvtier.open_sync(config_for(gpu=size, model={"block_tokens": 24})) as cache:
        assert cache.top_tier.geometry.granule_bytes == 3 * BLOCK_BYTES
        assert cache.stats()["tiers"]["gpu"]["slots_free"] == (1 << 20) // (3 * BLOCK_BYTES) - 1
        keys = kvtier.hash_blocks(range(48), cache.config.model)
        lease = cache.reserve(cache.match(keys, "req"), 2)
        for slot in lease.slots():
            cache.kv(0, 1)["k"][slot] = slot
        assert cache.sequence_view(lease).kv(1)["k"][:, 1, 15].tolist() == [1.0] * 24 + [2.0] * 24
