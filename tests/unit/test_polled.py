"""The seam for a foreign top tier: jobs out, per-block outcomes in; we never see its memory."""

import pytest

import kvtier
from kvtier.allocator.slot_pool import SlotPool
from kvtier.blocks.namespace import NamespaceTable
from kvtier.cache.leases import NoRoom
from kvtier.cache.level import Level, Room
from kvtier.engine.answers import Dropped
from kvtier.engine.core import Core
from kvtier.engine.executor import carry_out
from kvtier.engine.polled import Drop, Job, Load, PolledSurface, Store, drive
from kvtier.errors import UsageError
from kvtier.policies.lru import LRU
from kvtier.testing.dict_tier import DictTier
from kvtier.tiers.host import HostTier
from kvtier.types import DONE, PAGE_BYTES, BatchDone, Outcome, Status
from tests.cache_bench import config_for
from tests.cache_bench import prompt as real_prompt
from tests.cache_bench import serve as real_serve
from tests.engine_bench import BLOCK_BYTES, content_of, prompt, tiny_model


class FakeEngine:
    """Somebody else's GPU: a dict of its own blocks, filled and read by jobs that end when told."""

    def __init__(self, slots):
        self.slots = slots
        self.memory = {}  # key -> bytes
        self.jobs = []
        self.done = []
        self.fails = set()

    def start(self, job):
        self.jobs.append(job)

    def finish_all(self):
        for job in self.jobs:
            outcomes = []
            for key, slot in zip(job.keys, job.slots, strict=True):
                if key in self.fails:
                    outcomes.append(Outcome(Status.FAILED))
                    continue
                view = self.slots.slot(slot)
                if job.kind == "store":
                    view[:BLOCK_BYTES] = self.memory[key]
                else:
                    self.memory[key] = bytes(view[:BLOCK_BYTES])
                outcomes.append(DONE)
            self.done.append(BatchDone(job.job_id, tuple(outcomes)))
        self.jobs.clear()

    def finished(self):
        done, self.done = self.done, []
        return done


class Bench:
    """A core whose fastest tier is host memory, a disk below, and a foreign engine on top."""

    def __init__(self, slots=8, disk=None, groups=1):
        self.model = tiny_model(groups=groups)
        self.disk = disk or DictTier()
        self.host = HostTier.create(
            name="host",
            capacity_bytes=slots * PAGE_BYTES,
            length_bytes_max=BLOCK_BYTES,
            pin="off",
            hugepages="off",
        )
        levels = [
            Level(
                "host",
                LRU(slots),
                "lru",
                slots,
                1 << 16,
                slots * PAGE_BYTES,
                PAGE_BYTES,
                pool=SlotPool(slots, null_slot=False),
            ),
            Level(
                "lmdb",
                LRU(100),
                "lru",
                100,
                1 << 16,
                1 << 20,
                0,
                room=Room(self.disk.room, self.disk.neighbours, self.disk.used_bytes, self.disk.excess_bytes),
            ),
        ]
        self.core = Core(self.model, levels, NamespaceTable())
        self.core.adopt(1, self.disk.scan())
        self.surface = PolledSurface(self.core)
        self.foreign = FakeEngine(self.host)
        self.now_s = 0.0

    def step(self):
        for batch in self.core.plan(self.now_s):
            self.core.apply(carry_out([self.host, self.disk], batch), self.now_s)
        answers = drive(self.surface, self.foreign)
        assert not self.core.check()
        return answers

    def run(self):
        """Step until nothing moves any more."""
        for _ in range(10):
            self.step()
        assert not self.core.busy

    def store(self, keys):
        for group in keys.groups:
            for key in group:
                self.foreign.memory.setdefault(key, content_of(key, BLOCK_BYTES))
        self.surface.submit(Store(keys, "req"), self.now_s)
        answers = self.step()
        self.foreign.finish_all()
        self.step()
        return answers

    def load(self, keys):
        self.foreign.memory.clear()
        match = self.core.match(keys, "req", None, self.now_s + 30)
        self.surface.submit(Load(match, 1.0), self.now_s)
        self.run()
        self.foreign.finish_all()
        self.step()
        return dict(self.foreign.memory)


