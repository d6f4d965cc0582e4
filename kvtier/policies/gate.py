"""`Gate`: who is written to one tier: those whom its admission lets in, and fewer, the emptier its wear budget is.

    left of the budget   more than 1/2     1/4           1/8           less            nothing
    let in               as admission says used twice    three times   four times      nobody

Owns: the rule, the budget, and how often blocks were used lately. A verdict changes nothing; what is spent is said to
the budget. Always: who is let in with little left would be let in with more.
Units: handles, bytes, uses.
"""

from collections.abc import Sequence

from kvtier.policies.admission import Admission, TinyLFU, Uses
from kvtier.policies.wear import WearBudget

STEPS = (1 / 2, 1 / 4, 1 / 8)  # shares of the burst: at each one more use is needed
EASED = 3 / 4  # of the burst: who was refused for the budget's sake may be asked again


class Gate:
    """Asked before a block is copied down into a tier. Without a budget it is the rule alone."""

    def __init__(self, rule: Admission, blocks: int, budget: WearBudget | None = None) -> None:
        """blocks: how many the tier holds."""
        self.rule = rule
        self.budget = budget
        self.compares = isinstance(rule, TinyLFU)  # with the block that would leave
        self._uses = Uses(blocks if budget else 0)
        self._memories: list[Admission | Uses] = [rule, self._uses] if budget else [rule]
        self._was_tight = False  # more uses were needed since it was saved up last

    def admits(self, handle: int, left_bytes: float, victim: int | None = None) -> bool:
        """Whether it is worth writing with so much left of the budget, in the place of `victim` if one must leave."""
        if self.budget and (left_bytes <= 0 or self._uses.of(handle) < self.uses_needed(left_bytes)):
            return False
        return self.rule.admits(handle, victim)

    def uses_needed(self, left_bytes: float) -> int:
        """How often a block has to have been used; 0: it does not matter."""
        passed = sum(left_bytes <= share * self.budget.burst_bytes for share in STEPS) if self.budget else 0
        return passed + 1 if passed else 0

    def has_eased(self, left_bytes: float) -> bool:
        """Once, when a budget that was short has been saved up again: whom it refused it may take now."""
        eased = self._was_tight and left_bytes >= EASED * (self.budget.burst_bytes if self.budget else 0.0)
        self._was_tight = not eased and (self._was_tight or self.uses_needed(left_bytes) > 0)
        return eased

    def note_left(self, left_bytes: float) -> None:
        """So little was left when somebody was refused, whatever becomes of what was let in before him."""
        self._was_tight |= self.uses_needed(left_bytes) > 0

    # ------------------------------------------------------------ what is remembered, as `Admission` has it

    def note_use(self, handles: Sequence[int]) -> None:
        """A request used or made these, wherever they are."""
        for memory in self._memories:
            memory.note_use(handles)

    def note_refusal(self, handles: Sequence[int]) -> None:
        """These were offered, and not let in."""
        self.rule.note_refusal(handles)

    def forget(self, handles: Sequence[int]) -> None:
        """Their handles will be given to other keys."""
        for memory in self._memories:
            memory.forget(handles)

    def remembers(self, handle: int) -> bool:
        """Whether anything is known of it."""
        return any(memory.remembers(handle) for memory in self._memories)

    def forgotten(self) -> list[int]:
        """What the rule or the uses have given up since the last call; the other may remember it still."""
        return [*dict.fromkeys(handle for memory in self._memories for handle in memory.forgotten())]
