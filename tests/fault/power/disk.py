"""A disk that may lose power: it applies what `recorder.c` noted, and says what could be left at any moment.

Always: what was synced is in every image; of what was not, each sector is there or not, by chance, whatever came before
or after it; a file or folder is there for certain only once the folder that it lies in was synced. Units: bytes.
"""

import random
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

SECTOR_BYTES = 512
_NOTE = struct.Struct("<IIQQQ")
_MADE, _WRITE, _DURABLE_WRITE, _SYNC, _NAMES, _CUT, _CLAIM, _PUNCH = map(ord, "mwdsncfp")


class Note(NamedTuple):
    """One call that succeeded."""

    kind: int
    path: Path
    offset: int
    length: int
    payload: bytes


def notes(record: Path) -> Iterator[Note]:
    """What a recorder left, in order."""
    with record.open("rb") as file:
        while head := file.read(_NOTE.size):
            kind, path_bytes, offset, length, payload_bytes = _NOTE.unpack(head)
            yield Note(kind, Path(file.read(path_bytes).decode()), offset, length, file.read(payload_bytes))


class _File:
    """What is durable of a file, and the calls since."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.pending: list[Note] = []

    def apply(self, note: Note) -> None:
        if note.kind == _SYNC:
            for before in self.pending:
                _apply(self.durable, before)
            self.pending = []
        if note.kind in (_SYNC, _MADE):
            return
        if note.kind == _DURABLE_WRITE:  # itself only: what was written before it may still be under way
            _apply(self.durable, note)
        self.pending.append(note)

    def content(self, chance: random.Random, luck: float) -> bytearray:
        content = bytearray(self.durable)
        for note in self.pending:
            _apply(content, note, chance, 1.0 if note.kind == _DURABLE_WRITE else luck)
        return content


class Disk:
    """The files below `root`, which has a name itself."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[Path, _File] = {}
        self._named: dict[Path, bool] = {root: True}  # by file and folder: whether it would be found for certain

    def apply(self, note: Note) -> None:
        """One call more."""
        if note.kind == _NAMES:
            self._named.update((path, True) for path in self._named if path.parent == note.path)
            return
        self._files.setdefault(note.path, _File()).apply(note)
        for path in (note.path, *note.path.parents):
            if path == self._root:
                break
            self._named.setdefault(path, False)

    def image(self, folder: Path, chance: random.Random, luck: float) -> None:
        """Write down what a power loss now may leave. luck: the chance of each unsynced sector, and of each name."""
        lost = {path for path, named in self._named.items() if not named and chance.random() >= luck}
        for path, file in self._files.items():
            if lost.isdisjoint((path, *path.parents)):
                target = folder / path.relative_to(self._root)
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                target.write_bytes(file.content(chance, luck))


def _apply(content: bytearray, note: Note, chance: random.Random | None = None, luck: float = 1.0) -> None:
    """Apply one call to a file, or as much of it as luck has it."""
    end = note.offset + note.length
    if note.kind in (_WRITE, _DURABLE_WRITE):
        bounds = [note.offset, *range(_rounded(note.offset + 1), end, SECTOR_BYTES), end]
        for start, stop in pairwise(bounds):
            if chance is None or chance.random() < luck:
                content.extend(bytes(max(0, stop - len(content))))
                content[start:stop] = note.payload[start - note.offset : stop - note.offset]
    elif chance is not None and chance.random() >= luck:
        return
    elif note.kind == _CUT:
        del content[note.length :]
        content.extend(bytes(note.length - len(content)))
    elif note.kind == _CLAIM:
        content.extend(bytes(max(0, end - len(content))))
    elif note.kind == _PUNCH:
        end = max(note.offset, min(end, len(content)))
        content[note.offset : end] = bytes(end - note.offset)


def _rounded(offset: int) -> int:
    return -(-offset // SECTOR_BYTES) * SECTOR_BYTES
