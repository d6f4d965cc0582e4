"""The questions of a foreign scheduler: hits that stay, misses instead of waiting, and nothing held in the end."""

import threading
from dataclasses import replace

import pytest

import kvtier
from kvtier.engine.foreign import ForeignRequests, Seen
from kvtier.errors import InvariantError
from kvtier.testing.held import Gate
from kvtier.types import block_key
from tests.cache_bench import config_for

NOTHING = {"asked": 0, "jobs": 0}


class Scheduler:
    """Steps through requests over host memory of `slots` blocks and, if there is a path, a disk."""

    def __init__(self, slots, path=None, load_deadline_s=30.0):
        config = config_for(path, host=f"{slots * 4}KiB")
        self.cache = kvtier.open_sync(replace(config, tiers=config.tiers[1:], notes=()))
        self.requests = ForeignRequests(self.cache, "a test", load_deadline_s=load_deadline_s, steps_under_way=2)

    def look(self, request, keys):
        return [self.requests.seek(request, key) for key in keys]

    def found(self, request, keys):
        """What the request finds in the end."""
        while Seen.ASKED in (seen := self.look(request, keys)):
            self.requests.step()
        return seen.count(Seen.HIT)

    def looks(self, keys, request="later"):
        hits = self.found(request, keys)
        self.requests.forget(request)
        return hits

    def begin_store(self, keys, request="writer"):
        while (slots := self.requests.offer(request, keys)) is None and self.requests.busy:
            self.requests.step()
        for key, slot in (slots or {}).items():
            self.memory(slot)[:8] = key[:8]
        return slots

    def store(self, keys, request="writer"):
        slots = self.begin_store(keys, request)
        self.requests.stored(slots, success=True)

    def memory(self, slot):
        return self.cache.top_tier.slot(slot)

    def settle(self):
        while self.requests.busy:
            self.requests.step()


@pytest.fixture
def make():
    made = []

    def scheduler(*arguments, **options):
        made.append(Scheduler(*arguments, **options))
        return made[-1]

    yield scheduler
    for each in made:
        if not each.cache._engine.closed:
            each.settle()
            assert each.requests.held() == NOTHING
            assert each.cache.stats()["leases"] == each.cache.stats()["matches"] == 0
            assert each.cache.check() == []
            each.cache.close()


def keys_of(number, count):
    return [block_key(bytes([number, i]) * 16, 0) for i in range(count)]


def test_what_was_stored_is_a_hit_until_it_is_loaded(make):
    """Between a lookup and its load the slots get other content."""
    scheduler = make(4)
    keys = keys_of(1, 3)
    scheduler.store(keys)
    assert scheduler.found("req", keys) == 3
    assert scheduler.requests.offer("other", keys_of(2, 2)) is None
    assert scheduler.look("req", keys) == [Seen.HIT] * 3
    slots = scheduler.requests.take("req", keys)
    assert [bytes(scheduler.memory(slot)[:8]) for slot in slots] == [key[:8] for key in keys]
    assert scheduler.begin_store(keys_of(2, 2)) is None
    scheduler.requests.loaded("req")
    scheduler.store(keys_of(2, 4))
    assert scheduler.looks(keys_of(2, 4)) == 4


def test_a_store_under_way_is_pending_for_all_and_stored_once(make):
    """A block is computed twice, or read before it is there."""
    scheduler = make(8)
    keys = keys_of(1, 3)
    slots = scheduler.begin_store(keys[:2])
    assert scheduler.look("req", keys) == [Seen.PENDING, Seen.PENDING, Seen.MISS]
    more = scheduler.requests.offer("second", keys)
    assert list(more) == keys[2:]
    assert scheduler.requests.offer("third", keys) == {}
    scheduler.requests.stored(slots, success=True)
    scheduler.requests.stored(more, success=False)
    assert scheduler.looks(keys) == 2


def test_one_that_loads_nothing_holds_nothing(make):
    """A request that found its blocks elsewhere, or was aborted, keeps slots for good."""
    scheduler = make(4)
    keys = keys_of(1, 3)
    scheduler.store(keys)
    assert scheduler.found("req", keys) == 3
    assert scheduler.cache.stats()["leases"] == 1
    scheduler.requests.step(["req", "never heard of"])
    assert scheduler.cache.stats()["leases"] == 0
    scheduler.requests.forget("req")


def test_a_request_forgotten_while_it_loads_gives_its_slots_back(make, tmp_path):
    """The lease of a load that nobody waits for is never given back."""
    scheduler, gate, keys = over_held_disk(make, tmp_path, 30.0)
    assert scheduler.look("req", keys) == [Seen.ASKED] * 3
    scheduler.requests.step()
    gate.wait_for("read")
    scheduler.requests.forget("req")
    assert scheduler.requests.busy
    gate.let_go()
    scheduler.settle()
    assert scheduler.looks(keys) == 3


