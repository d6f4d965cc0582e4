"""A bundle says what was put into it, byte for byte, and nothing that anybody else made of it is believed."""

import asyncio
import hashlib
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cbor2
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.blocks.codec import encode
from kvtier.errors import BundleError, CorruptBlock
from kvtier.testing.tiers import payload_of
from kvtier.tiers.bundle import writing
from kvtier.tiers.bundle.entry import ENTRY_BYTES, Entry, decode_entry, encode_entry
from kvtier.tiers.bundle.manifest import (
    BundledNamespace,
    Manifest,
    Part,
    decode_manifest,
    digest_of,
    encode_manifest,
    part_name,
)
from kvtier.tiers.bundle.reading import read_manifest, read_part
from kvtier.tiers.bundle.scan import PartScan
from kvtier.tiers.bundle.writing import BundleWriter, Outgoing
from kvtier.types import block_key

ONE, TWO = b"1" * 32, b"2" * 32
EMPTY = Manifest(b"s" * 16, 1_700_000_000_000, (BundledNamespace(ONE, b"\xa0"), BundledNamespace(TWO, b"")))


def outgoing(number: int, length_bytes: int = 5000) -> Outgoing:
    key = block_key(hashlib.sha256(str(number).encode()).digest(), 0)
    return Outgoing(ONE if number % 2 else TWO, key, memoryview(payload_of(number, length_bytes)), number + 1)


def write(folder: Path, numbers: range, part_bytes: int = 20_000, finish: bool = True) -> Manifest:
    async def run() -> Manifest:
        writer = await BundleWriter.begin(folder, EMPTY)
        try:
            for number in numbers:
                await writer.add([outgoing(number)])
            return await writer.finish() if finish else writer.manifest
        finally:
            await writer.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "PART_BYTES", part_bytes)
        return asyncio.run(run())


def read(folder: Path) -> list[tuple[bytes, bytes, bytes]]:
    """Every block's namespace, key and payload; the whole bundle is right."""

    async def run() -> list[tuple[bytes, bytes, bytes]]:
        manifest = await read_manifest(folder)
        found = []
        for part in manifest.parts:
            async for incoming in read_part(folder, manifest, part):
                found += [(b.frame.fingerprint, bytes(b.frame.key), bytes(b.frame.payload)) for b in incoming]
        return found

    return asyncio.run(run())


def wanted(numbers: range) -> list[tuple[bytes, bytes, bytes]]:
    return [(b.fingerprint, bytes(b.key), bytes(b.payload)) for b in map(outgoing, numbers)]


# ---------------------------------------------------------------- what it is


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    """Blocks would be lost or changed on the way, or come back in another order."""
    manifest = write(tmp_path / "b", range(10))
    assert read(tmp_path / "b") == wanted(range(10))
    assert (manifest.blocks, manifest.payload_bytes, manifest.generation) == (10, 50_000, 10)
    assert [part.blocks for part in manifest.parts] == [4, 4, 2]
    assert (manifest.block_bytes_max, manifest.codecs, manifest.complete) == (5000, (0,), True)
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"manifest.cbor", *map(part_name, range(3))}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "b").iterdir()} == {0o600}


def test_the_bytes_are_those_of_the_document(tmp_path: Path) -> None:
    """Another program, written after docs/store.md, could not read a bundle."""
    write(tmp_path / "b", range(3))
    fields = cbor2.loads((tmp_path / "b" / "manifest.cbor").read_bytes())
    digest = fields.pop("digest")
    assert hashlib.sha256(cbor2.dumps(fields, canonical=True)).digest() == digest
    assert (fields["bundle"], fields["complete"], fields["codecs"]) == (1, True, [0])
    [part] = fields["parts"]
    data = (tmp_path / "b" / part["name"]).read_bytes()
    assert (len(data), hashlib.sha256(data).digest()) == (part["length_bytes"], part["sha256"])
    at = 0
    for number in range(3):
        magic, version, codec, reserved, raw, stride, frame_bytes, check = struct.unpack_from("<4sBBHIIQQ", data, at)
        assert (magic, version, codec, reserved, raw, stride) == (b"KVTE", 1, 0, 0, 0, 0)
        assert check == xxhash.xxh3_64_intdigest(data[at : at + 24])
        block = outgoing(number)
        assert data[at + 32 : at + 32 + frame_bytes] == b"".join(encode(block.fingerprint, block.key, block.payload))
        at += 32 + frame_bytes
    assert at == len(data)


