"""What the explorer asks of the persistent tier under it, so that your own tier can take the place of ours.

A `Disk` is what outlives an engine: opened again, it has what was written. A tier that can also be looked into from
outside, squeezed and damaged (`GlassDisk`) is explored harder. Owns nothing. Units: bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvtier.blocks.namespace import NamespaceTable
from kvtier.tiers.base import SupportsDrop, SupportsScan, SupportsSidecar, Tier
from kvtier.types import BlockKey


@runtime_checkable
class ExploredStore(Tier, SupportsScan, SupportsSidecar, SupportsDrop, Protocol):
    """A persistent tier, opened."""


class Disk(Protocol):
    """What a store leaves behind when its process ends."""

    def open(self, namespaces: NamespaceTable) -> ExploredStore:
        """The tier over what is there. Its namespaces get ids in this table. The former one, if any, was closed."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One block as it lies on a disk."""

    fingerprint: bytes
    key: BlockKey
    place: int
    generation: int
    payload: bytes


@runtime_checkable
class GlassDisk(Disk, Protocol):
    """A disk that one can look into while it is open."""

    def rows(self) -> Iterator[Row]:
        """All that is stored, in no particular order."""
        ...

    def squeeze(self, allowed_bytes: int | None) -> None:
        """Others leave so much of it; None: enough."""
        ...

    def damage(self, place: int) -> None:
        """What lies there now fails its checksum from now on."""
        ...
