"""SlotPool: which slot of one memory tier is free, taken or in quarantine, and what it holds.

Owns: the state, generation and occupant of every slot. Owns no bytes, no order of eviction and no time.
Always:  free + taken + quarantined + withdrawn == total, the null slot not counted; only a taken or
         quarantined slot has an occupant.
Units:   slots (index), handles (index that the directory gives to a key), generations (u32, wraps).

A late transfer may write into a slot long after everyone has lost interest. Such a slot waits in quarantine for
the terminal acknowledgement, and each taking has a new generation, so that what is stale can be told. A slot whose
memory goes, or is not there yet, is withdrawn.
"""

from array import array
from collections.abc import Iterable
from itertools import pairwise

from kvtier.allocator.free_queue import FreeQueue
from kvtier.errors import InvariantError

NULL_SLOT = 0
GENERATIONS = 2**32

_FREE, _TAKEN, _QUARANTINED, _NULL, _WITHDRAWN = range(5)
_STATE_NAMES = ("free", "taken", "quarantined", "the null slot", "withdrawn")
_NOBODY = -1


class SlotPool:
    """Bookkeeping of `slots_total` slots. With `null_slot`, slot 0 belongs to no one, for good."""

    def __init__(self, slots_total: int, null_slot: bool) -> None:
        self.slots_total = slots_total
        self.slots_quarantined = 0
        self.slots_withdrawn = 0
        self._state = array("B", [_FREE]) * slots_total
        self._generation = array("I", [0]) * slots_total
        self._occupant = array("i", [_NOBODY]) * slots_total
        self._first_slot: dict[int, int] = {}  # by handle: the slot occupied first
        self._more_slots: dict[int, list[int]] = {}  # by handle: its other slots, duplicates only
        self._free = FreeQueue(slots_total)
        if null_slot:
            self._state[NULL_SLOT] = _NULL
        for slot in range(1 if null_slot else 0, slots_total):
            self._free.push_back(slot)

    @property
    def slots_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` free slots, each with a new generation, or None if there are fewer: all or nothing.

        Slots that were given back together come out together and ascending, so that copies can be joined.
        """
        if count < 0:
            raise InvariantError(f"pool: cannot take {count} slots")
        if count > len(self._free):
            return None
        slots = []
        for _ in range(count):
            slot = self._free.pop_front()
            assert slot is not None  # counted above
            self._state[slot] = _TAKEN
            self._generation[slot] = (self._generation[slot] + 1) % GENERATIONS
            slots.append(slot)
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Taken slots become free, and hold nothing any more.

        Raises InvariantError, and changes nothing, if one of them is not taken or named twice.
        """
        ascending = sorted(slots)
        for slot in ascending:
            self._expect(slot, _TAKEN, "give")
        for slot, following in pairwise(ascending):
            if slot == following:
                raise InvariantError(f"pool: cannot give slot {slot} twice")
        for slot in reversed(ascending):  # to the front: the memory used last is the warmest
            self.vacate(slot)
            self._set_free(slot)

    def occupy(self, slot: int, handle: int) -> None:
        """A taken slot holds the content of `handle` from now on. Further slots of a handle are duplicates.

        Raises InvariantError if the slot is not taken or holds another handle.
        """
        self._expect(slot, _TAKEN, "occupy")
        if self._occupant[slot] == handle:
            return
        if handle < 0 or self._occupant[slot] != _NOBODY:
            raise InvariantError(f"pool: slot {slot} holds {self._occupant[slot]}, not free for handle {handle}")
        self._occupant[slot] = handle
        if self._first_slot.setdefault(handle, slot) != slot:
            self._more_slots.setdefault(handle, []).append(slot)

    def vacate(self, slot: int) -> None:
        """The slot's content is worthless from now on. Nothing happens if it holds none."""
        handle = self.occupant(slot)
        if handle is None:
            return
        self._occupant[slot] = _NOBODY
        more = self._more_slots.get(handle, [])
        if self._first_slot[handle] != slot:
            more.remove(slot)
        elif more:
            self._first_slot[handle] = more.pop(0)
        else:
            del self._first_slot[handle]
        if not more:
            self._more_slots.pop(handle, None)

    def occupant(self, slot: int) -> int | None:
        """The handle whose content the slot holds."""
        self._expect_slot(slot)
        handle = self._occupant[slot]
        return None if handle == _NOBODY else handle

    def occupants(self, slots: Iterable[int]) -> list[int | None]:
        """What each of these slots holds."""
        occupant = self._occupant
        return [None if (handle := occupant[slot]) == _NOBODY else handle for slot in slots]

    def duplicate_of(self, handle: int, besides: int) -> int | None:
        """Another slot than `besides` that holds the content of `handle`."""
        if handle not in self._first_slot:
            return None
        slots = (self._first_slot[handle], *self._more_slots.get(handle, ()))
        return next((slot for slot in slots if slot != besides), None)

    def generation(self, slot: int) -> int:
        """How often the slot has been taken, modulo 2**32."""
        self._expect_slot(slot)
        return self._generation[slot]

    def is_free(self, slot: int) -> bool:
        self._expect_slot(slot)
        return self._state[slot] == _FREE

    def is_withdrawn(self, slot: int) -> bool:
        self._expect_slot(slot)
        return self._state[slot] == _WITHDRAWN

    def withdraw(self, slots: Iterable[int]) -> None:
        """Free slots that nobody is to take, for their memory goes or is not there."""
        for slot in slots:
            self._expect(slot, _FREE, "withdraw")
            self._free.remove(slot)
            self._state[slot] = _WITHDRAWN
            self.slots_withdrawn += 1

    def restore(self, slots: Iterable[int]) -> None:
        """Withdrawn slots are free again."""
        for slot in sorted(slots, reverse=True):
            self._expect(slot, _WITHDRAWN, "restore")
            self.slots_withdrawn -= 1
            self._set_free(slot)

    def quarantine(self, slot: int) -> None:
        """A taken slot whose block is gone but whose bytes somebody may still use. Its occupant stays noted."""
        self._expect(slot, _TAKEN, "quarantine")
        self._state[slot] = _QUARANTINED
        self.slots_quarantined += 1

    def acknowledge(self, slot: int) -> None:
        """The last of them has ended: the slot leaves quarantine, holds nothing and is free."""
        self._expect(slot, _QUARANTINED, "acknowledge")
        self.vacate(slot)
        self.slots_quarantined -= 1
        self._set_free(slot)

    def check(self) -> list[str]:
        """Recount the states, and compare the occupants with what is kept by handle."""
        findings = self._free.check()
        free = [slot for slot in range(self.slots_total) if self._state[slot] == _FREE]
        if free != sorted(self._free):
            findings.append("pool: the free queue and the states disagree")
        quarantined = sum(state == _QUARANTINED for state in self._state)
        if quarantined != self.slots_quarantined:
            findings.append(f"pool: {quarantined} slots in quarantine, {self.slots_quarantined} counted")
        withdrawn = sum(state == _WITHDRAWN for state in self._state)
        if withdrawn != self.slots_withdrawn:
            findings.append(f"pool: {withdrawn} slots are withdrawn, {self.slots_withdrawn} counted")
        by_slot: dict[int, set[int]] = {}
        for slot, handle in enumerate(self._occupant):
            if handle != _NOBODY:
                by_slot.setdefault(handle, set()).add(slot)
                if self._state[slot] not in (_TAKEN, _QUARANTINED):
                    findings.append(f"pool: slot {slot} holds {handle} and is {_STATE_NAMES[self._state[slot]]}")
        by_handle = {handle: {slot} for handle, slot in self._first_slot.items()}
        for handle, slots in self._more_slots.items():
            by_handle.setdefault(handle, set()).update(slots)
        if by_slot != by_handle or any(len(slots) < 2 for slots in map(by_handle.get, self._more_slots) if slots):
            findings.append("pool: occupants by slot and by handle disagree")
        return findings

    def _set_free(self, slot: int) -> None:
        self._state[slot] = _FREE
        self._free.push_front(slot)

    def _expect_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots_total:  # a negative index would silently mean another slot
            raise InvariantError(f"pool: no slot {slot}, there are {self.slots_total}")

    def _expect(self, slot: int, state: int, verb: str) -> None:
        self._expect_slot(slot)
        if self._state[slot] != state:
            raise InvariantError(f"pool: cannot {verb} slot {slot}, it is {_STATE_NAMES[self._state[slot]]}")
