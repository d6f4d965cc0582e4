"""Carrying batches out: whatever a tier does or says, the batch is acknowledged with outcomes that can be."""

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


def test_a_cache_over_a_lying_disk_serves_from_memory(tmp_path):
    """The engine stops with a bug of its own where a disk has one."""
    import kvtier

    config = config_for(tmp_path / "store")
    with kvtier.open_sync(config) as cache:
        disk = cache._engine._executor._tiers[-1]
        disk.write = lambda batch: (
            [Outcome(Status.DONE, -1)] * (len(batch.items) + len(batch.evict) + bool(batch.sidecar))
        )
        keys = prompt(config, 1, 4)
        serve(cache, keys)
        assert cache.flush().failed == 4
        assert serve(cache, keys).tokens_ready == 16
        del disk.write
        assert cache.check() == []
