"""Whom a tier lets in, of the blocks on their way down to it.

Owns nothing but the asking: a tier's gate (`Level.gate`) decides, with what its wear budget has left. Always: a block
that is refused is clean from then on, so it is not offered again before a request uses it or the budget has recovered:
its slot is reused without I/O, and nobody asks in circles. A flush asks nobody.
Units: handles, bytes.
"""

from collections.abc import Callable, Sequence

from kvtier.cache.residency import Residency
from kvtier.engine.flight import Flight
from kvtier.engine.wear import Wear


class Admitting:
    """Asks the gates. What is under way counts as written."""

    def __init__(self, residency: Residency, flight: Flight, wear: Wear) -> None:
        self._residency = residency
        self._flight = flight
        self._wear = wear

    def ease(self, tier: int) -> None:
        """If its budget has recovered, those whom it refused are dirty again, as far as they are still there."""
        gate = self._residency.levels[tier].gate
        if gate and gate.has_eased(self._left_bytes(tier)):
            self._residency.reconsider(tier)

    def admitted(self, tier: int, handles: list[int], first_to_leave: Callable[[], int | None]) -> list[int]:
        """Those whom a tier wants. first_to_leave: in whose place they would come."""
        gate = self._residency.levels[tier].gate
        if gate is None or not handles:
            return handles
        left_bytes = self._left_bytes(tier)
        victim = first_to_leave() if gate.compares else None
        admitted, refused = [], []
        for handle in handles:
            if gate.admits(handle, left_bytes, victim):
                admitted.append(handle)
                left_bytes -= self._written_bytes(handle, tier)
            else:
                refused.append(handle)
        if refused:
            gate.note_left(left_bytes)
            self._residency.refuse(refused, tier)
        return admitted

    def over_budget_bytes(self, tier: int, handles: Sequence[int]) -> int:
        """How much of what these take the budget does not have. Counted: it is written all the same."""
        length_bytes = sum(self._written_bytes(handle, tier) for handle in handles)
        over_bytes = int(max(0.0, length_bytes - max(0.0, self._left_bytes(tier))))
        self._residency.counters.add_tier(tier, "over_budget_bytes", over_bytes)
        return over_bytes

    def _left_bytes(self, tier: int) -> float:
        return self._wear.left_bytes(tier, self._flight.now_s, self._flight.writing_bytes(tier))

    def _written_bytes(self, handle: int, tier: int) -> int:
        return self._residency.levels[tier].size_class(self._residency.directory.length_bytes(handle))
