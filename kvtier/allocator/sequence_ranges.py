"""SequenceRanges: slots of an arena, shown one behind the other in ranges of their own.

Owns: these ranges, in which the arena's memory is mapped once more, read-only where the driver can. Any number of them
may show the same slot. Does not own the memory: a handle lives in the arena.
Always:  a range is shown or idle; in an idle one nothing is mapped and nobody holds a view of it, so a view that
         outlives its sequence never sees the next one; blocks_shown <= blocks_max. One caller at a time; nothing waits.
Units:   slots (index), blocks (a slot shown once), granules, bytes.

A shown slot's memory must stay where it is: whoever shrinks the arena asks `shows`, and nobody may be reading what is
hidden. Ranges are kept for the next sequence of about their size, since reserving one costs 30 us.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from kvtier.allocator.driver import Handle, MemoryDriver
from kvtier.allocator.granule_range import GranuleRange
from kvtier.allocator.vmm import Arena
from kvtier.errors import DeviceLost, InvariantError, OutOfMemory, UsageError

IDLE_RANGES_MAX = 64


class SequenceRange:
    """Some slots, one behind the other. Made by `show`, ended by `hide`."""

    def __init__(
        self, addresses: GranuleRange, slots: Sequence[int], memory: Sequence[Handle], length_bytes: int
    ) -> None:
        self.slots = tuple(slots)
        self.memory = tuple(memory)  # by granule
        self.length_bytes = length_bytes
        self.addresses = addresses

    @property
    def address(self) -> int:
        """Where its first slot begins."""
        return self.addresses.address


class SequenceRanges:
    """All such ranges of one arena, of which granules must divide a slot."""

    def __init__(self, driver: MemoryDriver, arena: Arena, blocks_max: int | None) -> None:
        """blocks_max: how many blocks may be shown at a time; None: any number. Driver and arena stay the caller's."""
        if arena.geometry.stride_bytes % arena.geometry.granule_bytes:
            raise InvariantError(f"sequences: {arena.geometry} has granules that do not divide a slot")
        self.blocks_max = blocks_max
        self._driver = driver
        self._arena = arena
        self._shown: set[SequenceRange] = set()
        self._times_shown: Counter[int] = Counter()  # by slot
        self._idle: dict[int, list[GranuleRange]] = {}  # by granules

    @property
    def blocks_shown(self) -> int:
        return self._times_shown.total()

    @property
    def is_read_only(self) -> bool:
        """Whether the driver keeps writers out of what is shown."""
        return self._driver.has_read_only

    def shows(self, slot: int) -> bool:
        """Whether a slot is shown, so that its memory must not go."""
        return slot in self._times_shown

    def show(self, slots: Sequence[int]) -> SequenceRange:
        """Map slots one behind the other, in this order.

        Raises OutOfMemory beyond `blocks_max`, DriverError, or InvariantError for a slot without memory; then nothing
        changed.
        """
        if self.blocks_max is not None and self.blocks_shown + len(slots) > self.blocks_max:
            raise OutOfMemory(
                f"sequence views: {len(slots)} blocks more than the {self.blocks_shown} shown exceed the "
                f"{self.blocks_max} that this process may map; close views first"
            )
        memory = self._arena.memory_of(slots)
        with ExitStack() as undo:
            addresses = self._range_for(len(memory))
            undo.callback(self._keep, addresses)
            addresses.attach(dict(enumerate(memory)), undo, write=False)
            undo.pop_all()
        shown = SequenceRange(addresses, slots, memory, len(slots) * self._arena.geometry.stride_bytes)
        self._shown.add(shown)
        self._times_shown.update(shown.slots)
        return shown

    def hide(self, shown: SequenceRange) -> None:
        """Unmap a sequence. Nobody may be reading it. A view that still lives keeps the addresses from others.

        On a DriverError it is shown as before.
        """
        if shown not in self._shown:
            raise InvariantError("sequences: this one is not shown")
        shown.addresses.detach(range(len(shown.memory)))
        self._shown.remove(shown)
        self._times_shown -= Counter(shown.slots)  # which forgets what is shown no more
        self._keep(shown.addresses)

    def array(self, shown: SequenceRange) -> Any:
        """uint8 array [length_bytes] over a sequence, zero-copy; whoever holds part of it keeps the range from others.

        Raises UsageError once it is hidden: the range may show another one by now.
        """
        if shown not in self._shown:
            raise UsageError("this sequence is not shown any more")
        return shown.addresses.view()[: shown.length_bytes]

    def close(self) -> None:
        """Unmap everything and give all addresses back. Nobody may be reading any of it."""
        with suppress(DeviceLost):  # the driver's own close undoes what is left
            for shown in list(self._shown):
                self.hide(shown)
            for idle in self._idle.values():
                while idle:
                    idle.pop().free()

    def check(self) -> list[str]:
        """Compare what is shown with the arena as it is now."""
        findings = []
        for shown in self._shown:
            missing = [slot for slot in shown.slots if not self._arena.is_mapped(slot)]
            if missing:
                findings.append(f"sequences: slots {missing} are shown and have no memory")
            elif self._arena.memory_of(shown.slots) != [*shown.memory]:
                findings.append(f"sequences: slots {shown.slots} are shown with memory that is not theirs any more")
        if Counter(slot for shown in self._shown for slot in shown.slots) != self._times_shown:
            findings.append("sequences: the slots shown and their counts disagree")
        if any(addresses.has_views for idle in self._idle.values() for addresses in idle):
            findings.append("sequences: somebody sees an idle range")
        return findings

    # ------------------------------------------------------------ inside

    def _range_for(self, granules: int) -> GranuleRange:
        """An idle range, or a new one, of the next power of two: then it serves other lengths, too."""
        size = 1 << (granules - 1).bit_length()
        idle = self._idle.get(size)
        return idle.pop() if idle else GranuleRange(self._driver, size)

    def _keep(self, addresses: GranuleRange) -> None:
        """For the next sequence, unless somebody would see that one through a view of this."""
        if addresses.has_views or sum(map(len, self._idle.values())) >= IDLE_RANGES_MAX:
            addresses.free()
        else:
            self._idle.setdefault(addresses.granules, []).append(addresses)
