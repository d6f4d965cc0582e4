"""What `poll` says to a ticket: the answers to questions that take I/O. Records only; units: blocks, bytes."""

from dataclasses import dataclass

from kvtier.cache.leases import Lease, NoRoom
from kvtier.errors import DeviceLost


@dataclass(frozen=True, slots=True)
class Flushed:
    """A flush has ended: `blocks` were to be written, `failed` of them could not be and lie in memory only.

    over_budget_bytes: so much was written although the disk's wear budget was used up; it is paid back first.
    """

    blocks: int
    failed: int
    over_budget_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """A drop has ended. Not `durable`: a tier failed to erase the namespace; after a restart it may be there again."""

    durable: bool


@dataclass(frozen=True, slots=True)
class Resized:
    """A resize has ended: the tier has `bytes` of memory now, maybe more than asked for, as leased slots stay."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Slept:
    """The fastest tier's memory has gone: `bytes_freed` of it; 0 if it slept already, was woken, or the driver refused.

    blocks_dropped: found no room in the tiers below, and are lost.
    """

    bytes_freed: int
    blocks_dropped: int


@dataclass(frozen=True, slots=True)
class Woken:
    """The fastest tier has `bytes` of memory, and `bytes_missing` less than before it slept: wake again to get them."""

    bytes: int
    bytes_missing: int


Answer = Lease | NoRoom | Flushed | Dropped | Resized | Slept | Woken | DeviceLost
