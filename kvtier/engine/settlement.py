"""Settlement: what becomes of a reservation that waits no more.

Its prefix is cut at the first block that is not there, and every block from the cut on gets a private slot, so that the
caller never writes where others read. Owns nothing; changes records, and holds.

Units: handles, slots, tokens.
"""

from collections.abc import Sequence
from itertools import chain
from math import lcm

from kvtier.cache.lease_slots import used_blocks
from kvtier.cache.leases import Lease, LeaseRecord, Phase
from kvtier.cache.pins import unpin
from kvtier.cache.prefix import tokens_by_tier
from kvtier.cache.residency import Residency
from kvtier.engine.governor import Governor
from kvtier.engine.lease_counts import count_restored
from kvtier.engine.promotion import Promotions
from kvtier.policies.base import Access


class Settlement:
    """Of all leases of an engine. sizes: tokens of a block, by group."""

    def __init__(self, residency: Residency, promotions: Promotions, governor: Governor, sizes: Sequence[int]) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._promotions = promotions
        self._goal = promotions.goal
        self._governor = governor
        self._sizes = tuple(sizes)

    def settle(self, record: LeaseRecord) -> Lease | None:
        """The lease, with what is there of its prefix. None if there are no slots to write the rest into."""
        tokens = self._tokens_ready(record)
        if tokens < record.tokens_matched and not self._cut(record, tokens):
            return None
        record.phase = Phase.ACTIVE
        for slots, handles in zip(record.slots, record.hits, strict=True):
            for index, handle in enumerate(handles):
                if handle in record.in_place:
                    slots[index] = ~self._directory.place(handle, self._goal)
        self.touch(record, Access.REUSE)
        unpin(self._residency, record.match)
        names = [level.name for level in self._residency.levels]
        tiers = tokens_by_tier(record.sources, self._sizes, tokens, names)
        count_restored(self._residency.counters, tokens, tiers, self._governor.prefill_s(tokens) or 0.0)
        coming = (self._promotions.arrival(handle) for handle in chain.from_iterable(record.hits))
        record.lease = Lease(record, tokens, tiers, list(dict.fromkeys(a for a in coming if a is not None)))
        return record.lease

    def comes(self, record: LeaseRecord, handle: int) -> bool:
        """Whether a stream brings the block, and the lease's kernels will wait for that."""
        return record.streamed and self._promotions.arrival(handle) is not None

    def touch(self, record: LeaseRecord, access: Access) -> list[int]:
        """Deepest blocks first, so that the shallow ones leave last; returns them in this order."""
        levels = self._residency.levels
        rows = used_blocks(record, levels[0].slots, levels[self._goal].slots)
        for row in rows:
            self._residency.touch(row, access)
        return list(chain.from_iterable(rows))

    # ------------------------------------------------------------ inside

    def _tokens_ready(self, record: LeaseRecord) -> int:
        step = lcm(*self._sizes)
        tokens = record.tokens_matched
        for handles, slots, size in zip(record.hits, record.slots, self._sizes, strict=True):
            ready = 0
            while ready < len(handles) and self._is_there(record, handles[ready], slots[ready]):
                ready += 1
            tokens = min(tokens, ready * size)
        return tokens // step * step

    def _is_there(self, record: LeaseRecord, handle: int, slot: int) -> bool:
        if slot < 0:
            return handle in record.in_place and self._directory.is_ready(handle, self._goal)  # not dropped meanwhile
        return self._directory.is_ready(handle, 0) or self.comes(record, handle)

    def _cut(self, record: LeaseRecord, tokens: int) -> bool:
        """Replace the shared slots behind the cut by private ones. False if there are none to take."""
        self._residency.counters.add("failed_cuts", int(record.failed))
        keep = [tokens // size for size in self._sizes]
        surplus = sum(len(hits) - kept for hits, kept in zip(record.hits, keep, strict=True))
        for hits, slots, kept in zip(record.hits, record.slots, keep, strict=True):
            behind = list(zip(hits[kept:], slots[kept:], strict=False))
            in_place = record.in_place.intersection(hits[kept:])
            record.in_place -= in_place
            self._residency.unhold(in_place, self._goal)
            self._residency.unhold([handle for handle, slot in behind if slot >= 0], 0)
        fresh = self._residency.take(0, surplus, drop_dirty=True)
        for group, kept in enumerate(keep):
            hits = record.hits[group]
            count = len(hits) - kept
            record.slots[group][kept : len(hits)] = [] if fresh is None else [fresh.pop() for _ in range(count)]
            record.writable.update(record.slots[group][kept:])
            del hits[kept:]
        return fresh is not None
