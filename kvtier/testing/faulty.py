"""`FaultyTier`: a persistent tier that fails now and then, as its contract allows, over one that works.

Owns the odds and the chance that decides by them; `Odds.mend` makes it whole. Always: what fails is not done (a failed
write stores nothing, a failed eviction leaves the row), a failed read leaves anything behind in its buffer, and what
is reported DONE was done by the tier inside.

Units: odds, from 0 to 1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from random import Random

from kvtier.testing.exploring.store import ExploredStore
from kvtier.tiers.base import SupportsScrub, TierTraits
from kvtier.types import Outcome, ReadItem, Status, StoredBlock, WriteBatch

READ_FAULTS = (Status.FAILED, Status.MISSING, Status.CORRUPT)
TORN = b"\xee"
INJECTED = "injected"


@dataclass(slots=True)
class Odds:
    """How likely each fault is."""

    read_batch: float = 0.0  # all of a read fails alike
    read_item: float = 0.0
    write_batch: float = 0.0  # the whole transaction fails
    write_item: float = 0.0  # FAILED or NO_ROOM
    evict_item: float = 0.0
    sidecar: float = 0.0  # NO_ROOM for it alone
    drop: float = 0.0

    @staticmethod
    def names() -> list[str]:
        """Of all of them."""
        return [f.name for f in fields(Odds)]

    def mend(self) -> None:
        """Nothing fails from now on."""
        for name in self.names():
            setattr(self, name, 0.0)


class FaultyTier:
    """A tier over a tier. `odds` may be changed at any time."""

    def __init__(self, inner: ExploredStore, rng: Random, odds: Odds | None = None) -> None:
        self._inner = inner
        self._rng = rng
        self.odds = odds or Odds()
        self.faults = 0
        self.name = inner.name

    @property
    def traits(self) -> TierTraits:
        return self._inner.traits

    # ------------------------------------------------------------ verbs that fail

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        if self._happens(self.odds.read_batch):
            status = self._rng.choice(READ_FAULTS)
            return [self._torn(item, status) for item in items]
        failed = {
            index: self._rng.choice(READ_FAULTS) for index, _ in enumerate(items) if self._happens(self.odds.read_item)
        }
        whole = iter(self._inner.read([item for index, item in enumerate(items) if index not in failed]))
        return [self._torn(item, failed[index]) if index in failed else next(whole) for index, item in enumerate(items)]

    def scrub(self, blocks: Sequence[StoredBlock]) -> list[Outcome]:
        """Of a tier that can; with the faults of `read`."""
        assert isinstance(self._inner, SupportsScrub)
        if self._happens(self.odds.read_batch):
            return [Outcome(self._rng.choice(READ_FAULTS), detail=INJECTED)] * len(blocks)
        return [
            Outcome(self._rng.choice(READ_FAULTS), detail=INJECTED) if self._happens(self.odds.read_item) else outcome
            for outcome in self._inner.scrub(blocks)
        ]

    def write(self, batch: WriteBatch) -> list[Outcome]:
        count = len(batch.items) + len(batch.evict) + bool(batch.sidecar)
        if count and self._happens(self.odds.write_batch):
            return [Outcome(self._rng.choice((Status.FAILED, Status.NO_ROOM)), detail=INJECTED)] * count
        refused = {
            index: self._rng.choice((Status.FAILED, Status.NO_ROOM))
            for index, _ in enumerate(batch.items)
            if self._happens(self.odds.write_item)
        }
        staying = {index for index, _ in enumerate(batch.evict) if self._happens(self.odds.evict_item)}
        no_note = bool(batch.sidecar) and self._happens(self.odds.sidecar)
        done = self._inner.write(
            WriteBatch(
                [item for index, item in enumerate(batch.items) if index not in refused],
                [item for index, item in enumerate(batch.evict) if index not in staying],
                {} if no_note else batch.sidecar,
            )
        )
        outcomes = iter(done)
        written = [
            Outcome(refused[i], detail=INJECTED) if i in refused else next(outcomes) for i, _ in enumerate(batch.items)
        ]
        evicted = [
            Outcome(Status.FAILED, detail=INJECTED) if i in staying else next(outcomes)
            for i, _ in enumerate(batch.evict)
        ]
        noted = [Outcome(Status.NO_ROOM, detail=INJECTED)] if no_note else list(outcomes)
        return written + evicted + noted

    def drop(self, namespace: int) -> Outcome:
        return Outcome(Status.FAILED, detail=INJECTED) if self._happens(self.odds.drop) else self._inner.drop(namespace)

    def _torn(self, item: ReadItem, status: Status) -> Outcome:
        """A read that failed half way: the buffer holds neither the old nor the new."""
        torn_bytes = self._rng.randint(1, item.length_bytes)
        item.into[:torn_bytes] = TORN * torn_bytes
        self.faults += 1
        return Outcome(status, detail=INJECTED)

    def _happens(self, odds: float) -> bool:
        happens = odds > 0 and self._rng.random() < odds
        self.faults += happens
        return happens

    # ------------------------------------------------------------ the rest is the inner tier's

    def scan(self) -> Iterable[StoredBlock]:
        return self._inner.scan()

    def sidecar(self) -> Iterator[tuple[bytes, bytes]]:
        return self._inner.sidecar()

    def room(self, length_bytes: int) -> int:
        return self._inner.room(length_bytes)

    def excess_bytes(self) -> int:
        return self._inner.excess_bytes()

    def neighbours(self, place: int) -> int:
        return self._inner.neighbours(place)

    def used_bytes(self) -> int:
        return self._inner.used_bytes()

    def close(self) -> None:
        self._inner.close()
