"""The rows in which a persistent tier keeps its policy's state (docs/format.md, `sidecar`).

    policy/head                       which policy, and the number of the snapshot that counts
    policy/snapshot/NUMBER/CHUNK      the policy's snapshot, cut in chunks
    policy/log/NUMBER                 what the policy was told since, one row per batch

Pure encoding. Always: a row of the log ends in a CRC-32 of its key and its content, and the head has that of the
whole snapshot; what does not match is not there. Handles are those of the process that wrote the rows. Numbers in
keys are big-endian, in values little-endian.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cbor2
import numpy as np
from numpy.typing import NDArray

from kvtier.blocks import plain_cbor
from kvtier.cache.order_ghosts import PackedGhosts

HEAD_KEY = b"policy/head"
SNAPSHOT_KEY = b"policy/snapshot/"
LOG_KEY = b"policy/log/"
PREFIX = b"policy/"
CHUNK_BYTES = 32 << 10  # LMDB needs neighbouring free pages for a value

_CRC = struct.Struct("<I")
_NUMBER = struct.Struct(">Q")
_CHUNK = struct.Struct(">QI")
_NUMBER_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A policy's state and who its handles are."""

    policy: str
    blocks: int
    state: bytes
    places: NDArray[np.uint32]  # [residents, 2]: handle and place of each
    ghosts: PackedGhosts
    namespaces: Mapping[int, bytes]  # fingerprints, by the local ids in the ghosts' keys


def log_key(number: int) -> bytes:
    return LOG_KEY + _NUMBER.pack(number)


def sealed(key: bytes, content: Any) -> bytes:
    """Content as canonical CBOR, and its check."""
    body = cbor2.dumps(content, canonical=True)
    return body + _CRC.pack(zlib.crc32(key + body))


def unsealed(key: bytes, row: bytes | None) -> Any:
    """The content of a row. Raises ValueError if it is damaged or missing."""
    if row is None or len(row) < _CRC.size:
        raise ValueError(f"no row {key!r}")
    body, crc = row[: -_CRC.size], row[-_CRC.size :]
    if _CRC.unpack(crc)[0] != zlib.crc32(key + body):
        raise ValueError(f"row {key!r} does not match its check")
    return plain_cbor.loads(body)


def encode_snapshot(number: int, snapshot: Snapshot) -> dict[bytes, bytes]:
    """The head and the chunks of a snapshot."""
    content = {
        "policy": snapshot.policy,
        "blocks": snapshot.blocks,
        "state": snapshot.state,
        "places": snapshot.places.astype("<u4").tobytes(),
        "ghosts": bytes(snapshot.ghosts),
        "namespaces": dict(snapshot.namespaces),
    }
    body = cbor2.dumps(content, canonical=True)
    chunks = [body[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES)]
    rows = {SNAPSHOT_KEY + _CHUNK.pack(number, index): chunk for index, chunk in enumerate(chunks)}
    head = {
        "policy": snapshot.policy,
        "snapshot": number,
        "chunks": len(chunks),
        "crc": zlib.crc32(body),
        "residents": len(snapshot.places),
        "ghosts": len(snapshot.ghosts),
    }
    return {HEAD_KEY: cbor2.dumps(head, canonical=True)} | rows


def decode_snapshot(rows: Mapping[bytes, bytes]) -> tuple[int, Snapshot]:
    """The snapshot that counts, and its number. Raises ValueError if there is none whole."""
    try:
        head = plain_cbor.loads(rows[HEAD_KEY])
        number, chunks = head["snapshot"], head["chunks"]
        body = b"".join(rows[SNAPSHOT_KEY + _CHUNK.pack(number, index)] for index in range(chunks))
        if zlib.crc32(body) != head["crc"]:
            raise ValueError("the snapshot does not match its check")
        content = plain_cbor.loads(body)
        places = np.frombuffer(content["places"], "<u4").astype(np.uint32).reshape(-1, 2)
        return number, Snapshot(
            content["policy"],
            content["blocks"],
            content["state"],
            places,
            PackedGhosts(content["ghosts"], head["ghosts"]),
            content["namespaces"],
        )
    except (KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"damaged snapshot: {error!r}") from error


def encode_log(number: int, calls: Sequence[Sequence[Any]], namespaces: Mapping[int, bytes]) -> bytes:
    """One row of the log: calls (see `order_log`) in order."""
    return sealed(log_key(number), [list(calls), dict(namespaces)])


def decode_logs(rows: Mapping[bytes, bytes], number: int) -> Iterator[tuple[list[Any], dict[int, bytes]]]:
    """The rows of the log from this number on, up to the first that is missing or damaged."""
    while True:
        try:
            calls, namespaces = unsealed(log_key(number), rows.get(log_key(number)))
        except (ValueError, TypeError):
            return
        yield calls, namespaces
        number += 1


def number_of(key: bytes) -> int:
    """The number in the key of a log or snapshot row; 0 for any other."""
    for prefix in (LOG_KEY, SNAPSHOT_KEY):
        if key.startswith(prefix) and len(key) >= len(prefix) + _NUMBER.size:
            number: int = _NUMBER.unpack_from(key, len(prefix))[0]
            return number if number < _NUMBER_LIMIT else 0  # else nobody could count on from it
    return 0
