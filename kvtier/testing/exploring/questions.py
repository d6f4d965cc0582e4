"""`Questions`: flushes, drops, resizes, sleeps and wakes that were asked for, and what their answers must mean.

Owns the tickets that have no answer yet. Always: a flush saves what lay in memory only when it was asked for; what a
durable drop erased never comes back; a resize, a sleep and a wake tell the memory that is there.

Units: blocks, bytes, slots.
"""

from kvtier.engine.answers import Dropped, Flushed, Resized, Slept, Woken
from kvtier.errors import UsageError
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
        self.sleeps: set[int] = set()
        self.wakes: set[int] = set()
        self.abandoned: set[int] = set()

    @property
    def asked(self) -> set[int]:
        """Tickets without an answer."""
        return {*self.flushes, *self.drops, *self.of_the_top}

    @property
    def of_the_top(self) -> set[int]:
        """Those of them that concern the top tier's memory."""
        return {*self.resizes, *self.sleeps, *self.wakes}

    # ------------------------------------------------------------ answers

    def answered(self, ticket: int, answer: Flushed | Dropped | Resized | Slept | Woken, *, late: bool) -> None:
        """late: it may have been there for a while."""
        if isinstance(answer, Flushed):
            self._flushed(ticket, answer, late)
        elif isinstance(answer, Dropped):
            self._dropped(ticket, answer)
        elif isinstance(answer, Resized):
            self._resized(ticket, answer, late)
        elif isinstance(answer, Slept):
            self._slept(ticket, answer, late)
        else:
            self._woken(ticket, answer, late)
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
        if not self.sleeps:  # that has ended it where it stood, and goes on
            self._expect_memory(answer.bytes, late)

    def _expect_memory(self, told_bytes: int, late: bool) -> None:
        if not late and not any(flying.batch.remap for flying in self._engine.underway.flying):
            gpu = self._engine.tiers[0]
            assert isinstance(gpu, GpuTier)
            there = len(gpu.granules_mapped) * gpu.geometry.granule_bytes
            assert told_bytes == there, f"{told_bytes} bytes reported, {there} are there"

    def _slept(self, ticket: int, answer: Slept, late: bool) -> None:
        self.sleeps.discard(ticket)
        if answer.bytes_freed:
            self._engine.coverage.happened("slept")
            if not self.wakes:
                self._expect_memory(0, late)

    def _woken(self, ticket: int, answer: Woken, late: bool) -> None:
        self.wakes.discard(ticket)
        if answer.bytes:
            self._engine.coverage.happened("woken")
            if not self.sleeps:
                self._expect_memory(answer.bytes, late)

    def device_lost(self, ticket: int) -> None:
        """There is no memory any more whose size could be told."""
        self.resizes.pop(ticket, None)
        self.sleeps.discard(ticket)
        self.wakes.discard(ticket)
        self.abandoned.discard(ticket)

    # ------------------------------------------------------------ kept and dropped

    def flush(self) -> str:
        ticket = self._engine.core.submit_flush()
        self._expect_none_refused()
        self.flushes[ticket] = self._unsaved()
        return f"ticket {ticket}: {len(self.flushes[ticket])} blocks"

    def _expect_none_refused(self) -> None:
        """What is to be saved may not go before it is, whoever had refused it."""
        disk, directory = self._engine.disk, self._engine.directory
        for handle in directory.handles() if disk is not None else ():
            tiers = [tier for tier in range(directory.tiers) if directory.is_ready(handle, tier)]
            assert not tiers or tiers[-1] == disk or not directory.is_clean(handle, tiers[-1]), (
                f"tier {tiers[-1]} may drop a block that a flush is to save"
            )

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

    def sleep(self, *, leased: bool) -> str:
        """Give the top tier's memory back; refused while somebody has a lease, or waits for one."""
        ticket: int | None
        try:
            ticket = self._engine.core.submit_sleep()
        except UsageError:
            ticket = None
        assert (ticket is None) == leased, f"there are {'' if leased else 'no '}leases, and the ticket is {ticket}"
        if ticket is None:
            return "refused: there are leases"
        self.sleeps.add(ticket)
        return f"ticket {ticket}"

    def wake(self, *, restore: bool) -> str:
        ticket = self._engine.core.submit_wake(restore=restore)
        self.wakes.add(ticket)
        return f"ticket {ticket}{', blocks come back' * restore}"

    def points(self) -> dict[str, set[int]]:
        """The tickets without an answer by what they wait for, in the words of the coverage."""
        return {
            "flush": {*self.flushes},
            "drop": {*self.drops},
            "resize": {*self.resizes},
            "sleep": self.sleeps,
            "wake": self.wakes,
        }

    def abandon(self, ticket: int) -> str:
        """Nobody waits for the answer any more: it goes on all the same."""
        self.abandoned.add(ticket)
        point = next(point for point, tickets in self.points().items() if ticket in tickets)
        self._engine.coverage.cancelled(point)
        return f"ticket {ticket}, {point}"
