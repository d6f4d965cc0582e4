"""`Scrubbing`: how stored blocks are looked through for nobody, and what may come of it.

Owns, for one engine, when the next piece is due. Always: one piece at a time, no more bytes over time than the setup
allows, and none while the disk is read or written; a copy that was found whole, or could not be read just now, stays;
one that was found bad, or not at all, is a miss from then on.

Units: seconds of simulated time, bytes.
"""

from collections.abc import Sequence

from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.testing.exploring.underway import Flying
from kvtier.types import Status, Transfer, TransferBatch

KEEPS = (Status.DONE, Status.FAILED)


class Scrubbing:
    """Of one engine."""

    def __init__(self, engine: ExploredEngine) -> None:
        self._engine = engine
        self._due_s = 0.0

    def planned(self, batches: Sequence[TransferBatch], now_s: float) -> None:
        """These were planned now."""
        for batch in batches:
            if batch.scrub:
                self._expect_allowed(batch, now_s)
                length_bytes = sum(copy.length_bytes for copy in batch.scrub)
                self._due_s = now_s + length_bytes / self._engine.setup.scrub_bytes_per_s

    def _expect_allowed(self, batch: TransferBatch, now_s: float) -> None:
        assert now_s >= self._due_s, f"a piece is looked through at {now_s:.2f} s, and may be at {self._due_s:.2f} s"
        disk = self._engine.disk
        others = [flying for flying in self._engine.underway.flying if flying.batch is not batch]
        busy = [flying for flying in others if disk in (flying.batch.source, flying.batch.target)]
        assert not busy, f"the disk is looked through beside {busy}"

    def end(self, flying: Flying) -> None:
        """A batch ends; if it is a piece, see what comes of it."""
        known = [copy for copy in flying.batch.scrub if self.is_there(copy)]
        done = self._engine.end(flying)
        outcomes = dict(zip((copy.handle for copy in flying.batch.scrub), done.outcomes, strict=False))
        for copy in known:
            outcome = outcomes[copy.handle]
            assert self.is_there(copy) == (outcome.status in KEEPS), f"place {copy.source_place}: {outcome}, and now?"
            self._engine.coverage.happened(f"scrubbed: {'kept' if outcome.status in KEEPS else 'condemned'}")

    def is_there(self, copy: Transfer) -> bool:
        """Whether it can be found where it was when the piece was planned."""
        directory, handle, tier = self._engine.directory, copy.handle, self._engine.disk or 0
        place = directory.place(handle, tier), directory.generation(handle, tier)
        return directory.is_ready(handle, tier) and place == (copy.source_place, copy.source_generation)
