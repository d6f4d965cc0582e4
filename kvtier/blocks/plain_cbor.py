"""Reads the CBOR that kvtier writes, and nothing beyond it: no tags, floats or endless items (RFC 8949, section 3).

Pure. Always: what a reader spends is bounded by the bytes it is given; a general decoder follows tags, and a hundred
bytes of shared references or of a decimal exponent keep it busy for ever.
"""

from typing import Any

DEPTH_MAX = 16
_SIMPLE = {20: False, 21: True, 22: None}
_LONG = {24: 1, 25: 2, 26: 4, 27: 8}  # additional information -> bytes of the argument that follow


def loads(data: bytes) -> Any:
    """Ints, bytes, text, lists, maps, booleans, None. Raises ValueError for anything else, and for bytes left over."""
    value, end = _item(memoryview(data), 0, 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes behind the CBOR item")
    return value


def _item(data: memoryview, at: int, depth: int) -> tuple[Any, int]:
    """The item at an offset, and where it ends."""
    if at >= len(data) or depth > DEPTH_MAX:
        raise ValueError("CBOR that ends too early, or is nested too deep")
    kind, count = divmod(data[at], 32)
    at += 1
    if kind == 7:
        if count not in _SIMPLE:
            raise ValueError("a CBOR value of a kind that is not used here")
        return _SIMPLE[count], at
    if count >= 24:
        if count not in _LONG:
            raise ValueError("CBOR of no fixed length")
        stop = at + _LONG[count]
        count, at = int.from_bytes(data[at:stop], "big"), stop
    if at > len(data) or (2 <= kind <= 5 and count > len(data) - at):
        raise ValueError("CBOR that is longer than its bytes")
    return _content(data, at, kind, count, depth)


def _content(data: memoryview, at: int, kind: int, count: int, depth: int) -> tuple[Any, int]:
    if kind == 0:
        return count, at
    if kind == 1:
        return -1 - count, at
    if kind == 2:
        return bytes(data[at : at + count]), at + count
    if kind == 3:
        return str(data[at : at + count], "utf-8"), at + count  # UnicodeDecodeError is a ValueError
    if kind == 4:
        values = []
        for _ in range(count):
            value, at = _item(data, at, depth + 1)
            values.append(value)
        return values, at
    if kind == 5:
        return _map(data, at, count, depth)
    raise ValueError("a CBOR tag, and none is used here")


def _map(data: memoryview, at: int, count: int, depth: int) -> tuple[dict[Any, Any], int]:
    fields = {}
    for _ in range(count):
        key, at = _item(data, at, depth + 1)
        if not isinstance(key, int | str | bytes):
            raise ValueError("a CBOR map with a key that is no number, text or bytes")
        fields[key], at = _item(data, at, depth + 1)
    return fields, at
