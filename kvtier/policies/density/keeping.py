"""What a `Hazards` knows as u32 cells of a snapshot, and back.

Little-endian: u32 first, last; two sparse tables (used, lost); the worths by class and those of all classes. A sparse
table is u32 cells, then for each u32 class, u32 bucket, f64 count. Worths are u32 rows, u32 buckets in a row (0: none),
then for each u32 class (0: all classes), u32 nothing, and the buckets as f64.
"""

import math
import struct
from collections.abc import Sequence

from kvtier.policies.density.ages import BUCKETS, EDGES
from kvtier.policies.density.classes import CLASSES
from kvtier.policies.density.hazards import Hazards, Row

_TWO, _CELL = struct.Struct("<2I"), struct.Struct("<2Id")


def pack_hazards(hazards: Hazards) -> list[int]:
    """All of it, as u32."""
    parts = [_TWO.pack(hazards.first, hazards.last)]
    for rows in (hazards.used, hazards.lost):
        cells = [(c, b, count) for c, row in sorted(rows.items()) for b, count in enumerate(row) if count]
        parts += [_TWO.pack(len(cells), 0), *(_CELL.pack(*cell) for cell in cells)]
    worths = {0: hazards.pooled, **hazards.worths} if hazards.pooled else {}
    parts.append(_TWO.pack(len(worths), len(hazards.pooled)))
    for class_, row in sorted(worths.items()):
        parts += [_TWO.pack(class_, 0), struct.pack(f"<{len(row)}d", *row)]
    data = b"".join(parts)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def unpack_hazards(cells: Sequence[int]) -> Hazards:
    """Raises ValueError for what `pack_hazards` cannot have made."""
    data, hazards, at = struct.pack(f"<{len(cells)}I", *cells), Hazards(), _TWO.size
    try:
        first, last = _TWO.unpack_from(data)
        if not first + 1 < last < BUCKETS:
            raise ValueError(f"buckets {first} .. {last}")
        hazards.first, hazards.last = first, last
        hazards.edges = EDGES[first:last]
        for rows in (hazards.used, hazards.lost):
            at = _read_counts(data, at, rows)
        rows_count, row_buckets = _TWO.unpack_from(data, at)
        at += _TWO.size
        if row_buckets not in (0, last - first + 1) or (rows_count > 0) != (row_buckets > 0):
            raise ValueError(f"{rows_count} rows of {row_buckets} worths")
        for _ in range(rows_count):
            class_, _ = _TWO.unpack_from(data, at)
            hazards.worths[_class(class_, least=0)] = list(struct.unpack_from(f"<{row_buckets}d", data, at + 8))
            at += _TWO.size + 8 * row_buckets
    except struct.error as error:
        raise ValueError(f"hazards: {error}") from None
    hazards.pooled = hazards.worths.pop(0, [])
    if at != len(data) or not all(map(_is_plain, (hazards.pooled, *hazards.worths.values()))):
        raise ValueError("hazards: too long, or a worth that is no number")
    return hazards


def _read_counts(data: bytes, at: int, rows: dict[int, Row]) -> int:
    cells, _ = _TWO.unpack_from(data, at)
    at += _TWO.size
    for _ in range(cells):
        class_, bucket, count = _CELL.unpack_from(data, at)
        at += _CELL.size
        if bucket >= BUCKETS or not _is_plain([count]):
            raise ValueError(f"{count} blocks in bucket {bucket}")
        rows.setdefault(_class(class_), [0.0] * BUCKETS)[bucket] = count
    return at


def _class(class_: int, least: int = 1) -> int:
    if not least <= class_ <= CLASSES:
        raise ValueError(f"class {class_}")
    return class_


def _is_plain(row: Row) -> bool:
    return all(math.isfinite(number) and number >= 0.0 for number in row)
