"""`WearBudget`: how many bytes a disk may be written per day, and how many are left now.

Owns: the bytes saved up, negative if more was spent. Time is passed in; an earlier one counts as the latest known.
Always:  at most `burst` is saved; a debt is paid back before anything is allowed.
Units:   bytes, seconds.
"""

from kvtier.errors import UsageError

_DAY_S = 86_400.0


class WearBudget:
    """Saves up at a constant rate, at most for a burst. The planner asks `allows` before a batch, and then `spend`s."""

    def __init__(self, bytes_per_day: float, burst_bytes: float, now_s: float) -> None:
        """Full at first. Raises UsageError if nothing could ever be written."""
        if not (bytes_per_day > 0 and burst_bytes > 0):
            raise UsageError(
                f"a wear budget of {bytes_per_day} bytes per day in bursts of {burst_bytes} lets nothing be written; "
                "make both positive, or have no budget"
            )
        self._bytes_per_s = bytes_per_day / _DAY_S
        self._burst_bytes = burst_bytes
        self._saved_bytes = burst_bytes
        self._at_s = now_s

    def allows(self, now_s: float) -> bool:
        """Whether something may be written now, however long it is: a block larger than the burst has its turn too."""
        self._save_until(now_s)
        return self._saved_bytes >= 0

    def spend(self, length_bytes: int, now_s: float) -> None:
        """So much is written, allowed or not."""
        self._save_until(now_s)
        self._saved_bytes -= length_bytes

    def allowed_in_s(self, now_s: float) -> float:
        """How long until `allows` says yes, if nothing is written meanwhile; 0 if it does."""
        self._save_until(now_s)
        return max(0.0, -self._saved_bytes / self._bytes_per_s)

    def _save_until(self, now_s: float) -> None:
        if now_s > self._at_s:
            saved = self._saved_bytes + (now_s - self._at_s) * self._bytes_per_s
            self._saved_bytes = min(self._burst_bytes, saved)
            self._at_s = now_s
