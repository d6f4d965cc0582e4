"""Moves: copies between the pages that a block manager runs and the slots of the tier below them.

Owns nothing. Always: a move is answered exactly once, with one outcome per block.
Units: blocks (of the arena of pages), slots.
"""

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
