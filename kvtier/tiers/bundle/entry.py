"""What stands before each frame of a bundle, as docs/store.md specifies it.

Pure. Always: hostile bytes end in an entry that was encoded as such, or in CorruptBlock.
Units: bytes.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvtier.errors import CorruptBlock

MAGIC = b"KVTE"
ENTRY_VERSION = 1
UNCODED = 0

# magic, version, codec, reserved, length of the block once decoded, stride in pages of its slot, length of the frame
_HEAD = struct.Struct("<4sBBHIIQ")
_CHECK = struct.Struct("<Q")
ENTRY_BYTES = _HEAD.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands before a frame. codec: UNCODED, or its number in a record of the store, with the length of the block
    once it is decoded and the stride of its slot; both are 0 for an uncoded one."""

    frame_bytes: int
    codec: int = UNCODED
    raw_bytes: int = 0
    stride_pages: int = 0


def encode_entry(entry: Entry) -> bytes:
    fields = entry.codec, 0, entry.raw_bytes, entry.stride_pages, entry.frame_bytes
    head = _HEAD.pack(MAGIC, ENTRY_VERSION, *fields)
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


def decode_entry(data: bytes) -> Entry:
    """The entry in ENTRY_BYTES bytes. Raises CorruptBlock."""
    if len(data) != ENTRY_BYTES:
        raise CorruptBlock("an entry that is cut off")
    magic, version, codec, reserved, raw_bytes, stride_pages, frame_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise CorruptBlock("no entry: wrong magic")
    if _CHECK.unpack_from(data, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(data[: _HEAD.size]):
        raise CorruptBlock("a damaged entry")
    if version != ENTRY_VERSION or reserved:
        raise CorruptBlock(f"an entry of version {version}; this reads version {ENTRY_VERSION}")
    if (codec == UNCODED) != (raw_bytes == 0) or (codec == UNCODED) != (stride_pages == 0):
        raise CorruptBlock("an entry that contradicts itself")
    return Entry(frame_bytes, codec, raw_bytes, stride_pages)
