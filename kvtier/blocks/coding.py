"""How a tier codes its blocks, and what room a coded block is given. The bytes themselves are made by `kvtier.kernels`.

    none   a block as attention reads it
    int8   a byte per value and a scale per row of head_dim values: lossy
    fp8    the same with e4m3 numbers: lossy
    exp4   lossless; how long a block becomes shows when it is coded

A coded block of int8 and fp8 has one length. One of exp4 is given room for what exp4 always writes and some escapes; a
block with more of them, and any for which that room would be no page less, is kept as it is.
Always: the room is at least what the kernels write of a block that is kept coded (tests compare the two).
Units:  bytes, values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvtier.blocks.spec import BlockSpec, block_specs, span_tokens
from kvtier.types import GroupSpec, ModelSpec, StoreKey, block_key_of, group_of, page_aligned

NONE = "none"
CODECS = (NONE, "int8", "fp8", "exp4")
LOSSY = ("int8", "fp8")  # what comes back differs: such a codec is part of the namespace
FLOATS = {"float32": (4, 24), "float16": (2, 11), "bfloat16": (2, 8)}  # bytes; bits of sign and mantissa

HEAD_BYTES = 16
SCALE_BYTES = 2
GROUP_VALUES = 64  # of exp4: they share an exponent
ESCAPES_SHARE = 128  # one part in so many of a raw block is room for escapes: 14 times what a model's KV needed
ROW_VALUES_MAX = (1 << 16) - 1
EXP4_VALUES_MAX = (1 << 24) - 1


@dataclass(frozen=True, slots=True)
class Coding:
    """How the blocks of one group are coded: values of a dtype, in rows of `row_values` (the group's head_dim)."""

    codec: str
    dtype: str
    row_values: int

    def obstacle(self) -> str:
        """Why such values cannot be coded so; empty if they can."""
        if self.codec == NONE:
            return ""
        if self.dtype not in FLOATS:
            return f"{self.codec} codes {', '.join(FLOATS)}, not {self.dtype}"
        if self.codec in LOSSY and (self.row_values % 2 or self.row_values > ROW_VALUES_MAX):
            return f"{self.codec} needs an even head_dim below 65536, not {self.row_values}"
        return ""

    def room_bytes(self, raw_bytes: int) -> int:
        """What a block of so many bytes is given room for; `raw_bytes` itself for one that is always kept as it is."""
        if self.codec == NONE or self.dtype not in FLOATS:
            return raw_bytes
        if self.codec in LOSSY:
            item_bytes, _ = FLOATS[self.dtype]
            values = raw_bytes // item_bytes
            return HEAD_BYTES + values + SCALE_BYTES * (values // self.row_values)
        wanted_bytes = self._fixed_bytes(raw_bytes) + raw_bytes // ESCAPES_SHARE
        return wanted_bytes if page_aligned(wanted_bytes) < page_aligned(raw_bytes) else raw_bytes

    def codes(self, raw_bytes: int) -> bool:
        """Whether a block of so many bytes can be coded: it is whole rows, or exp4 can shorten it."""
        if self.obstacle():
            return False
        if self.codec in LOSSY:
            row_bytes = self.row_values * FLOATS[self.dtype][0]
            return raw_bytes > 0 and raw_bytes % row_bytes == 0
        return self.codec != NONE and self.room_bytes(raw_bytes) < raw_bytes

    def decodes(self, raw_bytes: int) -> bool:
        """Whether there can be such a block, by whomever it was coded: then the room may have been another."""
        shrinks = self.codec == "exp4" and not self.obstacle() and self._fixed_bytes(raw_bytes) < raw_bytes
        return shrinks or self.codes(raw_bytes)

    def _fixed_bytes(self, raw_bytes: int) -> int:
        """What exp4 writes whatever the values are, see `kvtier.kernels.exponents`; at least raw if it never codes."""
        item_bytes, residue_bits = FLOATS[self.dtype]
        values = raw_bytes // item_bytes
        if raw_bytes % (GROUP_VALUES * item_bytes) or not 0 < values <= EXP4_VALUES_MAX:
            return raw_bytes
        groups = values // GROUP_VALUES
        return HEAD_BYTES + groups * GROUP_VALUES * (4 + residue_bits) // 8 + -(-groups // 4) * 4


class Codings:
    """A tier's codec, and what it comes to for each group of a model. Immutable."""

    def __init__(self, codec: str, groups: Sequence[GroupSpec] = ()) -> None:
        self.codec = codec
        self._shapes = tuple((group.dtype, group.head_dim) for group in groups)
        self.lengths_bytes: tuple[int, ...] = ()  # of the model's blocks, by group
        self._rooms: dict[int, int] = {}  # raw bytes -> room
        self._slots: dict[int, int] = {}  # the same in whole pages: asked for every block that is named or moved

    @classmethod
    def of(cls, codec: str, model: ModelSpec) -> "Codings":
        """Blocks that are as long as the model's have the room of their own group."""
        codings = cls(codec, model.groups)
        codings.lengths_bytes = tuple(spec.block_bytes for spec in block_specs(model))
        for spec, coding in zip(block_specs(model), codings.each, strict=True):
            room_bytes = coding.room_bytes(spec.block_bytes)
            codings._rooms[spec.block_bytes] = max(room_bytes, codings._rooms.get(spec.block_bytes, 0))
        return codings

    def coding(self, key: StoreKey, codec: str | None = None) -> Coding | None:
        """How the block of this key is coded here, or in another codec; None for a group that the model has not."""
        group = group_of(block_key_of(key))
        if group >= len(self._shapes):
            return None
        return self.each[group] if codec in (None, self.codec) else Coding(codec or NONE, *self._shapes[group])

    def room_bytes(self, raw_bytes: int) -> int:
        """The room for a block of so many bytes, of whichever group: what sizes and size classes are made of."""
        room = self._rooms.get(raw_bytes)
        if room is None:
            room = self._rooms[raw_bytes] = max((c.room_bytes(raw_bytes) for c in self.each), default=raw_bytes)
        return room

    def slot_bytes(self, raw_bytes: int) -> int:
        """The same in whole pages."""
        slot = self._slots.get(raw_bytes)
        if slot is None:
            slot = self._slots[raw_bytes] = page_aligned(self.room_bytes(raw_bytes))
        return slot

    def slot_bytes_mean(self, specs: Sequence[BlockSpec]) -> int:
        """The same of a block of any of these groups, of which a prompt has the more the shorter they are."""
        span = span_tokens(specs)
        counts = [span // spec.block_tokens for spec in specs]
        slots = zip(counts, (self.slot_bytes(spec.block_bytes) for spec in specs), strict=True)
        return sum(count * slot for count, slot in slots) // sum(counts)

    @cached_property
    def each(self) -> tuple[Coding, ...]:
        """By group."""
        return tuple(Coding(self.codec, *shape) for shape in self._shapes)


UNCODED = Codings(NONE)
