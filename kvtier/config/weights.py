"""`weights_epoch: auto`: a digest that changes when the model's weight files change.

Owns: which bytes of a file stand for it, and a cache of those digests. Always: the same files give the same epoch
on every machine, whatever folder they lie in; a renamed, resized or visibly changed file gives another one.

A file is digested whole up to `WHOLE_BYTES_MAX`. Of a larger one count its size, the first and the last 64 KiB
and 64 pieces of 4 KiB spread evenly between them: gigabytes of weights take milliseconds, and training changes
every tensor. An edit that avoids all these pieces goes unseen; whoever makes such edits sets the epoch by hand.
Hidden files and folders (a leading dot) do not count. Units: bytes.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from kvtier.errors import ConfigError

EDGE_BYTES = 64 << 10
PIECES = 64
PIECE_BYTES = 4 << 10
WHOLE_BYTES_MAX = 2 * EDGE_BYTES + PIECES * PIECE_BYTES
SCHEME = b"kvtier weights 1"  # raised when other bytes are chosen

_DIGEST = re.compile(rb"[0-9a-f]{64}")


def weights_epoch(weights: Path, cache_folder: Path | None = None) -> str:
    """The epoch of a weight file, or of a folder of them: ``auto-`` and 32 hex digits.

    cache_folder: where digests are kept by path, size and mtime_ns; None, or one that cannot be written, only
    costs time. Raises ConfigError when there are no weights to read.
    """
    digest = hashlib.sha256(SCHEME)
    try:
        for name, path in _files(weights):
            facts = path.stat()
            encoded = os.fsencode(name)
            digest.update(b"%d:%b,%d:" % (len(encoded), encoded, facts.st_size))
            digest.update(_digest_of(path, facts, cache_folder))
    except OSError as error:
        raise _unreadable(weights, error) from error
    return f"auto-{digest.hexdigest()[:32]}"


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """The user's cache folder for kvtier, or None if there is no home."""
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvtier"
    home = environ.get("HOME")
    return Path(home) / ".cache" / "kvtier" if home else None


def _files(weights: Path) -> list[tuple[str, Path]]:
    """The files that count, named relative to the folder, in the order of their names' bytes."""
    if weights.is_file():
        return [(weights.name, weights)]
    if not weights.is_dir():
        raise ConfigError("model.weights", f"{weights} does not exist", "Name the model's weight file or folder.")
    found = []
    for folder, folders, names in os.walk(weights, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found.append((path.relative_to(weights).as_posix(), path))
    if not found:
        raise ConfigError("model.weights", f"{weights} holds no files", "Name the folder that has the weights.")
    return sorted(found, key=lambda item: os.fsencode(item[0]))


def _digest_of(path: Path, facts: os.stat_result, cache: Path | None) -> bytes:
    """The digest of one file's chosen bytes as hex, from the cache where it is known."""
    identity = b"%b\0%b\0%d\0%d" % (SCHEME, os.fsencode(path.resolve()), facts.st_size, facts.st_mtime_ns)
    entry = None if cache is None else cache / "weights" / hashlib.sha256(identity).hexdigest()
    known = None if entry is None else _read_entry(entry)
    if known is not None:
        return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in _pieces(file, facts.st_size):
            digest.update(piece)
    fresh = digest.hexdigest().encode()
    if entry is not None:
        _write_entry(entry, fresh)
    return fresh


def _pieces(file: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    if size_bytes <= WHOLE_BYTES_MAX:
        yield file.read()
        return
    yield file.read(EDGE_BYTES)
    # Piece i starts at the i-th of PIECES equal steps between the two edges; a step is longer than a piece here.
    between_bytes = size_bytes - 2 * EDGE_BYTES
    for index in range(PIECES):
        file.seek(EDGE_BYTES + between_bytes * index // PIECES)
        yield file.read(PIECE_BYTES)
    file.seek(size_bytes - EDGE_BYTES)
    yield file.read(EDGE_BYTES)


def _read_entry(entry: Path) -> bytes | None:
    try:
        content = entry.read_bytes()
    except OSError:
        return None
    return content if _DIGEST.fullmatch(content) else None


def _write_entry(entry: Path, digest: bytes) -> None:
    # Written aside and renamed: another process must never read half an entry.
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(digest)
        Path(name).replace(entry)
    except OSError:
        return  # a read-only or full home only costs the next start a few milliseconds


def _raise(error: OSError) -> None:
    raise error


def _unreadable(weights: Path, error: OSError) -> ConfigError:
    reason = f"{error.filename or weights} cannot be read: {error.strerror}"
    return ConfigError("model.weights", reason, "Make it readable, or set model.weights_epoch to a string.")
