"""The two questions a policy answers: what happened, and who leaves?

A policy keeps an order of handles (integers that the directory gives to keys). It knows no tiers, bytes, time or
tasks. Choosing is separate from applying: `candidates` changes nothing, `evict` carries the choice out. Callers
touch the blocks of a request deepest first, so that of one prefix the shallow blocks leave last: the order alone
is worth 8 to 10 points of prefix hits on agentic traffic.

A policy may remember handles that left (ghosts). The directory keeps their names as long as `remembers` says so,
and hears of those it may give up from `forgotten`.

Units: handles, blocks.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import UsageError


class Access(Enum):
    """Why a handle is touched. A policy that adapts must tell a new block from one that is used again."""

    FILL = "fill"  # enters this tier with new content
    MOVED = "moved"  # enters this tier after it was used again in another: it brings its frequency along
    REUSE = "reuse"  # was found by a lookup
    RELEASE = "release"  # its last user let go of it: it is as recent as can be, and not used once more


class Policy(Protocol):
    """The order of one tier. Handles in it are resident; `evict` may keep ghosts, which are not."""

    def __len__(self) -> int:
        """Resident handles."""
        ...

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """Note an access; unknown handles become resident (only with FILL and MOVED). `size_class`: bytes, rounded."""
        ...

    def candidates(
        self, count: int, pinned: Container[int] = (), size_class: int | None = None, incoming: int | None = None
    ) -> list[int]:
        """The next `count` handles to leave, first to leave first; exactly that many or none. Changes nothing.

        pinned: handles that must stay. size_class: only of this class. incoming: the handle that needs the
        room (ARC's REPLACE asks whether it is a ghost).
        """
        ...

    def evict(self, handles: Sequence[int], incoming: int | None = None) -> None:
        """These leave by the policy's own choice, for `incoming` if that is known; it may remember them as ghosts.

        Raises InvariantError for one that is not resident.
        """
        ...

    def forget(self, handles: Sequence[int]) -> None:
        """These are gone for reasons of their own (dropped, lost): no trace stays. Unknown ones are ignored."""
        ...

    def remembers(self, handle: int) -> bool:
        """Whether the handle is resident or a ghost."""
        ...

    def ghosts(self) -> list[int]:
        """Handles that are remembered and not resident, in no particular order."""
        ...

    def forgotten(self) -> list[int]:
        """Ghosts given up since the last call, each once; those of `forget` are not among them."""
        ...

    def resize(self, blocks: int) -> None:
        """The tier holds so many blocks from now on."""
        ...

    def snapshot(self) -> bytes:
        """The whole state as bytes, in terms of handles, for `restore`."""
        ...

    def restore(self, state: bytes, renamed: Mapping[int, int] | None = None) -> None:
        """Take over a snapshot made by the same kind of policy, within this one's own number of blocks.

        renamed: the handles of now, by those of then; what is not in it is left out. None: they are the same.
        Raises ValueError, and changes nothing, if `state` is not such a snapshot.
        """
        ...

    def check(self) -> list[str]:
        """Recount everything; an empty list means all invariants hold."""
        ...


@dataclass(frozen=True, slots=True)
class Hint:
    """What a serving layer knows of blocks that it has just used: evidence, which may be wrong, and no order.

    ends: nobody will ask for them again, as far as it knows. returns_in: after how many accesses of the tier they
    are expected again; whoever knows seconds knows how many accesses there are in one. Exactly one of them is given.
    shared: with ends, that more than one session has named them, so that another may.
    """

    ends: bool = False
    returns_in: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if self.ends == (self.returns_in is not None) or (self.returns_in or 0) < 0:
            raise UsageError(
                "a hint says either that a session ends, or after how many accesses (0 or more) it returns"
            )
        if self.shared and not self.ends:
            raise UsageError("a hint says what is shared of a session only when that ends")


@runtime_checkable
class SupportsHints(Protocol):
    """A policy that can use hints."""

    def hint(self, handles: Sequence[int], hint: Hint) -> int:
        """Note it for these residents, deepest first. Returns how many it was of use for; the others are ignored.

        It holds until the next touch. No use is noted, nothing becomes resident or leaves.
        """
        ...


@runtime_checkable
class SupportsSizes(Protocol):
    """A policy that can say of many handles at once what it knows of them."""

    def sizes_of(self, handles: NDArray[np.int64]) -> NDArray[np.int64]:
        """The size class of each, -1 for one that is not resident."""
        ...


PolicyMaker = Callable[[int], Policy]  # blocks that the tier holds -> its policy


def up_to(
    policy: Policy, count: int, pinned: Container[int], size_class: int | None = None, incoming: int | None = None
) -> list[int]:
    """As many candidates as can be had, at most `count` and at least half of what there is."""
    while count > 0:
        handles = policy.candidates(count, pinned, size_class, incoming)
        if handles:
            return handles
        count //= 2
    return []
