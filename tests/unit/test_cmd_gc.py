"""`kvtier gc` gives disk back, and never a block that a cache would find."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import pytest

from kvtier.cli.cmd_drop import drop
from kvtier.cli.cmd_fsck import fsck
from kvtier.cli.cmd_gc import gc
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb import sweep
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.folder import state_of
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.layout import ID_KEY, PLACE_KEY, _sealed, decode_record, encode_extent, encode_record
from kvtier.types import Status

ONE, TWO = b"1" * 32, b"2" * 32
EXTENT_BYTES = 1 << 19


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store: two full extents of one namespace, and one of another."""
    store = StoreDriver(tmp_path / "s", ONE, durability="batch")
    store.write(range(32), 16_384)
    store.namespace = store.namespaces.id_of(TWO, cbor2.dumps({"name": "two"}))
    store.write(range(100, 132), 16_384)
    store.namespace = store.namespaces.id_of(ONE, b"")
    store.write(range(32, 64), 16_384)
    store.close()
    return tmp_path / "s"


def change(folder: Path, rows: Change) -> None:
    index = Index.open(folder / "index", "none", 1 << 20)
    index.commit(rows)
    index.close()


def swept(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert gc(folder, json_output=True) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def rows_of(folder: Path, table: str) -> dict[bytes, bytes]:
    index = Index.open_readonly(folder / "index", live=False)
    rows = dict(index.rows(table))
    index.close()
    return rows


def served(folder: Path) -> int:
    store = StoreDriver(folder, ONE, durability="batch")
    store.rescan(range(64))
    assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
    assert (store.tier.findings, store.tier.check()) == ([], [])
    store.close()
    return len(store.kept)


def test_a_dropped_namespace_gives_its_disk_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A drop would free nothing until some cache opens the store."""
    before = (folder / "slab").stat().st_blocks * 512
    drop(folder, ["two"], yes=True)
    state = state_of(folder)
    found = swept(capsys, folder)
    assert (found["dropped_records"], found["extents"], found["namespaces"]) == (32, 1, 0)
    assert found["disk_bytes"]["slab"] == EXTENT_BYTES
    assert (folder / "slab").stat().st_blocks * 512 == before - EXTENT_BYTES
    assert state_of(folder) == state
    assert (len(rows_of(folder, "blocks")), len(rows_of(folder, "extents"))) == (64, 2)
    assert fsck(folder) == 0
    assert served(folder) == 64
    assert gc(folder) == 0
    assert "given back: 0 B of the slab" in capsys.readouterr().out


def test_nothing_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep of a tidy store would change it."""
    before = {table: rows_of(folder, table) for table in ("blocks", "extents", "namespaces", "meta")}
    found = swept(capsys, folder)
    counts = ("dropped_records", "superseded_records", "namespaces", "extents", "sidecar_rows", "damaged_rows")
    assert [found[name] for name in counts] == [0] * 6
    assert {table: rows_of(folder, table) for table in before} == before
    assert served(folder) == 64


def test_leftovers_of_crashes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Disk and rows that a crash left behind would stay for good."""
    place, copy = PLACE_KEY.pack(0, 3), PLACE_KEY.pack(2, 30)
    record = decode_record(place, rows_of(folder, "blocks")[place])
    older = encode_record(copy, record._replace(generation=0))
    notes = {b"condemned/" + n.to_bytes(8, "big"): cbor2.dumps({"at_ms": n}) for n in range(70)}
    rows: Change = Change(blocks={copy: older}, extents={ID_KEY.pack(9): encode_extent(9, 2)}, sidecar=dict(notes))
    rows.namespaces[ID_KEY.pack(2)] = None
    change(folder, rows)
    with (folder / "slab").open("r+b") as slab:
        slab.seek(4 * EXTENT_BYTES)
        slab.write(b"?" * EXTENT_BYTES)
    found = swept(capsys, folder)
    assert (found["superseded_records"], found["extents"], found["sidecar_rows"]) == (1, 2, 6)
    assert set(notes) - set(rows_of(folder, "sidecar")) == set(sorted(notes)[:6])
    assert (folder / "slab").stat().st_size == 3 * EXTENT_BYTES
    assert served(folder) == 63, "the slot of the older copy had another block"


def test_what_it_leaves_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evidence of damage would be swept away, or what a later version wrote."""
    later, damaged, nowhere = PLACE_KEY.pack(4, 0), PLACE_KEY.pack(5, 0), PLACE_KEY.pack(6, 0)
    rows = {later: _sealed(later, b"\x63..."), damaged: b"?", nowhere: _sealed(nowhere, b"\x63...")}
    extents = {ID_KEY.pack(n): encode_extent(n, 4) for n in (4, 5)}
    change(folder, Change(blocks=dict(rows), extents=dict(extents)))
    with (folder / "slab").open("r+b") as slab:
        slab.truncate(7 * EXTENT_BYTES)
        os.posix_fallocate(slab.fileno(), 4 * EXTENT_BYTES, 3 * EXTENT_BYTES)
    before = (folder / "slab").stat().st_blocks
    change(folder, Change(namespaces={ID_KEY.pack(1): None}))
    found = swept(capsys, folder)
    assert (found["unknown_records"], found["damaged_rows"], found["extents"]) == (2, 1, 2)
    assert rows.items() <= rows_of(folder, "blocks").items()
    assert extents.items() <= rows_of(folder, "extents").items()
    assert len(rows_of(folder, "namespaces")) == 1
    assert before - (folder / "slab").stat().st_blocks == 2 * EXTENT_BYTES // 512


def test_a_namespace_of_unknown_records_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a later version wrote would lose its name, and count as dropped."""
    later = PLACE_KEY.pack(1, 31)
    change(folder, Change(blocks={PLACE_KEY.pack(1, n): None for n in range(31)} | {later: _sealed(later, b"\x63")}))
    assert swept(capsys, folder)["namespaces"] == 0
    change(folder, Change(blocks={later: None}))
    assert swept(capsys, folder)["namespaces"] == 1


def test_the_index_becomes_small(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An index that once was large would take its disk for ever."""
    change_rows = {b"x" + n.to_bytes(4, "big"): bytes(2000) for n in range(1000)}
    index = Index.open(folder / "index", "none", 8 << 20)
    index.commit(Change(sidecar=dict(change_rows)))
    index.commit(Change(sidecar=dict.fromkeys(change_rows)))
    index.close()
    before = {table: rows_of(folder, table) for table in ("blocks", "extents", "namespaces", "meta", "sidecar")}
    found = swept(capsys, folder)
    assert found["compacted"]
    assert found["disk_bytes"]["index"] > 2 << 20
    assert {table: rows_of(folder, table) for table in before} == before
    assert (folder / "index" / "data.mdb").stat().st_mode & 0o777 == 0o600
    assert (fsck(folder), served(folder)) == (0, 64)


def test_no_room_to_write_the_index_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, where a sweep is needed most, it would fail, or lose the index."""

    def full(index: Index, fd: int) -> None:
        os.write(fd, b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sweep, "COMPACT_BYTES_MIN", -1 << 30)
    monkeypatch.setattr(sweep, "COMPACT_SHARE", -1)
    monkeypatch.setattr(Index, "copy_to", full)
    drop(folder, ["two"], yes=True)
    found = swept(capsys, folder)
    assert (found["compacted"], found["dropped_records"]) == (False, 32)
    assert sorted(path.name for path in (folder / "index").iterdir()) == ["data.mdb", "lock.mdb"]
    assert served(folder) == 64


def test_where_nothing_can_be_punched(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On such a filesystem the end of the slab would not be given back, or too much of it."""
    monkeypatch.setattr(BlockFile, "punch", lambda *args: False)
    change(folder, Change(blocks={PLACE_KEY.pack(2, n): None for n in range(32)}))
    found = swept(capsys, folder)
    assert (found["extents"], (folder / "slab").stat().st_size) == (1, 2 * EXTENT_BYTES)
    assert served(folder) == 32


def test_an_interrupted_sweep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that was killed would leave a store that cannot be used."""
    drop(folder, ["two"], yes=True)
    state = state_of(folder)
    monkeypatch.setattr(sweep, "ROWS_AT_ONCE", 10)
    monkeypatch.setattr(sweep, "_return_disk", lambda upkeep: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gc(folder)
    assert replace(state_of(folder), pid=state.pid) == state
    assert served(folder) == 64