def test_an_interrupted_export_goes_on(tmp_path: Path) -> None:
    """An hour of writing would begin anew, or blocks be there twice or never."""
    begun = write(tmp_path / "b", range(6), finish=False)
    assert ([part.blocks for part in begun.parts], begun.complete, begun.generation) == ([4], False, 4)
    write(tmp_path / "b", range(begun.generation, 10))
    assert read(tmp_path / "b") == wanted(range(10))


def test_an_export_that_ended_in_its_first_moment_goes_on(tmp_path: Path) -> None:
    """What a full disk, or a kill, leaves of the first manifest would bar the folder for ever."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "manifest.cbor.new").write_bytes(b"half a mani")
    write(tmp_path / "b", range(10))
    assert read(tmp_path / "b") == wanted(range(10))


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """Two exports into one folder would both end well, with a bundle that nobody can read."""

    async def run() -> None:
        first = await BundleWriter.begin(tmp_path / "b", EMPTY)
        for _ in range(2):  # one that is refused leaves the lock to the first
            with pytest.raises(BundleError, match="another export is writing it"):
                await BundleWriter.begin(tmp_path / "b", EMPTY)
        await first.add([outgoing(0)])
        await first.finish()
        await first.close()
        await first.close()

    asyncio.run(run())
    assert read(tmp_path / "b") == wanted(range(1))
    with pytest.raises(BundleError, match="complete bundle already"):  # nobody is writing it any more
        write(tmp_path / "b", range(3))


def test_a_block_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle whose block is a hole of some gigabytes would end in a traceback."""

    def feed(scan: PartScan, data: bytes) -> list[object]:
        raise MemoryError

    write(tmp_path / "b", range(3))
    monkeypatch.setattr(PartScan, "feed", feed)
    with pytest.raises(BundleError, match="more memory than there is: up to 5000 bytes"):
        read(tmp_path / "b")


def test_a_folder_that_is_something_else(tmp_path: Path) -> None:
    """Somebody's files would be mixed with a bundle, or a finished bundle be written over."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "letter.txt").touch()
    (tmp_path / "f").touch()
    for folder in ("x", "f"):
        with pytest.raises(BundleError, match="not a bundle"):
            write(tmp_path / folder, range(3))
    write(tmp_path / "b", range(3))
    with pytest.raises(BundleError, match="complete bundle already"):
        write(tmp_path / "b", range(3))
    write(tmp_path / "c", range(3), finish=False)
    for other in (replace(EMPTY, store_id=b"t" * 16), replace(EMPTY, namespaces=EMPTY.namespaces[:1])):
        with pytest.raises(BundleError, match="of another store"):
            asyncio.run(BundleWriter.begin(tmp_path / "c", other))
    with pytest.raises(BundleError, match="it is not a bundle"):
        read(tmp_path / "x")


# ---------------------------------------------------------------- what others make of it


def resealed(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Change the manifest as somebody would who knows the format."""
    path = folder / "manifest.cbor"
    path.write_bytes(encode_manifest(change(decode_manifest(path.read_bytes()))))


def part_changed(**fields: object) -> Callable[[Path], None]:
    def change(manifest: Manifest) -> Manifest:
        return replace(manifest, parts=(replace(manifest.parts[0], **fields), *manifest.parts[1:]))  # type: ignore[arg-type]

    return lambda folder: resealed(folder, change)


def edited(change: Callable[[bytes], bytes], reseal: bool = False) -> Callable[[Path], None]:
    """Change the first part; reseal: and let the manifest say so."""

    def harm(folder: Path) -> None:
        path = folder / part_name(0)
        data = change(path.read_bytes())
        path.write_bytes(data)
        if reseal:
            part_changed(length_bytes=len(data), sha256=hashlib.sha256(data).digest())(folder)

    return harm


def linked(folder: Path) -> None:
    (folder / part_name(0)).rename(folder.parent / "elsewhere")
    (folder / part_name(0)).symlink_to(folder.parent / "elsewhere")


def piped(folder: Path) -> None:
    (folder / part_name(0)).unlink()
    os.mkfifo(folder / part_name(0))


