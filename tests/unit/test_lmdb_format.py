"""A second reader, written from docs/format.md alone: it shares no code with the package."""

import json
import struct
from pathlib import Path

import cbor2
import lmdb
import xxhash

from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of, payload_of


def unsealed(key: bytes, value: bytes) -> bytes:
    body, check = value[:-8], value[-8:]
    assert struct.unpack("<Q", check)[0] == xxhash.xxh3_64_intdigest(key + body)
    return body


def read_store(folder: Path) -> tuple[dict[str, object], dict[int, dict[str, bytes]], list[tuple[object, ...]]]:
    """Header, namespaces, and blocks as (generation, namespace, block key, payload)."""
    env = lmdb.open(str(folder / "index"), readonly=True, lock=False, max_dbs=5)
    names = ("meta", "namespaces", "extents", "blocks", "sidecar")
    tables = {name: env.open_db(name.encode(), create=False) for name in names}
    slab = (folder / "slab").read_bytes()
    blocks = []
    with env.begin() as txn:
        header = cbor2.loads(unsealed(b"header", txn.get(b"header", db=tables["meta"])))
        limit = struct.unpack("<Q", unsealed(b"generation_limit", txn.get(b"generation_limit", db=tables["meta"])))[0]
        namespaces = {
            struct.unpack(">I", key)[0]: cbor2.loads(unsealed(key, value))
            for key, value in txn.cursor(db=tables["namespaces"])
        }
        strides = {
            struct.unpack(">I", key)[0]: struct.unpack("<I", unsealed(key, value))[0]
            for key, value in txn.cursor(db=tables["extents"])
        }
        for key, value in txn.cursor(db=tables["blocks"]):
            extent, slot = struct.unpack(">II", key)
            body = unsealed(key, value)
            version, flags, hash_bytes, reserved, namespace, length = struct.unpack_from("<BBBBII", body)
            generation, checksum, stored_ms = struct.unpack_from("<QQQ", body, 12)
            block_hash, group = body[36 : 36 + hash_bytes], body[36 + hash_bytes :]
            assert (version, flags, reserved, len(group)) == (1, 0, 0, 4)
            assert strides[extent] == -(-length // 4096)
            assert generation < limit
            assert stored_ms > 1.6e12
            offset = extent * header["extent_bytes"] + slot * strides[extent] * 4096
            payload = slab[offset : offset + length]
            seed = int.from_bytes(block_hash[:8].ljust(8, b"\0"), "little")
            assert xxhash.xxh3_64_intdigest(payload, seed=seed) == checksum
            blocks.append((generation, namespace, block_hash + group, payload))
        sidecar = dict(txn.cursor(db=tables["sidecar"]))
    env.close()
    assert sidecar == {b"note": b"policy state"}
    return header, namespaces, blocks


def test_the_document_is_true(tmp_path: Path) -> None:
    """Nobody but this package could read its stores, not even its next version."""
    store = StoreDriver(tmp_path / "s", durability="strict")
    store.write(range(5), 5000)
    store.write(range(5, 9), 16_384, evict=[2], note=b"policy state")
    places = {number: stored.place for number, (_, stored) in store.kept.items()}
    store.close()
    header, namespaces, blocks = read_store(tmp_path / "s")
    assert (header["format"], header["page_bytes"], header["capacity_bytes"]) == (1, 4096, 4 << 20)
    assert (header["durability"], len(header["store_id"])) == ("strict", 16)
    assert namespaces == {1: {"fingerprint": b"f" * 32, "description": b""}}
    expected = [
        (1, key_of(number)[4:], payload_of(number, 5000 if number < 5 else 16_384)) for number in sorted(places)
    ]
    assert [block[1:] for block in sorted(blocks)] == expected
    lock = (tmp_path / "s" / "lock").read_bytes()
    assert len(lock) == 256
    assert lock.endswith(b"\n")
    state = json.loads(lock)
    assert (state["durability"], state["clean"]) == ("strict", True)
