"""Why a block is not there any more: a bounded journal of what was forgotten.

Units: seconds of the engine's clock. The journal keeps the latest entries only.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from kvtier.types import StoreKey

JOURNAL_ENTRIES_MAX = 4096


class Reason(Enum):
    """Why a copy left."""

    RECLAIMED = "reclaimed"  # its slot was needed; a copy below remained
    DROPPED_DIRTY = "dropped_dirty"  # its slot was needed at once and it was the only copy
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
