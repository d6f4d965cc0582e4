"""ARC's state as its snapshot tells it, read by the format's description and nothing of kvtier."""

import struct
import zlib
from typing import NamedTuple


class ArcState(NamedTuple):
    """Lists run from least to most recently used; `size_classes` are those of the residents."""

    p: float
    c: int
    t1: list[int]
    t2: list[int]
    b1: list[int]
    b2: list[int]
    size_classes: dict[int, int]
    counted: set[int]


def arc_state(snapshot: bytes) -> ArcState:
    """f64 p, u32 c; T1, T2, E1, E2, B1, B2, the size classes of T1, T2, E1 and E2, ghosts whose return was counted."""
    magic, p, c, *counts = struct.unpack_from("<8sdI8I", snapshot)
    assert magic == b"KVTARC\x00\x02"
    assert struct.unpack("<I", snapshot[-4:]) == (zlib.crc32(snapshot[:-4]),)
    cells = list(struct.unpack(f"<{sum(counts)}I", snapshot[struct.calcsize("<8sdI8I") : -4]))
    t1, t2, ended, shared, b1, b2, classes, counted = ([cells.pop(0) for _ in range(count)] for count in counts)
    assert not ended + shared  # they are filled by hints alone
    return ArcState(p, c, t1, t2, b1, b2, dict(zip(t1 + t2, classes, strict=True)), set(counted))
