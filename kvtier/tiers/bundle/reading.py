"""Reads a bundle that anybody may have made, in pieces.

Owns: the file that is open. Always: no file is opened but the manifest and parts that it names, and no link is
followed; memory is bounded by a piece and a block.
Units: bytes.
"""

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiofiles

from kvtier.errors import BundleError, CorruptBlock
from kvtier.tiers.bundle.manifest import MANIFEST_BYTES_MAX, MANIFEST_NAME, Manifest, Part, decode_manifest
from kvtier.tiers.bundle.scan import Incoming, PartScan

PIECE_BYTES = 8 << 20
AGAIN = "Copy the bundle again, or export the store again"


async def read_manifest(folder: Path) -> Manifest:
    """What the bundle in a folder says of itself. Raises BundleError."""
    path = folder / MANIFEST_NAME
    try:
        async with aiofiles.open(_open_plain(path), "rb") as file:
            data = await file.read(MANIFEST_BYTES_MAX + 1)
        if len(data) > MANIFEST_BYTES_MAX:
            raise CorruptBlock(f"it is longer than {MANIFEST_BYTES_MAX} bytes")
        return decode_manifest(data)
    except FileNotFoundError as error:
        raise BundleError(str(folder), "it is not a bundle", "Name the folder that `kvtier export` wrote") from error
    except (CorruptBlock, OSError) as error:
        raise _refused(path, error) from error


async def read_part(folder: Path, manifest: Manifest, part: Part) -> AsyncIterator[list[Incoming]]:
    """The blocks of a part, some at a time; that the whole part is right is known only when this ends without an error.

    Raises BundleError as soon as something is wrong.
    """
    path = folder / part.name
    scan = PartScan(manifest, part)
    try:
        async with aiofiles.open(_open_plain(path), "rb") as file:
            length_bytes = os.fstat(file.fileno()).st_size
            if length_bytes != part.length_bytes:
                raise CorruptBlock(f"it has {length_bytes} bytes, and {part.length_bytes} are expected")
            while data := await file.read(max(PIECE_BYTES, scan.missing_bytes())):
                yield await asyncio.to_thread(scan.feed, data)
        scan.finish()
    except MemoryError:
        problem = f"a block of it needs more memory than there is: up to {manifest.block_bytes_max} bytes"
        raise BundleError(str(path), problem, "Import it on a larger machine, if you trust it") from None
    except (CorruptBlock, OSError) as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: Exception) -> BundleError:
    said = error.strerror if isinstance(error, OSError) else str(error)
    return BundleError(str(path), said or str(error), AGAIN)


def _open_plain(path: Path) -> int:
    """Only a plain file will do: a pipe would wait for ever, a link lead anywhere."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptBlock("it is a link, and a bundle is made of files") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptBlock("it is not a plain file")
    return descriptor
