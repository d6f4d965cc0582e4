"""Takes a part of a bundle apart as its bytes come in, whoever made it.

Owns: the bytes of the block that is not yet whole. Pure: no I/O. Always: what is handed out is a whole frame of a
namespace that the manifest names, with the right checksum; what is kept is one block at most, of a length that the
manifest allows; a part is right only if `finish` was silent.
Units: bytes.
"""

import hashlib
from typing import NamedTuple

from kvtier.blocks.codec import Frame, decode
from kvtier.errors import CorruptBlock
from kvtier.tiers.bundle.entry import ENTRY_BYTES, UNCODED, Entry, decode_entry
from kvtier.tiers.bundle.manifest import Manifest, Part
from kvtier.types import HASH_BYTES_MAX, PAGE_BYTES, page_aligned

FRAME_HEAD_BYTES_MAX = 68 + HASH_BYTES_MAX


class Incoming(NamedTuple):
    """One block of a bundle. Its payload is a view of bytes that nobody changes."""

    entry: Entry
    frame: Frame


class PartScan:
    """One pass over one part."""

    def __init__(self, manifest: Manifest, part: Part) -> None:
        self._manifest = manifest
        self._part = part
        self._fingerprints = manifest.fingerprints()
        self._digest = hashlib.sha256()
        self._pending = b""
        self._left_bytes = part.length_bytes  # of the part, behind what was taken apart
        self._blocks = self._payload_bytes = 0

    def missing_bytes(self) -> int:
        """How many more bytes the block needs of which there are some; 0 if that is not known."""
        if len(self._pending) < ENTRY_BYTES:
            return 0
        return ENTRY_BYTES + decode_entry(self._pending[:ENTRY_BYTES]).frame_bytes - len(self._pending)

    def feed(self, data: bytes) -> list[Incoming]:
        """The blocks that these next bytes make whole. Raises CorruptBlock as soon as something is wrong."""
        self._digest.update(data)
        view, at = memoryview(self._pending + data), 0
        found = []
        while len(view) - at >= ENTRY_BYTES:
            entry = decode_entry(bytes(view[at : at + ENTRY_BYTES]))
            end = at + ENTRY_BYTES + entry.frame_bytes
            self._expect_fits(entry, self._left_bytes - at - ENTRY_BYTES)
            if end > len(view):
                break
            frame = decode(view[at + ENTRY_BYTES : end])
            if frame.fingerprint not in self._fingerprints:
                raise CorruptBlock("a block of a namespace that the bundle does not name")
            if not frame.payload:
                raise CorruptBlock("a block of no bytes")
            self._expect_slot(entry, len(frame.payload))
            found.append(Incoming(entry, frame))
            self._blocks += 1
            self._payload_bytes += len(frame.payload)
            at = end
        self._pending = bytes(view[at:])
        self._left_bytes -= at
        return found

    def finish(self) -> None:
        """All bytes are there. Raises CorruptBlock if the part is not what the manifest says."""
        part = self._part
        if self._pending or self._left_bytes:
            raise CorruptBlock("it ends within a block")
        if (self._blocks, self._payload_bytes) != (part.blocks, part.payload_bytes):
            raise CorruptBlock(f"it has {self._blocks} blocks of {self._payload_bytes} bytes, unlike the manifest says")
        if self._digest.digest() != part.sha256:
            raise CorruptBlock("it does not match its digest")

    def _expect_slot(self, entry: Entry, payload_bytes: int) -> None:
        stride_bytes = entry.stride_pages * PAGE_BYTES
        if entry.codec != UNCODED and not payload_bytes <= stride_bytes <= page_aligned(self._manifest.block_bytes_max):
            raise CorruptBlock(f"a coded block of {payload_bytes} bytes in a slot of {stride_bytes}")

    def _expect_fits(self, entry: Entry, left_bytes: int) -> None:
        """Before any memory is taken for it."""
        manifest = self._manifest
        if entry.frame_bytes > left_bytes:
            raise CorruptBlock(f"a block of {entry.frame_bytes} bytes, where {left_bytes} are left")
        if entry.frame_bytes > manifest.block_bytes_max + FRAME_HEAD_BYTES_MAX:
            raise CorruptBlock(f"a block of {entry.frame_bytes} bytes, longer than the manifest says")
        if entry.codec not in manifest.codecs:
            raise CorruptBlock(f"a block in codec {entry.codec}, which the manifest does not name")
