"""What happened to blocks: a bounded journal of what the tiers forgot, and what a request-level manager tells others.

The journal keeps the latest entries only. Units: tokens.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from kvtier.types import BlockHash, StoreKey

JOURNAL_ENTRIES_MAX = 4096


class Reason(Enum):
    """Why a copy left."""

    RECLAIMED = "reclaimed"  # its slot was needed; a copy below remained
    DROPPED_DIRTY = "dropped_dirty"  # its slot was needed at once and it was the only copy
    NOT_KEPT = "not_kept"  # its slot was needed, it was the only copy, and the tier below had refused it
    EVICTED = "evicted"  # the lowest tier was full
    CONDEMNED = "condemned"  # its stored bytes failed their checksum
    LOST = "lost"  # the tier did not find it any more
    DROPPED = "dropped"  # drop or reset
    FAILED = "failed"  # the transfer that should have made it failed


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The last copy of a block went."""

    key: StoreKey
    tier: str
    reason: Reason


class Journal:
    """The latest forgotten blocks, oldest first."""

    def __init__(self, entries_max: int = JOURNAL_ENTRIES_MAX) -> None:
        self._entries: deque[Forgotten] = deque(maxlen=entries_max)

    def note(self, entry: Forgotten) -> None:
        self._entries.append(entry)

    def entries(self) -> list[Forgotten]:
        return list(self._entries)


# ---------------------------------------------------------------- blocks of a request-level manager


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks of one request can be found from now on; they follow one another, after the block `parent`.

    tokens: from the first block's first token to the last one's last. Blocks in between that a group does not keep
    (outside a window, between two states) have no entry in `hashes` and `extra_keys`, which are parallel.
    """

    group: int
    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: tuple[int, ...]
    block_tokens: int
    extra_keys: tuple[tuple[tuple[object, ...], ...] | None, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block of this hash was evicted. Others may hold the same content."""

    group: int
    hash: BlockHash


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """No block can be found any more."""


BlockEvent = BlocksStored | BlockRemoved | BlocksCleared
