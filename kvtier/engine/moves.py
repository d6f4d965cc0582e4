"""Moves: copies between the pages that a block manager or a foreign engine runs and the slots of the tier below them.

Owns nothing. Always: a move is answered exactly once, with one outcome per block.
Units: blocks (of the arena of pages), slots.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.types import BatchDone, BlockKey


@dataclass(frozen=True, slots=True)
class Move:
    """Copy block `blocks[i]`, which is to hold or holds `keys[i]`, from (`load`) or to (`store`) slot `slots[i]`."""

    move_id: int
    kind: str
    keys: tuple[BlockKey, ...]
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


class Mover(Protocol):
    """Who copies. Neither verb waits; an engine on a GPU starts copies on its streams here."""

    def start(self, move: Move) -> None: ...

    def finished(self) -> list[BatchDone]:
        """Moves that ended since the last call: their id, and one outcome per block."""
        ...


class BlockCopies(Protocol):
    """Who copies for an engine's worker, which knows blocks and places of slots but no keys. Only `join` waits."""

    def begin(self, move_id: int, kind: str, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Copy blocks[i] to (`store`) or from (`load`) places[i]: part p % parts of slot p // parts."""
        ...

    def finished(self) -> list[BatchDone]:
        """As of `Mover`."""
        ...

    def join(self, move_ids: Iterable[int]) -> None:
        """Block until these moves are over; `finished` answers them."""
        ...

    def close(self) -> None:
        """Wait for what is under way, and let go of everything. Idempotent."""
        ...
