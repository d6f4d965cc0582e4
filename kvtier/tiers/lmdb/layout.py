"""The bytes of a store's index, as docs/format.md specifies them.

Owns: encoding and decoding of every row. Pure; whoever calls it does the I/O.
Always: a row is believed only if its check, which covers its key and its value, is right; anything else is
CorruptBlock. Numbers in keys are big-endian (LMDB sorts bytes), numbers in values little-endian.
Units: bytes, milliseconds since 1970.
"""

import struct
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import cbor2
import xxhash

from kvtier.blocks import plain_cbor
from kvtier.errors import CorruptBlock
from kvtier.types import GROUP_BYTES, HASH_BYTES_MAX, PAGE_BYTES, BlockKey, page_aligned

FORMAT_VERSION = 1
INLINE_FORMAT_VERSION = 2  # the payloads are rows of `PAYLOAD_NAME`, not slots of a slab
FORMATS = {"slab": FORMAT_VERSION, "inline": INLINE_FORMAT_VERSION}
RECORD_VERSION = 1
CODED_RECORD_VERSION = 2  # of a block that is kept coded: what does not know codecs leaves it alone
RECORD_VERSIONS = (RECORD_VERSION, CODED_RECORD_VERSION)

LOCK_NAME = "lock"
SLAB_NAME = "slab"
INDEX_NAME = "index"
PAYLOAD_NAME = "payload"
FRESH_NAME = "data.mdb.new"  # beside a table that is written anew, until it takes its place
TABLES = ("meta", "namespaces", "extents", "blocks", "sidecar")

HEADER_KEY = b"header"
GENERATION_KEY = b"generation_limit"  # no record has a generation at or above it
NAMESPACE_KEY = b"namespace_limit"  # no namespace has, or ever had, an id at or above it
GENERATION_MAX = 2**63 - 1  # no store comes so far; beyond it there would be no room for the next ones
NAMESPACE_MAX = 2**31 - 1
NAMESPACE_MARGIN = 1 << 16  # ids that records may name which nobody can read; kept free where the limit was lost

PLACE_KEY = struct.Struct(">II")  # extent, slot
ID_KEY = struct.Struct(">I")  # namespace id, or extent
EXTENT_ROW = struct.Struct("<I")  # stride in pages

# version, flags, hash length, reserved, namespace, length, generation, checksum, stored_ms
_RECORD = struct.Struct("<BBBBIIQQQ")
_CODED = struct.Struct("<II")  # raw length, stride in pages; the codec's number is in the byte reserved above
_CHECK = struct.Struct("<Q")
CODEC_NUMBERS = {"int8": 2, "fp8": 3, "exp4": 4}  # as in the head of a coded block
CODEC_NAMES = {number: name for name, number in CODEC_NUMBERS.items()}

RECORD_HEAD_BYTES = _RECORD.size  # before the block's key
CHECK_BYTES = _CHECK.size
LENGTH_BYTES_MAX = 2**32 - 1
_GENERATION_AT = slice(12, 20)  # behind version, flags, hash length, reserved, namespace and length


class UnknownVersion(CorruptBlock):
    """A record that is whole, and of a version that only later ones read. It is to be left alone."""


class Coded(NamedTuple):
    """What a record says besides of a block that is kept coded. Its slot may be longer than its length needs."""

    codec: str
    raw_bytes: int
    stride_bytes: int


class Record(NamedTuple):
    """What the index knows of one block. `namespace` is the tier's own id, not the engine's; length and checksum are
    those of the stored bytes."""

    namespace: int
    key: BlockKey
    length_bytes: int
    generation: int
    checksum: int
    stored_ms: int
    coded: Coded | None = None

    @property
    def raw_bytes(self) -> int:
        """The block's length as attention reads it."""
        return self.length_bytes if self.coded is None else self.coded.raw_bytes

    @property
    def stride_bytes(self) -> int:
        return page_aligned(self.length_bytes) if self.coded is None else self.coded.stride_bytes


