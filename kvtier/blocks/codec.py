"""The envelope of one block, and the one rule for a payload's checksum.

A frame carries a block where no index vouches for it: in a bundle, at a remote store, inline in a database.
Layout (little-endian; docs/format.md, "Frame"):

    0   4   magic "KVTB"
    4   1   version (1)        5  1  flags (0)        6  1  hash length h (1-64)        7  1  reserved (0)
    8  32   namespace fingerprint
   40   8   payload length in bytes
   48   8   payload checksum
   56 h+4   block key: hash, then group (4 bytes big-endian)
 60+h   8   header check: xxh3_64, seed 0, over everything before it
 68+h       payload

Always: decoding hostile bytes ends in a Frame that was encoded as such, or in CorruptBlock; nothing else.
Units: bytes.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvtier.blocks.namespace import FINGERPRINT_BYTES
from kvtier.errors import CorruptBlock, UsageError
from kvtier.types import GROUP_BYTES, HASH_BYTES_MAX, BlockKey

MAGIC = b"KVTB"
FRAME_VERSION = 1
SEED_BYTES = 8

_HEAD = struct.Struct("<4sBBBB32sQQ")
_CHECK = struct.Struct("<Q")

Payload = bytes | bytearray | memoryview


def checksum(key: BlockKey, payload: Payload) -> int:
    """The checksum (u64) of a block's payload: xxh3_64, seeded with the first 8 bytes of the block's hash.

    The seed is read little-endian, a shorter hash padded with zeroes, so that intact bytes of another block do
    not pass. Releases the GIL for large payloads only (xxhash 4.1: of more than 64 KiB).
    """
    seed = int.from_bytes(key[:-GROUP_BYTES][:SEED_BYTES], "little")
    return xxhash.xxh3_64_intdigest(payload, seed=seed)


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded block. `payload` is a view of the decoded buffer, not a copy."""

    fingerprint: bytes
    key: BlockKey
    payload: memoryview
    checksum: int


def encode(fingerprint: bytes, key: BlockKey, payload: Payload) -> tuple[bytes, memoryview]:
    """The frame as two pieces, head and payload, to be written one after the other without a copy.

    Raises UsageError if the fingerprint is not 32 bytes or the key's hash not 1 to 64.
    """
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise UsageError(f"a fingerprint of {len(fingerprint)} bytes; it has {FINGERPRINT_BYTES}")
    hash_bytes = len(key) - GROUP_BYTES
    if not 1 <= hash_bytes <= HASH_BYTES_MAX:
        raise UsageError(f"a hash of {hash_bytes} bytes; use 1 to {HASH_BYTES_MAX}")
    view = memoryview(payload).cast("B")
    fixed = _HEAD.pack(MAGIC, FRAME_VERSION, 0, hash_bytes, 0, fingerprint, len(view), checksum(key, view))
    head = fixed + key
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head)), view


def decode(data: Payload) -> Frame:
    """The only frame in `data`. Raises CorruptBlock if it is damaged, or not alone."""
    frame, rest = decode_first(data)
    if rest:
        raise CorruptBlock(f"{len(rest)} bytes follow the frame")
    return frame


def decode_first(data: Payload) -> tuple[Frame, memoryview]:
    """The first of several frames, and what follows it. Raises CorruptBlock if the frame is damaged."""
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise CorruptBlock(f"{len(view)} bytes are too few for a frame")
    magic, version, flags, hash_bytes, reserved, fingerprint, payload_bytes, stored = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise CorruptBlock("no frame: wrong magic")
    if version != FRAME_VERSION or flags or reserved:
        raise CorruptBlock(f"a frame of version {version}, flags {flags}; this reads version {FRAME_VERSION}")
    if not 1 <= hash_bytes <= HASH_BYTES_MAX:
        raise CorruptBlock(f"a frame with a hash of {hash_bytes} bytes")
    key_end = _HEAD.size + hash_bytes + GROUP_BYTES
    payload_start = key_end + _CHECK.size
    if len(view) < payload_start:
        raise CorruptBlock("a frame whose head is cut off")
    if _CHECK.unpack_from(view, key_end)[0] != xxhash.xxh3_64_intdigest(view[:key_end]):
        raise CorruptBlock("a frame whose head is damaged")
    if payload_bytes > len(view) - payload_start:
        raise CorruptBlock(f"a frame that lacks {payload_bytes - len(view) + payload_start} bytes of its payload")
    key = BlockKey(bytes(view[_HEAD.size : key_end]))
    payload = view[payload_start : payload_start + payload_bytes]
    if checksum(key, payload) != stored:
        raise CorruptBlock("a frame whose payload does not match its checksum")
    return Frame(fingerprint, key, payload, stored), view[payload_start + payload_bytes :]