def without_second(folder: Path) -> None:
    resealed(folder, lambda manifest: replace(manifest, namespaces=manifest.namespaces[:1]))


def lying(data: bytes, frame_bytes: int) -> bytes:
    return encode_entry(Entry(frame_bytes)) + data[ENTRY_BYTES:]


def out_of_order(folder: Path) -> None:
    path = folder / "manifest.cbor"
    path.write_bytes(cbor2.dumps(dict(reversed(cbor2.loads(path.read_bytes()).items()))))


HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped byte": (edited(lambda data: data[:3000] + b"!" + data[3001:]), "payload does not match"),
    "another block's bytes": (edited(lambda data: data[:100] + data[5232:5264] + data[132:]), "head is damaged"),
    "blocks in another order": (edited(lambda data: data[5132:] + data[:5132]), "digest"),
    "cut off": (edited(lambda data: data[:-1]), "and 20528 are expected"),
    "cut off and resealed": (edited(lambda data: data[:-1], reseal=True), "where 5099 are left"),
    "a block left out and resealed": (edited(lambda data: data[5132:], reseal=True), "unlike the manifest says"),
    "trailing bytes": (edited(lambda data: data + b"\0"), "and 20528 are expected"),
    "trailing bytes, resealed": (edited(lambda data: data + bytes(7), reseal=True), "ends within a block"),
    "a trailing entry, resealed": (edited(lambda data: data + bytes(40), reseal=True), "wrong magic"),
    "empty": (edited(lambda data: b""), "and 20528 are expected"),
    "a length that lies": (edited(lambda data: lying(data, 1 << 60), reseal=True), "are left"),
    "a length too long for memory": (edited(lambda data: lying(data, 9000), reseal=True), "longer than the manifest"),
    "a length too short": (edited(lambda data: lying(data, 90), reseal=True), "head is cut off"),
    "missing": (lambda folder: (folder / part_name(0)).unlink(), "No such file"),
    "a link": (linked, "it is a link"),
    "a pipe": (piped, "not a plain file"),
    "a namespace it does not name": (without_second, "does not name"),
    "a path that escapes": (part_changed(name="../elsewhere"), "is called '../elsewhere'"),
    "an absolute path": (part_changed(name="/etc/passwd"), "is called '/etc/passwd'"),
    "a path twice": (part_changed(name=part_name(1)), "is called"),
    "fewer blocks": (part_changed(blocks=3), "unlike the manifest says"),
    "fewer bytes": (part_changed(payload_bytes=1), "unlike the manifest says"),
    "negative length": (part_changed(length_bytes=-1), "its length_bytes is -1"),
    "a short digest": (part_changed(sha256=b"x"), "digest of 1 bytes"),
    "another codec": (lambda folder: resealed(folder, lambda m: replace(m, codecs=(3,))), "codec 0, which"),
    "a later version": (
        lambda folder: (folder / "manifest.cbor").write_bytes(cbor2.dumps({"bundle": 2})) and None,
        "version 2, and this reads version 1",
    ),
    "no manifest": (lambda folder: (folder / "manifest.cbor").write_bytes(b"\xff" * 9) and None, "no CBOR"),
    "a manifest of something else": (
        lambda folder: (folder / "manifest.cbor").write_bytes(cbor2.dumps({"a": 1})) and None,
        "not the manifest",
    ),
    "keys in another order": (out_of_order, "does not match its digest"),
    "one namespace twice": (
        lambda folder: resealed(folder, lambda m: replace(m, namespaces=(*m.namespaces, m.namespaces[0]))),
        "names a namespace twice",
    ),
    "a short fingerprint": (
        lambda folder: resealed(folder, lambda m: replace(m, namespaces=(BundledNamespace(b"x", b""),))),
        "fingerprint of 1 bytes",
    ),
    "a novel": (
        lambda folder: resealed(folder, lambda m: replace(m, namespaces=(BundledNamespace(ONE, bytes(1 << 17)),))),
        "in 131072 bytes",
    ),
}


@pytest.mark.parametrize("harm", list(HARMS))
def test_hostile_bundles(tmp_path: Path, harm: str) -> None:
    """Wrong bytes would be served to a model, files outside of the bundle be read, or memory run out."""
    write(tmp_path / "b", range(10))
    do, said = HARMS[harm]
    do(tmp_path / "b")
    with pytest.raises(BundleError, match=said):
        read(tmp_path / "b")