@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_of_a_foreign_engine_go_down_and_come_back(groups):
    """An engine that owns its GPU cannot use the tiers, or gets other bytes back."""
    bench = Bench(groups=groups)
    keys = prompt(1, 3, bench.model)
    bench.store(keys)
    assert bench.core.peek(keys).tokens == 12
    bench.core.submit_flush()
    bench.run()
    fresh = Bench(disk=bench.disk, groups=groups)
    restored = fresh.load(keys)
    assert restored == {key: content_of(key, BLOCK_BYTES) for group in keys.groups for key in group}
    assert fresh.core.stats()["leases"] == 0


def test_known_blocks_are_not_asked_for_again():
    """The engine copies what the tiers have."""
    bench = Bench()
    bench.store(prompt(1, 2))
    bench.foreign.memory = {key: content_of(key, BLOCK_BYTES) for key in prompt(1, 3).groups[0]}
    bench.surface.submit(Store(prompt(1, 3), "req"), 0.0)
    bench.step()
    assert [job.keys for job in bench.foreign.jobs] == [prompt(1, 3).groups[0][2:]]


def test_blocks_are_visible_only_when_their_copy_is_done():
    """A failed copy is served (LMCache#4991), or half a batch takes the other half with it."""
    bench = Bench()
    keys = prompt(1, 3)
    bench.foreign.fails.add(keys.groups[0][1])
    bench.store(keys)
    assert bench.core.peek(keys).tokens == 4
    bench.foreign.fails.clear()
    bench.store(keys)
    assert bench.core.peek(keys).tokens == 12
    assert bench.core.stats()["leases"] == 0


def test_no_room_is_an_answer_and_not_a_job():
    """A store that does not fit hangs."""
    bench = Bench(slots=4)
    answers = bench.store(prompt(1, 5))
    assert [type(answer) for _, answer in answers] == [NoRoom]
    assert not bench.foreign.jobs


def test_a_jobs_slots_are_not_used_for_anything_else_until_it_ends():
    """A slow engine reads or writes a slot that has another block by now."""
    bench = Bench(slots=4)
    keys = prompt(1, 3)
    bench.store(keys)
    match = bench.core.match(keys, "req", None, 30.0)
    bench.surface.submit(Load(match, 1.0), 0.0)
    bench.step()
    (job,) = bench.foreign.jobs
    assert [type(answer) for _, answer in bench.store(prompt(2, 3))] == [NoRoom]
    assert [bytes(bench.host.slot(s)[:BLOCK_BYTES]) for s in job.slots] == [
        content_of(key, BLOCK_BYTES) for key in job.keys
    ]


def test_answers_that_do_not_fit_a_job_are_refused():
    """A completion count stands for success (dynamo#15079)."""
    bench = Bench()
    bench.surface.submit(Store(prompt(1, 3), "req"), 0.0)
    bench.core.plan(0.0)
    ((_, job),) = bench.surface.poll()
    assert isinstance(job, Job)
    with pytest.raises(UsageError, match="3 keys, 1 outcomes"):
        bench.surface.apply(BatchDone(job.job_id, (DONE,)))
    assert bench.core.peek(prompt(1, 3)).tokens == 0
    for slot, key in zip(job.slots, job.keys, strict=True):
        bench.host.slot(slot)[:BLOCK_BYTES] = content_of(key, BLOCK_BYTES)
    bench.surface.apply(BatchDone(job.job_id, (DONE, DONE, DONE)))
    bench.surface.apply(BatchDone(job.job_id, (DONE, DONE, DONE)))
    bench.surface.apply(BatchDone(9999, (DONE,)))
    assert bench.core.peek(prompt(1, 3)).tokens == 12


