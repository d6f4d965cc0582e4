"""Where a store's payloads lie, a slab file or a table, for those who open a store without being its cache.

Owns nothing. Units: bytes.
"""

from pathlib import Path

import lmdb

from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.index import DAMAGE_REMEDY, DATA_NAME, DamagedStore, refused
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.layout import INLINE_FORMAT_VERSION, PAYLOAD_NAME, SLAB_NAME, Header
from kvtier.tiers.lmdb.slab import Slab
from kvtier.types import page_aligned

IO_THREADS = 2  # one reads while the other makes checksums; a look must not crowd out the writer
INLINE_SPARE_BYTES = 1 << 20


def payload_path(folder: Path, header: Header) -> Path:
    """The file that the blocks' bytes are in."""
    return folder / PAYLOAD_NAME / DATA_NAME if _is_inline(header) else folder / SLAB_NAME


def open_to_look(folder: Path, header: Header, live: bool) -> Slab | InlineSlab:
    """live: somebody else writes to it. Raises DamagedStore or OSError."""
    _expect(folder, header)
    if not _is_inline(header):
        return Slab(BlockFile.open_readonly(folder / SLAB_NAME), IO_THREADS)
    try:
        return InlineSlab.open_readonly(folder / PAYLOAD_NAME, live)
    except (CorruptBlock, lmdb.Error) as error:
        raise refused(folder, "payloads", error) from error


def open_to_mend(folder: Path, header: Header, durability: str) -> Slab | InlineSlab:
    """For whoever holds the store's lock. Raises DamagedStore or OSError."""
    _expect(folder, header)
    if not _is_inline(header):
        return Slab(BlockFile.open(folder / SLAB_NAME), IO_THREADS)
    held_bytes = payload_path(folder, header).stat().st_size
    map_bytes = page_aligned(held_bytes + held_bytes // 2) + INLINE_SPARE_BYTES  # deleting needs new pages first
    try:
        return InlineSlab.open(folder / PAYLOAD_NAME, durability, map_bytes)
    except (CorruptBlock, lmdb.Error) as error:
        raise refused(folder, "payloads", error) from error


def _is_inline(header: Header) -> bool:
    return header.format == INLINE_FORMAT_VERSION


def _expect(folder: Path, header: Header) -> None:
    if not payload_path(folder, header).is_file():
        raise DamagedStore(str(folder), "there is an index and no slab", DAMAGE_REMEDY)
