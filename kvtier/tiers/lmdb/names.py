"""The tier's own ids for namespaces, and their way to the engine's.

Owns: the two-way map. A tier id is stored in every record; it is given once, from 1 on, and never again, not even
after a drop: records that a drop left behind stay nobody's. Id 0 is no namespace.
"""

from collections.abc import Iterable

from kvtier.blocks.namespace import NamespaceTable
from kvtier.types import NAMESPACE_BYTES, StoreKey


class TierNames:
    """Maps engine-local namespace ids to the tier's ids. Questions from any thread, changes from the writer's."""

    def __init__(self, table: NamespaceTable, limit: int) -> None:
        self._table = table
        self.limit = max(limit, 1)  # no id at or above it was ever given
        self._to_tier: dict[int, int] = {}
        self._to_local: dict[int, int] = {}

    def to_tier(self, local: int) -> int | None:
        return self._to_tier.get(local)

    def to_tier_by_prefix(self, keys: Iterable[StoreKey]) -> dict[bytes, int | None]:
        """The same for the namespaces of a batch, by the bytes that their keys begin with."""
        prefixes = {key[:NAMESPACE_BYTES] for key in keys}
        return {prefix: self._to_tier.get(int.from_bytes(prefix, "big")) for prefix in prefixes}

    def to_local(self, tier_id: int) -> int | None:
        return self._to_local.get(tier_id)

    def knows(self, local: int) -> bool:
        """Whether the engine's table has this id, be it stored here already or not."""
        return local < len(self._table)

    def identity(self, local: int) -> tuple[bytes, bytes]:
        """Fingerprint and description of an engine-local id that `knows` knows."""
        return self._table.fingerprint_of(local), self._table.description_of(local)

    def add_stored(self, tier_id: int, fingerprint: bytes, description: bytes) -> None:
        """A namespace found in the store. Raises ValueError for what no writer gives."""
        local = self._table.id_of(fingerprint, description)
        if local in self._to_tier:
            raise ValueError("a second id of the same namespace")
        self.add(tier_id, local)

    def add(self, tier_id: int, local: int) -> None:
        self._to_tier[local] = tier_id
        self._to_local[tier_id] = local
        self.limit = max(self.limit, tier_id + 1)

    def tier_ids(self) -> list[int]:
        """The ids in use."""
        return list(self._to_local)

    def remove(self, tier_id: int) -> None:
        del self._to_tier[self._to_local.pop(tier_id)]
