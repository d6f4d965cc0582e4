"""What callers get wrong: every verb of both faces refuses it as their mistake, names it, and goes on working."""

import math
from fractions import Fraction

import numpy as np
import pytest

import kvtier
from kvtier.engine import arguments
from kvtier.engine.polled import Load, Reserve, Store
from kvtier.errors import UsageError
from tests.cache_bench import config_for, prompt, serve

NO_TEXT = [None, 5, 5.0, b"me", ["me"], object()]
NO_SECONDS = [
    "x",
    "5",
    b"5",
    math.nan,
    math.inf,
    -math.inf,
    -1,
    1e300,
    1e10,  # more than a lock can wait
    10**400,
    True,
    [1.0],
    1j,
    np.array([1.0, 2.0]),
    object(),
]
NO_COUNT = [
    None,
    "5",
    1.5,
    b"5",
    True,
    np.bool_(True),
    -1,
    10**400,
    10**5000,
    -(10**5000),
    math.nan,
    [1],
    np.array([1, 2]),
]


class Unspeakable:
    """It cannot even be shown, nor is it a number."""

    def __repr__(self):
        raise RuntimeError("no words")

    def __float__(self):
        raise ZeroDivisionError

    def __index__(self):
        raise ZeroDivisionError


@pytest.fixture
def cache(tmp_path):
    with kvtier.open_sync(config_for(tmp_path / "store")) as cache:
        yield cache
        assert serve(cache, prompt(cache.config, 9, 2)).tokens_ready == 0  # it goes on
        assert cache.check() == []
        assert cache.stats()["leases"] == 0


def refused(call, name):
    with pytest.raises(UsageError, match=name) as told:
        call()
    assert type(told.value) is UsageError
    assert len(str(told.value)) < 300, "a message that nobody reads"


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("owner", [*NO_TEXT, Unspeakable()], ids=lambda owner: type(owner).__name__)
def test_an_owner_that_nobody_can_release_is_refused(cache, owner):
    """Slots of a dead owner that has no name are held for ever: `release_owner` takes only texts."""
    keys = prompt(cache.config, 1, 2)
    refused(lambda: cache.match(keys, owner=owner), "owner is .*; pass a str")
    refused(lambda: cache.submit(Store(keys, owner)), "owner is .*; pass a str")
    refused(lambda: cache.release_owner(owner), "owner is .*; pass a str")
    assert cache.stats()["matches"] == 0
    assert cache.stats()["lookups"] == 0, "a refused call is counted"


@pytest.mark.parametrize("name", [*NO_TEXT[1:], Unspeakable()], ids=lambda name: type(name).__name__)
def test_other_names_are_texts_too(cache, name):
    """A session that is no text is taken, and is lost on the policies."""
    keys = prompt(cache.config, 1, 2)
    refused(lambda: cache.match(keys, owner="me", session=name), "session is .*; pass a str or None")
    refused(lambda: cache.set_weights_epoch(name), "epoch is .*; pass a str")
    refused(lambda: cache.resize(name, 1 << 20), "tier is .*; pass a str")
    cache.release(cache.match(keys, owner="me", session=None))


# ---------------------------------------------------------------- seconds


@pytest.mark.parametrize("value", [*NO_SECONDS, Unspeakable()], ids=lambda value: f"{type(value).__name__}")
def test_what_is_no_time_is_refused(cache, value):
    """Python's own error comes out of a lock, or the engine's thread ends and the next call hangs."""
    keys = prompt(cache.config, 1, 2)
    match = cache.match(keys, owner="me")
    refused(lambda: cache.match(keys, owner="me", ttl_s=value), "ttl_s")
    refused(lambda: cache.reserve(match, 2, load_deadline_s=value), "load_deadline_s")
    refused(lambda: cache.submit(Reserve(match, 2, value)), "load_deadline_s")
    refused(lambda: cache.submit(Load(match, value)), "load_deadline_s")
    refused(lambda: cache.prefilled(10, value), "seconds")
    refused(lambda: cache.flush(timeout_s=value), "timeout_s")
    refused(lambda: cache.close(value), "flush_s")
    cache.release(match)
    assert cache.flush().failed == 0, "a close that was refused has closed it"


async def test_the_asyncio_face_refuses_it_as_well(tmp_path):
    """`aclose("x")` closes without a flush, and says so with an error from the event loop."""
    async with kvtier.open(config_for(tmp_path / "store")) as cache:
        keys = prompt(cache.config, 1, 2)
        match = cache.match(keys, owner="me")
        for value in [*NO_SECONDS, Unspeakable(), None]:
            with pytest.raises(UsageError, match="flush_s"):
                await cache.aclose(flush_s=value)
            if value is not None:
                with pytest.raises(UsageError, match="load_deadline_s"):
                    await cache.reserve(match, 2, load_deadline_s=value)
                with pytest.raises(UsageError, match="ttl_s"):
                    cache.match(keys, owner="me", ttl_s=value)
        assert (await cache.flush()).failed == 0
        with pytest.raises(UsageError, match="owner is None"):
            cache.match(keys, owner=None)
    assert await cache.aclose() == 0
    with pytest.raises(UsageError, match="flush_s"):
        await cache.aclose(flush_s="x")  # a mistake is one whether it is closed or not


def test_the_longest_time_is_served(tmp_path):
    """A deadline that means "as long as it takes" stops the engine's thread, and everybody hangs."""
    longest_s = arguments.SECONDS_MAX
    with kvtier.open_sync(config_for(tmp_path / "store")) as cache:
        keys = prompt(cache.config, 1, 2)
        match = cache.match(keys, owner="me", ttl_s=longest_s)  # from now on the engine sleeps for so long
        assert cache.flush(timeout_s=longest_s).failed == 0
        lease = cache.reserve(match, 2, load_deadline_s=longest_s)
        cache.release(lease)
        cache.match(keys, owner="me", ttl_s=longest_s)
        assert cache.peek(keys).tokens == 0
        assert cache.close(longest_s) == 0
        refused(lambda: cache.close("x"), "flush_s")


