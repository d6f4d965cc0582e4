"""`WearBudget`: how many bytes a disk may be written per day, and how many are left now.

Owns: the bytes saved up, negative if more was spent. Time is passed in; an earlier one counts as the latest known.
Always:  at most `burst_bytes` are saved; a debt is paid back before anything is left over; what is written until a time
         t is at most burst_bytes + t * bytes_per_day, if nobody spends while nothing is left.
Units:   bytes, seconds.
"""

from typing import NamedTuple

from kvtier.errors import UsageError

DAY_S = 86_400.0


class Written(NamedTuple):
    """What a disk was given, in bytes: blocks, the slots that they lie in, and pages of the index.

    disk_bytes: what the whole disk has written meanwhile, for others as well; None: nobody knows.
    """

    payload_bytes: int = 0
    slot_bytes: int = 0
    index_bytes: int = 0
    disk_bytes: int | None = None


class WearBudget:
    """Saves up at a constant rate, at most for a burst."""

    def __init__(self, bytes_per_day: float, burst_bytes: float, now_s: float = 0.0) -> None:
        """Full at first. Raises UsageError if nothing could ever be written."""
        if not (bytes_per_day > 0 and burst_bytes > 0):
            raise UsageError(
                f"a wear budget of {bytes_per_day} bytes per day in bursts of {burst_bytes} lets nothing be written; "
                "make both positive, or have no budget"
            )
        self.bytes_per_day = bytes_per_day
        self.burst_bytes = burst_bytes
        self._saved_bytes = burst_bytes
        self._at_s = now_s

    def saved_bytes(self, now_s: float) -> float:
        """What may be written now; negative if it was exceeded."""
        self._save_until(now_s)
        return self._saved_bytes

    def spend(self, length_bytes: float, now_s: float) -> None:
        """So much is written, allowed or not."""
        self._save_until(now_s)
        self._saved_bytes -= length_bytes

    def resume(self, saved_bytes: float, away_s: float, now_s: float) -> None:
        """Go on where another process has stopped `away_s` ago; a time that ran back meanwhile pays nothing."""
        self._saved_bytes = min(self.burst_bytes, saved_bytes)
        self._at_s = now_s - max(0.0, away_s)
        self._save_until(now_s)

    def _save_until(self, now_s: float) -> None:
        if now_s > self._at_s:
            saved = self._saved_bytes + (now_s - self._at_s) * self.bytes_per_day / DAY_S
            self._saved_bytes = min(self.burst_bytes, saved)
            self._at_s = now_s