def test_a_block_of_no_bytes(tmp_path: Path) -> None:
    """A slot of no length would be asked for."""
    data = encode_entry(Entry(100)) + b"".join(encode(ONE, outgoing(1).key, b""))
    part = Part(part_name(0), len(data), hashlib.sha256(data).digest(), 1, 0, 1)
    with pytest.raises(CorruptBlock, match="no bytes"):
        PartScan(replace(EMPTY, parts=(part,), codecs=(0,), block_bytes_max=9), part).feed(data)


def test_the_digest_covers_everything(tmp_path: Path) -> None:
    """Whoever compares digests would accept a bundle that somebody changed."""
    before = digest_of(write(tmp_path / "b", range(10)))
    for name, (harm, _) in HARMS.items():
        folder = tmp_path / name.replace(" ", "")
        write(folder, range(10))
        if "reseal" in name:
            harm(folder)
            assert digest_of(decode_manifest((folder / "manifest.cbor").read_bytes())) != before
    for position in range(len((tmp_path / "b" / "manifest.cbor").read_bytes())):
        data = bytearray((tmp_path / "b" / "manifest.cbor").read_bytes())
        data[position] ^= 0x20
        with pytest.raises(CorruptBlock):
            decode_manifest(bytes(data))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.binary(max_size=40) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300) | VALUES.map(cbor2.dumps))
def test_no_manifest(data: bytes) -> None:
    """Bytes that nobody foresaw would be a traceback."""
    with pytest.raises(CorruptBlock):
        decode_manifest(data)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(cbor2.loads(encode_manifest(EMPTY)))), value=VALUES)
def test_a_manifest_with_another_field(name: str, value: object) -> None:
    """A field of another shape would be a traceback, or be believed."""
    part = Part(part_name(0), 9, b"d" * 32, 1, 2, 3)
    fields = cbor2.loads(encode_manifest(replace(EMPTY, parts=(part,))))
    fields[name] = value
    digested = {key: field for key, field in fields.items() if key != "digest"}
    if name != "digest":
        fields["digest"] = hashlib.sha256(cbor2.dumps(digested, canonical=True)).digest()
    data = cbor2.dumps(fields, canonical=True)
    try:
        manifest = decode_manifest(data)
    except CorruptBlock:
        return
    assert encode_manifest(manifest) == data


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.binary(max_size=60), st.lists(st.integers(1, 4000), max_size=6), st.booleans())
def test_no_part(at: int, junk: bytes, cuts: list[int], honest: bool) -> None:
    """A part with junk in it would be a traceback; or what was read would hang on how the bytes came in."""
    blocks = [outgoing(number, 700) for number in range(12)]
    right = writing._joined(blocks)
    data = right if honest else right[:at] + junk + right[at + len(junk) :]
    part = Part(part_name(0), len(data), hashlib.sha256(data).digest(), 12, 12 * 700, 12)
    scan = PartScan(replace(EMPTY, parts=(part,), codecs=(0,), block_bytes_max=700), part)
    found = []
    try:
        start = 0
        for cut in [*cuts, len(data)]:
            found += scan.feed(data[start : start + cut])
            assert 0 <= scan.missing_bytes() <= 1000
            start += cut
        scan.finish()
    except CorruptBlock:
        assert data != right
    else:
        assert [(b.frame.key, bytes(b.frame.payload)) for b in found] == [(b.key, bytes(b.payload)) for b in blocks]


@given(st.binary(max_size=40))
def test_no_entry(data: bytes) -> None:
    """Bytes that nobody foresaw would be a traceback."""
    with pytest.raises(CorruptBlock):
        decode_entry(data)


def test_an_entry_that_contradicts_itself() -> None:
    """A coded block would be taken for one that is not, and be served as it lies there."""
    good = Entry(200, codec=2, raw_bytes=5000, stride_pages=1)
    assert decode_entry(encode_entry(good)) == good
    for bad in (replace(good, codec=0), replace(good, raw_bytes=0), replace(good, stride_pages=0)):
        with pytest.raises(CorruptBlock, match="contradicts"):
            decode_entry(encode_entry(bad))
    later = bytearray(encode_entry(good))
    later[4] = 2
    later[24:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(later[:24])))
    with pytest.raises(CorruptBlock, match="version 2"):
        decode_entry(bytes(later))
