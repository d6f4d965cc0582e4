"""The slots of a lease, and whose blocks lie in them. Owns nothing. Units: slots; ~slot is one of the tier below the
top, read where it is; handles.
"""

from kvtier.allocator.slot_pool import SlotPool
from kvtier.cache.directory import Directory
from kvtier.cache.leases import LeaseRecord


def used_blocks(record: LeaseRecord, top: SlotPool, below: SlotPool) -> list[list[int]]:
    """The blocks that have a name, by group, the deepest first."""
    rows = []
    for slots in record.slots:
        here = iter(top.occupants(slot for slot in slots if slot >= 0))
        there = iter(below.occupants(~slot for slot in slots if slot < 0))
        used = [next(here if slot >= 0 else there) for slot in slots]
        rows.append([handle for handle in reversed(used) if handle is not None])
    return rows


def shared_and_private(record: LeaseRecord, top: SlotPool, directory: Directory) -> tuple[list[int], list[int]]:
    """Blocks in slots of the top tier that others find too, and the slots that nobody else uses."""
    shared, private = [], []
    slots = [slot for row in record.slots for slot in row if slot >= 0]
    for slot, handle in zip(slots, top.occupants(slots), strict=True):
        if handle is not None and directory.place(handle, 0) == slot:
            shared.append(handle)
        else:
            private.append(slot)  # never committed, or a duplicate
    return shared, private