def encode_record(place_key: bytes, record: Record) -> bytes:
    """The record of the block at `place_key`, and of no other place: the check covers the place too."""
    namespace, key, length, generation, checksum, stored_ms, coded = record
    version, codec, more = RECORD_VERSION, 0, b""
    if coded is not None:
        version, codec = CODED_RECORD_VERSION, CODEC_NUMBERS[coded.codec]
        more = _CODED.pack(coded.raw_bytes, coded.stride_bytes // PAGE_BYTES)
    hash_bytes = len(key) - GROUP_BYTES
    head = _RECORD.pack(version, 0, hash_bytes, codec, namespace, length, generation, checksum, stored_ms)
    return _sealed(place_key, head + more + key)


def names_block(row: bytes, generation: int, key: BlockKey) -> bool:
    """Whether a record, sound or not, has this block's key and this generation, which no other one has. Three times as
    fast as `decode_record`."""
    is_generation = int.from_bytes(row[_GENERATION_AT], "little") == generation
    return is_generation and row[-len(key) - CHECK_BYTES : -CHECK_BYTES] == key


def decode_record(place_key: bytes, row: bytes) -> Record:
    """Raises UnknownVersion for a sound record of another version, CorruptBlock if it is damaged or misplaced."""
    body = _unsealed(place_key, row)
    if body and body[0] not in RECORD_VERSIONS:
        raise UnknownVersion(f"record of version {body[0]}")
    if len(body) < _RECORD.size:
        raise CorruptBlock("record too short")
    version, flags, hash_bytes, reserved, namespace, length, generation, checksum, stored = _RECORD.unpack_from(body)
    coded = None
    key = body[_RECORD.size :]
    if version == CODED_RECORD_VERSION and not flags:
        coded, key = _coded_of(reserved, length, key)
    elif version != RECORD_VERSION or flags or reserved:
        raise UnknownVersion(f"record of version {version}, flags {flags}")
    if len(key) != hash_bytes + GROUP_BYTES or not 1 <= hash_bytes <= HASH_BYTES_MAX or not length:
        raise CorruptBlock("record with impossible lengths")
    if generation > GENERATION_MAX:
        raise CorruptBlock(f"a generation of {generation}")
    return Record(namespace, BlockKey(key), length, generation, checksum, stored, coded)


def _coded_of(number: int, length_bytes: int, rest: bytes) -> tuple[Coded, bytes]:
    """What only a coded block's record has, and the key behind it. Raises UnknownVersion or CorruptBlock."""
    if number not in CODEC_NAMES:
        raise UnknownVersion(f"record of a block in codec {number}")
    if len(rest) < _CODED.size:
        raise CorruptBlock("record too short")
    raw_bytes, stride_pages = _CODED.unpack_from(rest)
    if not raw_bytes or length_bytes > stride_pages * PAGE_BYTES:
        raise CorruptBlock("record with impossible lengths")
    return Coded(CODEC_NAMES[number], raw_bytes, stride_pages * PAGE_BYTES), rest[_CODED.size :]


@dataclass(frozen=True, slots=True)
class Header:
    """What a store is. `extent_bytes`, `store_id` and `created_ms` never change; the rest says how it was last
    opened."""

    format: int
    extent_bytes: int
    page_bytes: int
    store_id: bytes
    created_ms: int
    capacity_bytes: int
    durability: str


def encode_header(header: Header) -> bytes:
    return _sealed(HEADER_KEY, cbor2.dumps(asdict(header), canonical=True))


def format_of(row: bytes) -> int:
    """The format version that a header row claims. Raises CorruptBlock if it is no header."""
    fields = _cbor_map(HEADER_KEY, row)
    version = fields.get("format")
    if type(version) is not int:
        raise CorruptBlock("header without a format version")
    return version


def decode_header(row: bytes) -> Header:
    """The header of a store of this format. Raises CorruptBlock; ask `format_of` first."""
    fields = _cbor_map(HEADER_KEY, row)
    types = {"format": int, "extent_bytes": int, "page_bytes": int, "store_id": bytes}
    types |= {"created_ms": int, "capacity_bytes": int, "durability": str}
    if any(type(fields.get(name)) is not kind for name, kind in types.items()):
        raise CorruptBlock("header with missing or misshapen fields")
    header = Header(**{name: fields[name] for name in types})
    if header.page_bytes != PAGE_BYTES or header.extent_bytes < PAGE_BYTES or header.extent_bytes % PAGE_BYTES:
        raise CorruptBlock(f"header with pages of {header.page_bytes} and extents of {header.extent_bytes} bytes")
    return header


def encode_namespace(namespace: int, fingerprint: bytes, description: bytes) -> bytes:
    row = {"fingerprint": fingerprint, "description": description}
    return _sealed(ID_KEY.pack(namespace), cbor2.dumps(row, canonical=True))


def decode_namespace(key: bytes, row: bytes) -> tuple[int, bytes, bytes]:
    """(id, fingerprint, description). Raises CorruptBlock."""
    fields = _cbor_map(key, row)
    fingerprint, description = fields.get("fingerprint"), fields.get("description")
    if len(key) != ID_KEY.size or type(fingerprint) is not bytes or type(description) is not bytes:
        raise CorruptBlock("namespace row with missing or misshapen fields")
    (tier_id,) = ID_KEY.unpack(key)
    if not 1 <= tier_id <= NAMESPACE_MAX:
        raise CorruptBlock(f"namespace {tier_id}, an id that no writer gives")
    return tier_id, fingerprint, description


def encode_limit(key: bytes, value: int) -> bytes:
    return _sealed(key, value.to_bytes(8, "little"))


def decode_limit(key: bytes, row: bytes) -> int:
    """Raises CorruptBlock."""
    value = int.from_bytes(_unsealed(key, row), "little")
    if value > (NAMESPACE_MAX if key == NAMESPACE_KEY else GENERATION_MAX):
        raise CorruptBlock(f"a limit of {value}")
    return value


def encode_extent(extent: int, stride_pages: int) -> bytes:
    return _sealed(ID_KEY.pack(extent), EXTENT_ROW.pack(stride_pages))


def decode_extent(key: bytes, row: bytes) -> tuple[int, int]:
    """(extent, stride in pages). Raises CorruptBlock."""
    body = _unsealed(key, row)
    if len(key) != ID_KEY.size or len(body) != EXTENT_ROW.size or body == bytes(EXTENT_ROW.size):
        raise CorruptBlock("extent row of a wrong length")
    return ID_KEY.unpack(key)[0], EXTENT_ROW.unpack(body)[0]


def _cbor_map(key: bytes, row: bytes) -> dict[str, Any]:
    try:
        fields = plain_cbor.loads(_unsealed(key, row))
    except ValueError as error:
        raise CorruptBlock(f"row that is not CBOR: {error}") from error
    if type(fields) is not dict:
        raise CorruptBlock("row that is not a CBOR map")
    return fields


def _sealed(key: bytes, body: bytes) -> bytes:
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(key + body))


def _unsealed(key: bytes, row: bytes) -> bytes:
    body = row[:-CHECK_BYTES]
    if len(row) < CHECK_BYTES or _CHECK.unpack_from(row, len(body))[0] != xxhash.xxh3_64_intdigest(key + body):
        raise CorruptBlock("row that does not match its check")
    return body