@pytest.mark.parametrize("value", [0, 0.0, 1, np.float32(0.5), np.int64(2), Fraction(1, 3)], ids=repr)
def test_every_kind_of_number_is_taken(value):
    """A numpy scalar is refused."""
    assert arguments.seconds("wait_s", value) == float(value)
    assert type(arguments.seconds("wait_s", value)) is float


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize("value", [*NO_COUNT, Unspeakable()], ids=lambda value: f"{type(value).__name__}")
def test_what_is_no_count_is_refused(cache, value):
    """True is taken for one block, or an error comes from the inside."""
    keys = prompt(cache.config, 1, 2)
    match = cache.match(keys, owner="me")
    lease = cache.reserve(match, 2)
    key = keys.groups[0][0]
    refused(lambda: cache.reserve(match, value), "blocks_total")
    refused(lambda: cache.submit(Reserve(match, value)), "blocks_total")
    refused(lambda: cache.prefilled(value, 1.0), "tokens")
    refused(lambda: cache.prefilled(1, 1.0, start=value), "start")
    refused(lambda: cache.resize("gpu", value), "size_bytes")
    refused(lambda: cache.wake(restore="yes"), "restore")
    refused(lambda: cache.kv(value, 0), "group")
    refused(lambda: cache.kv(0, value), "layer")
    refused(lambda: cache.commit(lease, [(value, key)]), "slot")
    if not isinstance(value, (bool, Unspeakable)):
        refused(lambda: lease.slots(value), "group")
    if value is not None and not (isinstance(value, int) and value == -1):  # that is len([]) - 1
        refused(lambda: cache.match(keys, owner="me", tokens_max=value), "tokens_max")
        refused(lambda: cache.peek(keys, tokens_max=value), "tokens_max")
    cache.release(lease)


# ---------------------------------------------------------------- things of the cache


@pytest.mark.parametrize("thing", [None, 5, "x", [b"k"], Unspeakable()], ids=lambda thing: type(thing).__name__)
def test_other_things_in_the_place_of_ours_are_refused(cache, thing):
    """An AttributeError names a field that the caller has never heard of."""
    keys = prompt(cache.config, 1, 2)
    refused(lambda: cache.match(thing, owner="me"), "keys")
    refused(lambda: cache.peek(thing), "keys")
    refused(lambda: cache.prefetch(thing), "keys")
    refused(lambda: cache.submit(Store(thing, "me")), "keys")
    refused(lambda: cache.submit(thing), "request")
    refused(lambda: cache.apply(thing), "done")
    refused(lambda: cache.reserve(thing, 2), "match")
    refused(lambda: cache.release(thing), "held")
    refused(lambda: cache.commit(thing, []), "lease")
    lease = cache.reserve(cache.match(keys, owner="me"), 2)
    refused(lambda: cache.commit(lease, [thing]), "pairs")
    refused(lambda: cache.commit(lease, [(lease.slots()[0], thing)]), "key")
    if not isinstance(thing, list | str):
        refused(lambda: cache.commit(lease, thing), "pairs")
    cache.release(lease)


def test_a_lease_that_was_given_back_shows_no_slots(cache):
    """A caller writes into slots that belong to somebody else by now."""
    keys = prompt(cache.config, 1, 2)
    released = cache.reserve(cache.match(keys, owner="me"), 2)
    assert len(released.slots()) == 2
    cache.release(released)
    refused(released.slots, "was released")
    refused(lambda: cache.commit(released, []), "was released")
    taken = cache.reserve(cache.match(keys, owner="dead"), 2)
    cache.release_owner("dead")
    refused(taken.slots, "was released")
    assert "blocks=[2]" in repr(taken)  # it can be shown all the same


class OddText(str):
    __slots__ = ()

    def __eq__(self, other):
        raise RuntimeError("odd")

    __hash__ = None


class OddBytes(bytes):
    def __eq__(self, other):
        raise RuntimeError("odd")

    __hash__ = None


def test_a_text_of_an_odd_kind_is_taken_for_its_content(tmp_path):
    """A value that compares as it likes stops the engine for everybody."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 2)
    with kvtier.open_sync(config) as cache:
        cache.match(keys, OddText("me"))
        assert cache.release_owner(OddText("me")) == 1
        cache.set_weights_epoch(OddText("v2"))
        assert cache.resize(OddText("gpu"), 1 << 16)
        with pytest.raises(UsageError, match="no namespace"):
            cache.drop(OddBytes(32))
        lease = cache.reserve(cache.match(keys, "me"), 2)
        cache.commit(lease, [(lease.slots(0)[0], OddBytes(keys.groups[0][0]))])
        cache.release(lease)
        assert cache.check() == []


@pytest.mark.parametrize("hashes", [None, [None], "ab", [["x"]], [b"ab"], 5])
def test_hashes_that_are_none_are_refused(hashes):
    """`Keys.opaque` ends in a TypeError of its own code."""
    with pytest.raises(UsageError):
        kvtier.Keys.opaque(hashes, config_for().model)


@pytest.mark.parametrize("tokens", [None, "4", 4.0, True])
def test_a_prefix_of_no_number_is_refused(tokens):
    """`prefix` ends in a TypeError of its own code."""
    with pytest.raises(UsageError, match="pass an integer"):
        prompt(config_for(), 1, 2).prefix(tokens)
