"""Coded blocks are exported, imported, examined and scrubbed as they lie, whoever does it."""

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.blocks.coding import UNCODED
from kvtier.cli.cmd_export import export
from kvtier.cli.cmd_fsck import fsck
from kvtier.cli.cmd_import import import_
from kvtier.errors import BundleError
from kvtier.testing.tiers import key_of
from kvtier.tiers.bundle.entry import ENTRY_BYTES, Entry, decode_entry, encode_entry
from kvtier.tiers.bundle.manifest import decode_manifest, encode_manifest, part_name
from kvtier.tiers.bundle.reading import read_manifest
from kvtier.types import Outcome, Status, StoredBlock
from tests.unit.test_coded_store import CODECS, RAW_BYTES, Store, codings, kv, noise

BLOCKS = {number: kv(number) for number in range(6)} | {6: noise(6)}


def filled(path: Path, codec: str) -> Store:
    """An open store with six blocks that are coded, one that is not always, and one from before."""
    store = Store(path, "none")
    store.write({7: kv(7)})
    store.reopen(codings(codec))
    assert all(outcome.done for outcome in store.write(BLOCKS))
    return store


def learn(store: Store) -> None:
    """Where the store's blocks are."""
    numbers = {key_of(number): number for number in range(8)}
    store.at = {numbers[block.key]: Outcome(Status.DONE, block.place, block.generation) for block in store.tier.scan()}


@pytest.mark.parametrize("codec", CODECS)
def test_they_come_out_as_they_went_in(tmp_path: Path, codec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle's blocks would be as long as uncoded ones, or be decoded by no one."""
    store = filled(tmp_path / "s", codec)
    records = {number: store.record(number) for number in range(8)}
    blocks = {number: store.read(number) for number in range(8)}
    store.tier.close()
    assert fsck(tmp_path / "s") == 0
    assert export(tmp_path / "s", tmp_path / "b") == 0
    manifest = asyncio.run(read_manifest(tmp_path / "b"))
    assert manifest.codecs == (0, {"int8": 2, "fp8": 3, "exp4": 4}[codec])
    capsys.readouterr()
    assert import_(tmp_path / "t", tmp_path / "b", capacity="8MiB", json_output=True) == 0
    assert json.loads(capsys.readouterr().out)["imported"] == 8
    assert fsck(tmp_path / "t") == 0
    other = Store(tmp_path / "t", codec)
    learn(other)
    for number in range(8):
        assert other.read(number) == blocks[number]
        ours, theirs = records[number], other.record(number)
        assert (ours.coded, ours.length_bytes, ours.checksum) == (theirs.coded, theirs.length_bytes, theirs.checksum)
    other.tier.close()


def changed(bundle: Path, change: dict[str, int]) -> None:
    """Change the first coded block's entry, as somebody would who knows the format."""
    path = bundle / part_name(0)
    data = bytearray(path.read_bytes())
    at = 0
    while not (entry := decode_entry(bytes(data[at : at + ENTRY_BYTES]))).codec:
        at += ENTRY_BYTES + entry.frame_bytes
    data[at : at + ENTRY_BYTES] = encode_entry(replace(entry, **change))
    path.write_bytes(data)
    manifest = decode_manifest((bundle / "manifest.cbor").read_bytes())
    part = replace(manifest.parts[0], sha256=hashlib.sha256(data).digest())
    named = tuple(sorted({*manifest.codecs, change.get("codec", 0)}))
    sealed = encode_manifest(replace(manifest, parts=(part,), codecs=named))
    (bundle / "manifest.cbor").write_bytes(sealed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codec": 9}, r"codec 9, and this kvtier knows \[2, 3, 4\]"),
        ({"codec": 3}, "a coded block with the head"),
        ({"raw_bytes": 4096}, "a coded block with the head"),
        ({"stride_pages": 1}, "in a slot of 4096"),
        ({"stride_pages": 1 << 31}, "in a slot of"),
    ],
)
def test_a_form_that_lies(tmp_path: Path, change: dict[str, int], said: str) -> None:
    """A block would be decoded as what it is not, or take a slot of any size."""
    filled(tmp_path / "s", "int8").tier.close()
    export(tmp_path / "s", tmp_path / "b")
    changed(tmp_path / "b", change)
    with pytest.raises(BundleError, match=said):
        import_(tmp_path / "t", tmp_path / "b", capacity="8MiB")
    assert not (tmp_path / "t").exists()


def test_no_form_at_all() -> None:
    """The default of an entry would be a coded block."""
    assert decode_entry(encode_entry(Entry(9))).codec == 0


@pytest.mark.parametrize("knows", [True, False])
def test_a_scrub_condemns_no_block_of_another_model(tmp_path: Path, knows: bool) -> None:
    """An engine that cannot decode a block would take it from those who can."""
    store = filled(tmp_path / "s", "int8")
    stored = [StoredBlock(key_of(n), at.place, at.generation, RAW_BYTES) for n, at in sorted(store.at.items())]
    if not knows:
        store.reopen(UNCODED)
    assert {outcome.status for outcome in store.tier.scrub(stored)} == {Status.DONE}
    store.spoil(2, 40, seal=False)
    store.spoil(3, 1, seal=True)  # the head
    statuses = [outcome.status for outcome in store.tier.scrub(stored)]
    assert [number for number, status in enumerate(statuses) if status is Status.CORRUPT] == [2, 3]
    store.tier.close()
