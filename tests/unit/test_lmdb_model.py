"""Random writes, evictions, drops, reads and reopenings, against a dict that knows what must be there."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.testing.stores import StoreDriver
from kvtier.types import DONE, Outcome, Status

LENGTHS = (1, 4096, 4097, 9000, 16_384, 40_000)


class Store(RuleBasedStateMachine):
    """`model` maps block number -> (length, acknowledged outcome); a number is never used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-model-"))
        self.store = StoreDriver(self.folder / "s", capacity_bytes=2_500_000, length_bytes_max=40_000)
        self.model: dict[int, tuple[int, Outcome]] = {}
        self.gone: dict[int, tuple[int, Outcome]] = {}
        self.number = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(length=st.sampled_from(LENGTHS), blocks=st.integers(1, 24), data=st.data())
    def write(self, length: int, blocks: int, data: st.DataObject) -> None:
        evict = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)) if self.model else []
        used_places = {stored.place for _, stored in self.model.values()}
        numbers = range(self.number, self.number + blocks)
        self.number += blocks
        room = self.store.tier.room(length)
        statuses = self.store.write(numbers, length, evict)
        assert statuses == [Status.DONE] * min(room, blocks) + [Status.NO_ROOM] * max(0, blocks - room) + [
            Status.DONE
        ] * len(evict)
        for number in evict:
            self.gone[number] = self.model.pop(number)
        for number in numbers[:room]:
            self.model[number] = self.store.kept[number]
            assert self.model[number][1].place not in used_places, "written into a slot that the batch evicts"

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        assert self.store.read(numbers) == [Status.DONE] * len(numbers)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def read_and_evict_what_is_gone(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.gone)))
        self.store.kept = {**self.model, number: self.gone[number]}
        assert self.store.read([number]) == [Status.MISSING]
        assert self.store.write([], evict=[number]) == [Status.MISSING]
        self.store.kept = dict(self.model)

    @rule()
    def drop(self) -> None:
        assert self.store.tier.drop(self.store.namespace) == DONE
        self.gone |= self.model
        self.model = {}
        self.store.kept = {}

    @rule()
    def reopen(self) -> None:
        self.store.reopen()

    @invariant()
    def agrees(self) -> None:
        assert self.store.kept == self.model
        assert self.store.tier.check() == []
        assert self.store.tier.used_bytes() == sum(-(-length // 4096) * 4096 for length, _ in self.model.values())


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
