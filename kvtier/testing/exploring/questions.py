"""`Questions`: flushes, drops and resizes that were asked for, and what each of their answers must mean.

Owns the tickets that have no answer yet. Always: a flush saves what lay in memory only when it was asked for; what a
durable drop erased never comes back; a resize tells the memory that is there.

Units: blocks, bytes, slots.
"""

from kvtier.engine.answers import Dropped, Flushed, Resized
from kvtier.testing.exploring.checks import Checks
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.testing.exploring.truth import Named, Truth
from kvtier.tiers.gpu import GpuTier
from kvtier.types import PAGE_BYTES, StoreKey, block_key_of


class Questions:
    """Those of one engine. `gone`, by fingerprint: versions below were erased for good; kept by the caller."""

    def __init__(
        self, engine: ExploredEngine, truth: Truth, checks: Checks, blamed: set[StoreKey], gone: dict[bytes, int]
    ) -> None:
        self._engine = engine
        self._truth = truth
        self._checks = checks
        self._blamed = blamed
        self._gone = gone
        self._persistent = engine.disk is not None
        self.flushes: dict[int, dict[Named, int]] = {}  # ticket -> versions of what it has to save
        self.drops: dict[int, tuple[bytes, int]] = {}  # ticket -> fingerprint, version from which blocks are new
        self.resizes: dict[int, int] = {}  # ticket -> bytes wanted
        self.abandoned: set[int] = set()

    @property
    def asked(self) -> set[int]:
        """Tickets without an answer."""
        return {*self.flushes, *self.drops, *self.resizes}

    # ------------------------------------------------------------ answers

    def answered(self, ticket: int, answer: Flushed | Dropped | Resized, *, late: bool) -> None:
        """late: it may have been there for a while."""
        if isinstance(answer, Flushed):
            self._flushed(ticket, answer, late)
        elif isinstance(answer, Dropped):
            self._dropped(ticket, answer)
        else:
            self._resized(ticket, answer, late)
        self.abandoned.discard(ticket)

    def _flushed(self, ticket: int, answer: Flushed, late: bool) -> None:
        """What a flush says to have saved lies on the disk, unless it was lost or dropped since."""
        owed = self.flushes.pop(ticket)
        assert answer.blocks == len(owed), f"{answer.blocks} blocks flushed, {len(owed)} lay in memory only"
        if answer.failed or late or not self._persistent:
            return
        stored = {(row.fingerprint, row.key) for row in self._checks.rows()}
        for named, version in owed.items():
            lost = named[1] in {block_key_of(key) for key in self._blamed}
            alive = self._truth.alive.get(named) == version
            assert named in stored or lost or not alive, "a flush has not saved what it says"

    def _dropped(self, ticket: int, answer: Dropped) -> None:
        fingerprint, version = self.drops.pop(ticket)
        if answer.durable and self._persistent:
            self._gone[fingerprint] = self._checks.gone[fingerprint] = max(self._checks.gone[fingerprint], version)

    def _resized(self, ticket: int, answer: Resized, late: bool) -> None:
        del self.resizes[ticket]
        most = (self._engine.setup.gpu_slots_max + 1) * self._engine.setup.stride_bytes
        assert 2 * PAGE_BYTES <= answer.bytes <= most, f"{answer.bytes} bytes are not what a tier can have"
        if not late and not any(flying.batch.remap for flying in self._engine.underway.flying):
            gpu = self._engine.tiers[0]
            assert isinstance(gpu, GpuTier)
            there = len(gpu.granules_mapped) * gpu.geometry.granule_bytes
            assert answer.bytes == there, f"{answer.bytes} bytes reported, {there} are there"

    def device_lost(self, ticket: int) -> None:
        """There is no memory any more whose size could be told."""
        del self.resizes[ticket]
        self.abandoned.discard(ticket)

    # ------------------------------------------------------------ kept and dropped

    def flush(self) -> str:
        ticket = self._engine.core.submit_flush()
        self.flushes[ticket] = self._unsaved()
        return f"ticket {ticket}: {len(self.flushes[ticket])} blocks"

    def _unsaved(self) -> dict[Named, int]:
        """Blocks that lie in memory only."""
        disk, directory = self._engine.disk, self._engine.directory
        if disk is None:
            return {}
        handles = [h for h in directory.handles() if not directory.is_ready(h, disk)]
        named = [self._checks.named(h) for h in handles if directory.top(h) is not None]
        return {name: self._truth.alive[name] for name in named}

    def drop(self, fingerprint: bytes) -> str:
        """Forget a namespace: from now on nothing of it may be served."""
        current = fingerprint == self._engine.fingerprint
        ticket = self._engine.core.submit_drop(None if current else fingerprint)
        self._truth.drop(fingerprint)
        self.drops[ticket] = fingerprint, self._truth.versions[fingerprint]
        return f"ticket {ticket}: {'this namespace' if current else 'another namespace'}"

    def resize(self, slots: int) -> str:
        """Ask for memory for so many usable slots."""
        size_bytes = (slots + 1) * self._engine.setup.stride_bytes
        ticket = self._engine.core.submit_resize("gpu", size_bytes)
        self.resizes[ticket] = size_bytes
        return f"ticket {ticket}: {slots} slots"

    def abandon(self, ticket: int) -> str:
        """Nobody waits for the answer of a flush, drop or resize any more: it goes on all the same."""
        self.abandoned.add(ticket)
        point = "flush" if ticket in self.flushes else "drop" if ticket in self.drops else "resize"
        self._engine.coverage.cancelled(point)
        return f"ticket {ticket}, {point}"
