"""What a bundle says of itself, as docs/store.md specifies it.

Pure; whoever calls it does the I/O. Always: a manifest is believed only if it is its own canonical CBOR, matches its
digest, and names nothing but parts, in order; anything else is CorruptBlock. Its digest covers every byte of the
bundle, for it has the digests of all parts.
Units: bytes, milliseconds since 1970.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import cbor2

from kvtier.blocks import plain_cbor
from kvtier.blocks.namespace import FINGERPRINT_BYTES
from kvtier.errors import CorruptBlock

BUNDLE_VERSION = 1
MANIFEST_NAME = "manifest.cbor"
MANIFEST_BYTES_MAX = 16 << 20
DESCRIPTION_BYTES_MAX = 1 << 16
DIGEST_BYTES = 32


def part_name(position: int) -> str:
    """The file name of a bundle's part, counted from 0."""
    return f"blocks-{position:05d}.frames"


@dataclass(frozen=True, slots=True)
class BundledNamespace:
    """A namespace of which a bundle may have blocks. description: as in the store."""

    fingerprint: bytes
    description: bytes


@dataclass(frozen=True, slots=True)
class Part:
    """One finished file of entries. generation: the highest of its blocks in the store that they come from."""

    name: str
    length_bytes: int
    sha256: bytes
    blocks: int
    payload_bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds: parts in the order of writing, the oldest block first.

    complete: false while the export goes on, or was interrupted. block_bytes_max: the longest payload, and of its slot
    if that is longer. codecs: the numbers of those that blocks are coded with.
    """

    store_id: bytes
    created_ms: int
    namespaces: tuple[BundledNamespace, ...]
    parts: tuple[Part, ...] = ()
    block_bytes_max: int = 0
    codecs: tuple[int, ...] = ()
    complete: bool = False

    @property
    def blocks(self) -> int:
        return sum(part.blocks for part in self.parts)

    @property
    def payload_bytes(self) -> int:
        return sum(part.payload_bytes for part in self.parts)

    @property
    def length_bytes(self) -> int:
        """Of all parts."""
        return sum(part.length_bytes for part in self.parts)

    @property
    def generation(self) -> int:
        """The highest of all blocks, 0 if there are none."""
        return max((part.generation for part in self.parts), default=0)

    def fingerprints(self) -> set[bytes]:
        return {namespace.fingerprint for namespace in self.namespaces}


def digest_of(manifest: Manifest) -> bytes:
    """SHA-256 of the canonical CBOR of all of it but this."""
    return hashlib.sha256(cbor2.dumps(_fields(manifest), canonical=True)).digest()


def encode_manifest(manifest: Manifest) -> bytes:
    return cbor2.dumps(_fields(manifest) | {"digest": digest_of(manifest)}, canonical=True)


def decode_manifest(data: bytes) -> Manifest:
    """Raises CorruptBlock, which says what is wrong with it."""
    try:
        fields = plain_cbor.loads(data)
    except ValueError as error:
        raise CorruptBlock(f"it is no CBOR: {error}") from error
    if type(fields) is not dict or type(fields.get("bundle")) is not int:
        raise CorruptBlock("it is not the manifest of a bundle")
    if fields["bundle"] != BUNDLE_VERSION:
        raise CorruptBlock(f"it is of version {fields['bundle']}, and this reads version {BUNDLE_VERSION}")
    manifest = Manifest(
        store_id=_field(fields, "store_id", bytes),
        created_ms=_number(fields, "created_ms"),
        namespaces=tuple(_namespace(one) for one in _field(fields, "namespaces", list)),
        parts=tuple(_part(position, one) for position, one in enumerate(_field(fields, "parts", list))),
        block_bytes_max=_number(fields, "block_bytes_max"),
        codecs=tuple(_field(fields, "codecs", list)),
        complete=_field(fields, "complete", bool),
    )
    if not all(type(codec) is int for codec in manifest.codecs):
        raise CorruptBlock("its codecs are no numbers")
    if len(manifest.fingerprints()) != len(manifest.namespaces):
        raise CorruptBlock("it names a namespace twice")
    if encode_manifest(manifest) != data:  # in another order, with other fields, or with another digest
        raise CorruptBlock("it does not match its digest")
    return manifest


def _fields(manifest: Manifest) -> dict[str, Any]:
    fields = asdict(manifest)
    lists = {name: list(fields[name]) for name in ("namespaces", "parts", "codecs")}
    return fields | lists | {"bundle": BUNDLE_VERSION}


def _namespace(fields: Any) -> BundledNamespace:
    fingerprint = _field(fields, "fingerprint", bytes)
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise CorruptBlock(f"it has a fingerprint of {len(fingerprint)} bytes")
    description = _field(fields, "description", bytes)
    if len(description) > DESCRIPTION_BYTES_MAX:
        raise CorruptBlock(f"it describes a namespace in {len(description)} bytes")
    return BundledNamespace(fingerprint, description)


def _part(position: int, fields: Any) -> Part:
    """Its name could lead anywhere, so only the right one will do."""
    name, sha256 = _field(fields, "name", str), _field(fields, "sha256", bytes)
    if name != part_name(position):
        raise CorruptBlock(f"part {position} is called {name[:80]!r}, and not {part_name(position)}")
    if len(sha256) != DIGEST_BYTES:
        raise CorruptBlock(f"part {position} has a digest of {len(sha256)} bytes")
    numbers = {key: _number(fields, key) for key in ("length_bytes", "blocks", "payload_bytes", "generation")}
    return Part(name=name, sha256=sha256, **numbers)


def _field(fields: Any, name: str, kind: type) -> Any:
    value = fields.get(name) if type(fields) is dict else None
    if type(value) is not kind:
        raise CorruptBlock(f"its {name} is missing or misshapen")
    return value


def _number(fields: Any, name: str) -> int:
    value: int = _field(fields, name, int)
    if not 0 <= value < 1 << 63:
        raise CorruptBlock(f"its {name} is {value}")
    return value