@pytest.mark.parametrize("request_of", [lambda keys, match: Store(keys, "dead"), lambda keys, match: Load(match, 9.0)])
def test_what_a_dead_owner_never_fetched_is_no_job_any_more(request_of, tmp_path):
    """A scheduler that polls for all owners copies into slots that another request has by now."""
    with kvtier.open_sync(config_for(tmp_path)) as cache:
        keys = real_prompt(cache.config, 1, 2)
        real_serve(cache, real_prompt(cache.config, 1, 2))
        ticket = cache.submit(request_of(real_prompt(cache.config, 2, 2), cache.match(keys, owner="dead")))
        assert cache.release_owner("dead") >= 1
        ((answered, answer),) = cache.poll()
        assert answered == ticket
        assert isinstance(answer, kvtier.NoRoom)
        assert answer.slots_needed >= 1
        assert cache.stats()["leases"] == 0
        assert cache.poll() == []


@pytest.mark.parametrize("outcomes", [None, 5, "DONE", (1,), ()])
def test_outcomes_that_are_none_are_refused_and_the_cache_lives(outcomes, tmp_path):
    """A mistake of the engine around it stops the cache for good."""
    with kvtier.open_sync(config_for(tmp_path)) as cache:
        cache.submit(Store(real_prompt(cache.config, 1, 2), "me"))
        ((_, job),) = cache.poll()
        with pytest.raises(kvtier.UsageError, match="an Outcome for each"):
            cache.apply(BatchDone(job.job_id, outcomes))
        cache.apply(BatchDone(job.job_id, (DONE,) * len(job.keys)))
        assert cache.peek(real_prompt(cache.config, 1, 2)).tokens


def test_a_block_that_is_being_stored_is_not_asked_for_again():
    """Two requests of one prompt each copy all of it."""
    bench = Bench(slots=8)
    keys = prompt(1, 3, bench.model)
    bench.surface.submit(Store(keys.prefix(8), "first"), 0.0)
    bench.surface.submit(Store(keys, "second"), 0.0)
    bench.step()
    first, second = bench.foreign.jobs
    assert [*first.keys, *second.keys] == [*keys.groups[0]]
    bench.foreign.jobs.clear()
    bench.surface.apply(BatchDone(first.job_id, (Outcome(Status.FAILED),) * 2))
    bench.surface.submit(Store(keys, "third"), 0.0)
    bench.step()
    assert [job.keys for job in bench.foreign.jobs] == [first.keys]


@pytest.mark.parametrize("fetched", [False, True])
def test_a_dead_owners_store_keeps_nobody_from_storing(fetched):
    """A worker that died in the middle of a copy makes its blocks impossible to store."""
    bench = Bench(slots=8)
    keys = prompt(1, 3, bench.model)
    bench.surface.submit(Store(keys, "dead"), 0.0)
    if fetched:
        bench.step()
    bench.core.release_owner("dead")
    bench.step()
    bench.foreign.jobs.clear()
    bench.store(keys)
    assert bench.core.peek(keys).tokens == 12


def test_a_job_of_nothing_holds_no_slot():
    """An offer of what is known already, or a load of what is lost, takes a slot until somebody answers for nothing."""
    bench = Bench(slots=4)
    keys, others = prompt(1, 3, bench.model), prompt(2, 2, bench.model)
    bench.store(keys)
    match = bench.core.match(others, "req", None, 30.0)
    tickets = [bench.surface.submit(request, 0.0) for request in (Store(keys, "req"), Load(match, 1.0))]
    answers = dict(bench.surface.poll())
    assert [(answers[t].kind, answers[t].keys, answers[t].slots) for t in tickets] == [
        ("store", (), ()),
        ("load", (), ()),
    ]
    assert bench.core.stats()["leases"] == bench.core.stats()["matches"] == 0
    for ticket in tickets:
        bench.surface.apply(BatchDone(answers[ticket].job_id, ()))
    assert not bench.core.check()


def test_a_drop_may_be_asked_for_without_waiting():
    """An engine that must not wait cannot forget what its old weights have computed."""
    bench = Bench()
    keys = prompt(1, 3, bench.model)
    bench.store(keys)
    ticket = bench.surface.submit(Drop(), 0.0)
    assert bench.core.peek(keys).tokens == 0
    answers = [answer for _ in range(3) for answer in bench.step()]
    assert answers == [(ticket, Dropped(durable=True))]
    for wrong in (5, "x", [b""]):
        with pytest.raises(UsageError, match="namespace"):
            bench.surface.submit(Drop(wrong), 0.0)
