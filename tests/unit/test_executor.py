"""Carrying batches out: whatever a tier does or says, the batch is acknowledged with outcomes that can be."""

import threading
from dataclasses import replace

import pytest

from kvtier.engine.executor import Executor, carry_out
from kvtier.testing.dict_tier import DictTier
from kvtier.types import DONE, Outcome, Status, Transfer, TransferBatch, store_key
from tests.cache_bench import config_for, prompt, serve

KEY = store_key(0, bytes(16) + bytes(4))
TRANSFER = Transfer(0, KEY, 1, 0, 0, 64)
LIES = [
    "ok",
    None,
    True,
    Outcome("done"),
    Outcome(Status.DONE, -5),
    Outcome(Status.DONE, 10**30),
    Outcome(Status.DONE, "x"),
    Outcome(Status.DONE, 1.0),
    Outcome(Status.DONE, True),
    Outcome(Status.DONE, 1, -1),
    Outcome(Status.DONE, 1, 1 << 64),
    Outcome(Status.DONE, 1, None),
]


class Memory(DictTier):
    """Lends slots of zeros."""

    stride_bytes = 4096

    def __init__(self):
        super().__init__()
        self.traits = replace(self.traits, persistent=False)

    def slot(self, place):
        return memoryview(bytearray(4096))


class Says(DictTier):
    """A disk that does nothing and says `answer`, or raises it."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def write(self, batch):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def read(self, items):
        return self.write(items)


def batch(source, target):
    return TransferBatch(7, source, target, (TRANSFER, TRANSFER))


@pytest.mark.parametrize("lie", LIES, ids=repr)
@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_an_outcome_that_cannot_be_is_a_failure_of_its_block_alone(lie, source, target):
    """A tier of somebody else's stops the whole cache with one odd answer, or its place overflows a column."""
    good = Outcome(Status.DONE, 3, 4)
    done = carry_out([Memory(), Says([lie, good])], batch(source, target))
    assert [outcome.status for outcome in done.outcomes] == [Status.FAILED, Status.DONE]
    assert "the tier answered" in done.outcomes[0].detail
    assert done.outcomes[1] is good


@pytest.mark.parametrize("answer", [[], [DONE] * 3, SystemExit(1), KeyboardInterrupt(), GeneratorExit(), OSError(5)])
def test_a_batch_without_outcomes_is_acknowledged_as_failed(answer):
    """A worker that ends in the middle of a batch leaves its waiters to wait for ever."""
    reported = []
    executor = Executor([Memory(), Says(answer)], reported.append)
    executor.submit(batch(0, 1))
    executor.submit(batch(1, 0))
    executor.close()
    assert [[outcome.status for outcome in done.outcomes] for done in reported] == [[Status.FAILED] * 2] * 2


class Groups(DictTier):
    """A disk that takes batches together, once the test lets the first one go. `told`: the items of each call."""

    def __init__(self, answer=None):
        super().__init__()
        self.answer = answer
        self.told = []
        self.first, self.go = threading.Event(), threading.Event()

    def write(self, batch):
        self.told.append([len(batch.items)])
        self.first.set()
        assert self.go.wait(60)
        return [DONE] * len(batch.items)

    def write_together(self, batches):
        self.told.append([len(batch.items) for batch in batches])
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer or [[DONE] * len(batch.items) for batch in batches]


def run_grouped(disk):
    """One batch alone, and three that came while it was written: what was reported, by number."""
    reported = []
    executor = Executor([Memory(), disk], reported.append)
    assert executor.submit(replace(batch(0, 1), batch_id=0))
    assert disk.first.wait(60)
    for number in (1, 2, 3):
        assert executor.submit(replace(batch(0, 1), batch_id=number, transfers=(TRANSFER,) * number))
    disk.go.set()
    executor.close()
    return [(done.batch_id, [outcome.status for outcome in done.outcomes]) for done in reported]


def test_batches_that_wait_are_written_together():
    """Each pays for a flush of its own; or one is lost, or reported twice, or with the outcomes of another."""
    disk = Groups()
    ended = run_grouped(disk)
    assert disk.told == [[2], [1, 2, 3]]
    assert ended == [(0, [Status.DONE] * 2), *((n, [Status.DONE] * n) for n in (1, 2, 3))]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (SystemExit(1), Status.FAILED),
        ([[DONE]], Status.FAILED),
        ([[DONE]] * 3, Status.FAILED),
        ([[Outcome(Status.DONE, -1)], [DONE] * 2, [DONE] * 3], None),
    ],
)
def test_a_group_is_acknowledged_whatever_the_tier_says(answer, status):
    """Whoever waits for one of the batches waits for ever."""
    ended = run_grouped(Groups(answer))
    assert [number for number, _ in ended] == [0, 1, 2, 3]
    if status is None:
        assert ended[1:] == [(1, [Status.FAILED]), (2, [Status.DONE] * 2), (3, [Status.DONE] * 3)]
    else:
        assert ended[1:] == [(n, [status] * n) for n in (1, 2, 3)]


def test_an_executor_that_has_ended_takes_no_batch():
    """A batch is refused and reported, or neither."""
    disk = Groups()
    disk.go.set()
    reported = []
    executor = Executor([Memory(), disk], reported.append)
    executor.close()
    assert not executor.submit(batch(0, 1))
    assert not executor.submit(batch(1, 0))
    assert reported == []


def test_a_cache_over_a_lying_disk_serves_from_memory(tmp_path):
    """The engine stops with a bug of its own where a disk has one."""
    import kvtier

    config = config_for(tmp_path / "store")
    with kvtier.open_sync(config) as cache:
        disk = cache._engine._executor._tiers[-1]
        disk.write = lambda batch: (
            [Outcome(Status.DONE, -1)] * (len(batch.items) + len(batch.evict) + bool(batch.sidecar))
        )
        disk.write_together = lambda batches: [disk.write(batch) for batch in batches]
        keys = prompt(config, 1, 4)
        serve(cache, keys)
        assert cache.flush().failed == 4
        assert serve(cache, keys).tokens_ready == 16
        del disk.write
        assert cache.check() == []
