"""Rewarming: what lay in the top tier before it slept comes back from the tiers below, used last first, for nobody yet.

Owns: the blocks that are still to come. Always: it takes free slots only and evicts nothing, in no tier; it rests while
a request loads, and has no more under way than a part of the slots that it passes, so that a request finds room.

Units: handles, blocks, slots.
"""

from collections import deque
from collections.abc import Iterable
from math import inf

from kvtier.cache.residency import Residency
from kvtier.cache.transitions import Move, State
from kvtier.engine.promotion import Promotions
from kvtier.events import Reason

TOP = 0
SHARE_DIVISOR = 4  # at most this part of the slots is on its way
BATCHES_AT_ONCE = 2  # and at most so many batches: one is copied while the next one waits


class Rewarming:
    """Blocks of one wake. A later one replaces it."""

    def __init__(self, residency: Residency, promotions: Promotions) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._promotions = promotions
        self._left: deque[int] = deque()
        self._coming: list[int] = []

    def begin(self, contents: Iterable[int]) -> None:
        """Bring these up, in this order. A handle that is another block's by now brings that one: it is of use, too."""
        self._left = deque(contents if not self._promotions.goal else ())  # or read below, where they lie

    def end(self) -> None:
        """What is still to come does not come."""
        self._residency.counters.add("rewarm_skipped", len(self._left))
        self._left.clear()

    def advance(self, *, growing: bool) -> None:
        """Bring up some more. growing: more slots are to come, so that none free is no reason to end."""
        level = self._residency.levels[TOP]
        if not self._left or level.asleep or level.lost:
            return
        self._coming = [h for h in self._coming if self._directory.state(h, TOP) is State.FILLING]
        if self._promotions.wanted > len(self._coming):
            return  # somebody waits for a block
        while self._left and len(self._coming) < self._at_once():
            if not level.slots.slots_free:
                if not growing:
                    self.end()
                return
            if self._bring(handle := self._left.popleft()):
                self._coming.append(handle)
                self._residency.counters.add("rewarmed_blocks")
            else:
                self._residency.counters.add("rewarm_skipped")

    # ------------------------------------------------------------ inside

    def _at_once(self) -> int:
        levels = self._residency.levels
        memory = [level.slots_usable // SHARE_DIVISOR for level in levels[: TOP + 2] if not level.persistent]
        return max(1, min(*memory, BATCHES_AT_ONCE * levels[TOP].batch_blocks(levels[TOP].stride_bytes)))

    def _bring(self, handle: int) -> bool:
        """Let a block come up, if it lies below and needs nobody's slot on its way."""
        source = self._directory.fastest(handle)
        if source is None or self._directory.state(handle, TOP) is not State.GONE:
            return False
        memory_between = len(self._promotions.path(source)) > 1
        if memory_between and not self._residency.levels[TOP + 1].slots.slots_free:
            return self._promotions.bring(handle, source, TOP)
        slots = self._residency.take(TOP, 1, drop_dirty=False, incoming=handle)
        if slots is None:
            return False
        self._residency.place(handle, TOP, slots[0])
        if self._promotions.start(handle, inf):
            return True
        self._residency.lose(handle, TOP, Move.FAILED, Reason.FAILED)
        return False
