"""A second reader, written from docs/format.md alone: it shares no code with the package."""

import json
import struct
from pathlib import Path

import cbor2
import lmdb
import numpy as np
import pytest
import xxhash

from kvtier.blocks.coding import Codings
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of, payload_of, slot_buffer
from kvtier.types import DONE, GroupSpec, ReadItem, WriteBatch, WriteItem
from tests.kernels.bit_patterns import bits_type, normal, specials


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
            raw_bytes, stride = length, -(-length // 4096)
            if version == 2:
                raw_bytes, stride = struct.unpack_from("<II", body, 36)
                body = body[:36] + body[44:]
            block_hash, group = body[36 : 36 + hash_bytes], body[36 + hash_bytes :]
            assert (version, reserved) in ((1, 0), (2, 2), (2, 3), (2, 4))
            assert (flags, len(group)) == (0, 4)
            assert strides[extent] == stride
            assert length <= stride * 4096
            assert generation < limit
            assert stored_ms > 1.6e12
            offset = extent * header["extent_bytes"] + slot * strides[extent] * 4096
            payload = slab[offset : offset + length]
            seed = int.from_bytes(block_hash[:8].ljust(8, b"\0"), "little")
            assert xxhash.xxh3_64_intdigest(payload, seed=seed) == checksum
            if version == 2:
                assert payload[0] == reserved
                payload = decoded(payload)
            assert len(payload) == raw_bytes
            blocks.append((generation, namespace, block_hash + group, payload))
        sidecar = dict(txn.cursor(db=tables["sidecar"]))
    env.close()
    assert sidecar in ({b"note": b"policy state"}, {})
    return header, namespaces, blocks


def decoded(coded: bytes) -> bytes:
    """The raw block of a coded one."""
    codec, dtype, row_values, values, escapes, length = struct.unpack("<BBHIII", coded[:16])
    assert length == len(coded)
    if codec == 4:
        return from_exp4(coded[16:], dtype, values, escapes)
    assert dtype == 3
    codes, scales = coded[16 : 16 + values], coded[16 + values :]
    raw = bytearray()
    for at, code in enumerate(codes):
        row = at // row_values
        (scale,) = struct.unpack("<f", b"\0\0" + scales[2 * row : 2 * row + 2])
        raw += to_bfloat16((from_int8(code) if codec == 2 else from_e4m3(code)) * scale)
    return bytes(raw)


def from_int8(code: int) -> float:
    return float(code - 256 if code > 127 else code)


def from_e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if code & 0x80 else magnitude


def to_bfloat16(value: float) -> bytes:
    if value != value:
        return b"\xc0\x7f"
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    upper, lower = bits >> 16, bits & 0xFFFF
    return struct.pack("<H", upper + (lower > 0x8000 or (lower == 0x8000 and upper & 1)))


def from_exp4(parts: bytes, dtype: int, values: int, escapes: int) -> bytes:
    item_bytes, exponent_bits, mantissa_bits = {1: (4, 8, 23), 2: (2, 5, 10), 3: (2, 8, 7)}[dtype]
    groups = values // 64
    planes = (mantissa_bits + 1) // 8
    nibbles, rest = parts[: 32 * groups], parts[32 * groups :]
    byte_planes, rest = (
        [rest[plane * values : (plane + 1) * values] for plane in range(planes)],
        rest[planes * values :],
    )
    bits_bytes = 24 * groups if dtype == 2 else 0
    bit_planes, rest = rest[:bits_bytes], rest[bits_bytes:]
    bases, rest = rest[:groups], rest[-(-groups // 4) * 4 :]
    escaped = {place >> 8: place & 255 for place in struct.unpack(f"<{escapes}I", rest)}
    raw = bytearray()
    for at in range(values):
        group, i = divmod(at, 64)
        nibble = nibbles[32 * group + i % 32] >> (4 if i >= 32 else 0) & 15
        exponent = escaped[at] if nibble == 15 else bases[group] - nibble
        residue = sum(plane[at] << 8 * number for number, plane in enumerate(byte_planes))
        for number in range(3 if dtype == 2 else 0):
            (word,) = struct.unpack_from("<Q", bit_planes, 24 * group + 8 * number)
            residue |= (word >> i & 1) << 8 + number
        sign, mantissa = residue >> mantissa_bits, residue & (1 << mantissa_bits) - 1
        bits = sign << exponent_bits + mantissa_bits | exponent << mantissa_bits | mantissa
        raw += bits.to_bytes(item_bytes, "little")
    return bytes(raw)


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [("int8", "bfloat16"), ("fp8", "bfloat16"), ("exp4", "bfloat16"), ("exp4", "float32"), ("exp4", "float16")],
)
def test_coded_blocks_are_as_the_document_says(tmp_path: Path, codec: str, dtype: str) -> None:
    """Nobody but this package could decode what it has coded."""
    codings = Codings(codec, [GroupSpec("full", (0,), 1, 64, dtype, 16)])
    raw_bytes = 131_072 if dtype == "float16" else 32_768
    store = StoreDriver(tmp_path / "s", codings=codings, length_bytes_max=raw_bytes)
    bits = normal(np.random.default_rng(2), dtype, raw_bytes // bits_type(dtype).itemsize)
    bits[: len(specials(dtype))] = specials(dtype)
    key, block = key_of(1, store.namespace), bits.tobytes()
    (end,) = store.tier.write(WriteBatch([WriteItem(key, raw_bytes, slot_buffer(raw_bytes, block))]))
    into = slot_buffer(raw_bytes)
    assert store.tier.read([ReadItem(key, end.place, end.generation, raw_bytes, into)]) == [DONE]
    store.close()
    _, _, ((_, _, _, payload),) = read_store(tmp_path / "s")
    assert payload == bytes(into)
    assert (payload == block) == (codec == "exp4")


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
