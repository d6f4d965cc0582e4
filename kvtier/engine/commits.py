"""Commits: the slots that a lease has written get the names of their blocks.

Owns nothing. Always: all pairs of a commit are checked before the first is published; a block that others have
published meanwhile stays theirs, and the slot with the same content is private to its lease.

Units: slots, keys.
"""

from collections.abc import Sequence

from kvtier.blocks.spec import BlockSpec
from kvtier.cache.leases import LeaseRecord
from kvtier.cache.residency import Residency
from kvtier.cache.transitions import State
from kvtier.errors import UsageError
from kvtier.types import GROUP_BYTES, HASH_BYTES_MAX, BlockKey, block_key_of, group_of, store_key


class Commits:
    """Checks and publishes under the records of active leases. `specs`: the shape of a block, by group."""

    def __init__(self, residency: Residency, specs: Sequence[BlockSpec]) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._lengths_bytes = [spec.block_bytes for spec in specs]

    def check(self, record: LeaseRecord, pairs: Sequence[tuple[int, BlockKey]]) -> None:
        """Raises UsageError for a slot of somebody else's, a key of another model, or a second name for a slot."""
        owned = [set(slots) for slots in record.slots]
        pool = self._residency.levels[0].slots
        named = dict(record.promised)
        for slot, key in pairs:
            group = group_of(key)
            if not GROUP_BYTES < len(key) <= HASH_BYTES_MAX + GROUP_BYTES or group >= len(owned):
                raise UsageError(f"{key!r} is not a key of this model; use hash_blocks or Keys.opaque")
            if slot not in owned[group]:
                raise UsageError(f"slot {slot} does not belong to lease {record.lease_id} in group {group}")
            occupant = pool.occupant(slot)
            known = named.setdefault(slot, key) if occupant is None else block_key_of(self._directory.key(occupant))
            if known != key:
                raise UsageError(f"slot {slot} is published under another key already")

    def publish(self, record: LeaseRecord, pairs: Sequence[tuple[int, BlockKey]]) -> None:
        """Name the slots that are private to the lease; others of these pairs have their names already."""
        counters, pool = self._residency.counters, self._residency.levels[0].slots
        wanted = [pair for pair in pairs if pair[0] in record.writable]
        new: dict[int, int] = {}  # handle -> slot
        for slot, key in wanted:
            record.writable.discard(slot)
            handle = self._directory.admit(store_key(record.namespace, key), self._lengths_bytes[group_of(key)])
            if handle in new or self._directory.state(handle, 0) is not State.GONE:
                counters.add("duplicate_blocks")
                pool.occupy(slot, handle)  # private to this lease
            else:
                new[handle] = slot
        counters.add("committed_blocks", len(wanted))
        self._residency.publish_held([*new], [*new.values()])
