"""Which blocks are worth writing to a tier at all: fewer writes wear a disk less, and cost hits.

Owns: of handles that are known, how often they were used or offered lately. A verdict changes nothing; `note_use` and
`note_refusal` do. What is remembered is bounded by a multiple of the blocks that the tier holds, and named by
`remembers`, so that the directory does not give a handle to another key meanwhile.
Always:  a handle that is not remembered is as one never seen.
Units:   handles, blocks, uses.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.errors import InvariantError
from kvtier.registry import Registry

MEMORY_PER_BLOCK = 4  # handles remembered for each block that the tier holds
_SAMPLE = 10  # uses for each block between two halvings (TinyLFU, TOS 2017, section 3.3)


class Admission(Protocol):
    """Asked before a block is written to a tier."""

    def admits(self, handle: int, victim: int | None = None) -> bool:
        """Whether it is worth writing, in the place of `victim` if something must leave for it. Changes nothing."""
        ...

    def note_use(self, handles: Sequence[int]) -> None:
        """A request used these, wherever they are."""
        ...

    def note_refusal(self, handles: Sequence[int]) -> None:
        """These were offered, and not admitted."""
        ...

    def forget(self, handles: Sequence[int]) -> None:
        """Their handles will be given to other keys. Unknown ones are ignored."""
        ...

    def remembers(self, handle: int) -> bool:
        """Whether anything is known of it."""
        ...

    def forgotten(self) -> list[int]:
        """What was given up since the last call; those of `forget` are not among them."""
        ...


AdmissionMaker = Callable[[int], Admission]  # blocks that the tier holds -> who is let in


class _Memory:
    """Counts by handle, of as many handles as there is room for: who was noted longest ago is given up first."""

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds. Raises InvariantError if that is negative."""
        if blocks < 0:
            raise InvariantError(f"admission: a tier cannot hold {blocks} blocks")
        self._handles_max = MEMORY_PER_BLOCK * blocks
        self._counts: dict[int, int] = {}  # in the order of the last note
        self._dropped: dict[int, None] = {}

    def _note(self, handles: Sequence[int]) -> None:
        counts = self._counts
        for handle in handles:
            counts[handle] = counts.pop(handle, 0) + 1
            self._dropped.pop(handle, None)
        while len(counts) > self._handles_max:
            oldest = next(iter(counts))
            del counts[oldest]
            self._dropped[oldest] = None

    def forget(self, handles: Sequence[int]) -> None:
        """As `Admission.forget`."""
        for handle in handles:
            self._counts.pop(handle, None)
            self._dropped.pop(handle, None)

    def remembers(self, handle: int) -> bool:
        """As `Admission.remembers`."""
        return handle in self._counts

    def forgotten(self) -> list[int]:
        """As `Admission.forgotten`."""
        gone = list(self._dropped)
        self._dropped.clear()
        return gone


class Always(_Memory):
    """Every block. Remembers nothing."""

    def admits(self, handle: int, victim: int | None = None) -> bool:
        return True

    def note_use(self, handles: Sequence[int]) -> None:
        """It does not matter."""

    def note_refusal(self, handles: Sequence[int]) -> None:
        """There is none."""


class Uses(_Memory):
    """How often blocks were used lately."""

    def of(self, handle: int) -> int:
        """0 for one that is not remembered."""
        return self._counts.get(handle, 0)

    def note_use(self, handles: Sequence[int]) -> None:
        """A request used these."""
        self._note(handles)


class SecondAccess(Uses):
    """Blocks that were used at least twice lately."""

    def admits(self, handle: int, victim: int | None = None) -> bool:
        return self.of(handle) >= 2

    def note_refusal(self, handles: Sequence[int]) -> None:
        """The uses tell enough."""


class GhostHit(_Memory):
    """Blocks that were refused before, and are offered again while that is remembered."""

    def admits(self, handle: int, victim: int | None = None) -> bool:
        return handle in self._counts

    def note_use(self, handles: Sequence[int]) -> None:
        """Only offers count."""

    def note_refusal(self, handles: Sequence[int]) -> None:
        self._note(handles)


class TinyLFU(_Memory):
    """Blocks that were used more often lately than the one that would leave for them (TOS 2017, section 3)."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self._uses, self._uses_max = 0, _SAMPLE * max(1, blocks)

    def admits(self, handle: int, victim: int | None = None) -> bool:
        return victim is None or self._counts.get(handle, 0) > self._counts.get(victim, 0)

    def note_use(self, handles: Sequence[int]) -> None:
        """After ten times as many uses as the tier holds blocks, all counts are halved."""
        self._note(handles)
        self._uses += len(handles)
        if self._uses >= self._uses_max:
            self._uses = 0
            self._counts = {handle: count // 2 for handle, count in self._counts.items()}

    def note_refusal(self, handles: Sequence[int]) -> None:
        """The uses tell enough."""


ADMISSIONS: Registry[AdmissionMaker] = Registry(
    "admission", {"always": Always, "second_access": SecondAccess, "ghost_hit": GhostHit, "tinylfu": TinyLFU}
)
