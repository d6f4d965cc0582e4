"""The lines of a text file, whatever it is packed with.

Owns the open file while it is read. Always: what cannot be read is a TraceError that names the file, and so is one that
ends before its packing does: half a trace has figures too. The packing follows from the name's end: .xz, .gz, .zst; any
other name is plain text. A byte order mark, which some editors put in front, is passed over.
"""

import gzip
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from kvtier.errors import TraceError

Opener = Callable[[Path], IO[bytes]]

# The first is Python's own, from 3.14 on, the second the same for older ones. Others read half a file, or the first of
# its frames, without a word.
ZSTD_MODULES = ("compression.zstd", "backports.zstd")
DAMAGED = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of every line that is not empty. Raises TraceError."""
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except _damages() as error:
        remedy = "Fetch the file again; one whose name ends in .xz, .gz or .zst has to be packed so."
        raise TraceError(str(path), None, f"its packing is damaged ({error})", remedy) from error
    except UnicodeDecodeError as error:
        remedy = "A trace is JSON, one request a line; packed ones end in .xz, .gz or .zst."
        raise TraceError(str(path), number + 1, "it is no UTF-8 text", remedy) from error
    except OSError as error:
        problem = error.strerror or str(error)
        raise TraceError(str(path), None, problem, "Name a trace that can be read.") from error


def stem_of(path: Path) -> str:
    """The file's name without .jsonl and packing."""
    name = path.name
    for suffix in (*_OPENERS, ".jsonl", ".json"):
        name = name.removesuffix(suffix)
    return name or path.name


@contextmanager
def _opened(path: Path) -> Iterator[TextIOWrapper]:
    opener = _OPENERS.get(path.suffix.lower(), _plain)
    with opener(path) as packed, TextIOWrapper(packed, encoding="utf-8-sig") as text:
        yield text


def _plain(path: Path) -> IO[bytes]:
    return path.open("rb")


def _xz(path: Path) -> IO[bytes]:
    return lzma.open(path, "rb")


def _gz(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb")  # type: ignore[return-value]  # a GzipFile reads as an IO[bytes] does


def _zst(path: Path) -> IO[bytes]:
    path.stat()  # a file that is not there is told before a package that is not
    module = _zstd_module()
    if module is None:
        remedy = "Install one (pip install 'kvtier[zstd]'), or unpack the file with `zstd -d`."
        raise TraceError(str(path), None, "no decoder for .zst is installed", remedy)
    file: IO[bytes] = module.open(path, "rb")
    return file


def _zstd_module() -> Any | None:
    """The first that is installed; both open a file in the same way."""
    for name in ZSTD_MODULES:
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


def _damages() -> tuple[type[Exception], ...]:
    """What a damaged file raises. Nothing is imported: this is asked while something is being raised."""
    return (*DAMAGED, *(sys.modules[name].ZstdError for name in ZSTD_MODULES if name in sys.modules))


_OPENERS: dict[str, Opener] = {".xz": _xz, ".gz": _gz, ".zst": _zst}
