"""What `poll` says to a ticket: the answers to questions that take I/O. Records only; units: blocks, bytes."""

from dataclasses import dataclass

from kvtier.cache.leases import Lease, NoRoom
from kvtier.errors import DeviceLost


@dataclass(frozen=True, slots=True)
class Flushed:
    """A flush has ended: `blocks` were to be written, `failed` of them could not be and lie in memory only."""

    blocks: int
    failed: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A drop has ended. Not `durable`: a tier failed to erase the namespace; after a restart it may be there again."""

    durable: bool


@dataclass(frozen=True, slots=True)
class Resized:
    """A resize has ended: the tier has `bytes` of memory now, maybe more than asked for, as leased slots stay."""

    bytes: int


Answer = Lease | NoRoom | Flushed | Dropped | Resized | DeviceLost