def test_a_disk_that_does_not_answer_is_a_miss_after_the_deadline(make, tmp_path):
    """A request waits for ever, or asks the disk again in every step."""
    scheduler, gate, keys = over_held_disk(make, tmp_path, 0.02)
    assert scheduler.found("req", keys) == 0
    scheduler.requests.step()
    assert scheduler.look("req", keys) == [Seen.MISS] * 3
    assert scheduler.requests.held() == {"asked": 1, "jobs": 0}
    gate.let_go()
    scheduler.requests.forget("req")


def over_held_disk(make, path, load_deadline_s):
    """A scheduler whose three blocks lie on a disk that does not answer a read."""
    keys = keys_of(1, 3)
    first = make(8, path / "store")
    first.store(keys)
    first.cache.close()
    scheduler = make(8, path / "store", load_deadline_s=load_deadline_s)
    gate = Gate(scheduler.cache._running._tiers[1])
    gate.hold("read")
    return scheduler, gate, keys


def test_a_reset_forgets_at_once_and_keeps_slots_in_use_out_of_it(make):
    """A store of before the reset is found after it, or its late copy writes over another block."""
    scheduler = make(6)
    old, new = keys_of(1, 3), keys_of(2, 3)
    scheduler.store(old)
    assert scheduler.found("loads", old) == 3
    scheduler.requests.take("loads", old)
    scheduler.begin_store(new)
    scheduler.requests.reset()
    assert scheduler.look("req", old + new) == [Seen.MISS] * 6
    assert scheduler.requests.offer("writer", new) is None  # all six may still be copied to or from
    assert scheduler.requests.held()["jobs"] == 2
    scheduler.settle()
    assert scheduler.looks(old) == 0
    scheduler.store(new)
    assert scheduler.looks(new) == 3


def test_a_reset_does_not_wait_for_a_disk(make, tmp_path):
    """A disk that hangs stalls the scheduler."""
    scheduler, keys = make(8, tmp_path / "store"), keys_of(1, 3)
    scheduler.store(keys)
    disk, answers = scheduler.cache._running._tiers[1], threading.Event()
    drop = disk.drop
    disk.drop = lambda namespace: (answers.wait(60), drop(namespace))[1]
    scheduler.requests.reset()
    assert scheduler.look("req", keys) == [Seen.MISS] * 3
    assert scheduler.requests.busy
    answers.set()


def test_a_cache_that_answers_no_more_is_a_miss(make, caplog):
    """An error of the cache ends the scheduler, or its requests wait for ever."""
    scheduler = make(8)
    keys = keys_of(1, 2)
    scheduler.store(keys)
    assert scheduler.found("sure", keys) == 2
    scheduler.look("waits", keys)
    slots = scheduler.begin_store(keys_of(2, 2))
    scheduler.requests.take("sure", keys)
    scheduler.cache.close()
    scheduler.requests.step()
    assert scheduler.look("waits", keys) == scheduler.look("new", keys) == [Seen.MISS] * 2
    assert scheduler.requests.offer("new", keys) is None
    scheduler.requests.loaded("sure")
    scheduler.requests.stored(slots, success=True)
    scheduler.requests.forget("waits")
    scheduler.requests.reset()
    assert scheduler.requests.errors
    assert not scheduler.requests.busy
    assert scheduler.requests.held() == NOTHING
    assert "goes on without kvtier" in caplog.text


def test_an_answer_that_cannot_be_fetched_for_a_moment_is_given_back(make, monkeypatch):
    """The lease of a refused load is nobody's."""
    scheduler = make(8)
    keys = keys_of(1, 2)
    scheduler.store(keys)
    scheduler.look("req", keys)

    def broken():
        raise InvariantError("for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.cache, "poll", broken)
        scheduler.requests.step()
        assert scheduler.look("req", keys) == [Seen.MISS] * 2
    scheduler.requests.forget("req")
    while scheduler.cache.stats()["leases"]:
        scheduler.requests.step()


def test_stores_from_several_requests_share_no_slot(make):
    """Two requests write into one slot."""
    scheduler = make(8)
    first, second = scheduler.begin_store(keys_of(1, 3), "a"), scheduler.begin_store(keys_of(2, 3), "b")
    assert not set(first.values()) & set(second.values())
    scheduler.requests.stored(second, success=True)
    scheduler.requests.stored(first, success=True)
    assert (scheduler.looks(keys_of(1, 3)), scheduler.looks(keys_of(2, 3))) == (3, 3)


def test_nothing_is_left_running(make):
    """A scheduler that ends leaves the thread of its cache behind."""
    scheduler = make(4)
    scheduler.store(keys_of(1, 2))
    scheduler.cache.close()
    assert not [t for t in threading.enumerate() if t is scheduler.cache._running._thread and t.is_alive()]
