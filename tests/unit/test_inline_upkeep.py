"""A store that keeps its payloads inline can be looked at, mended and moved like any other."""

import json
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.cli.cmd_drop import drop
from kvtier.cli.cmd_export import export
from kvtier.cli.cmd_fsck import fsck
from kvtier.cli.cmd_gc import gc
from kvtier.cli.cmd_import import import_
from kvtier.cli.cmd_inspect import inspect
from kvtier.testing.stores import StoreDriver
from kvtier.types import Status

INLINE: dict[str, Any] = {"payload": "inline", "capacity_bytes": 10 << 20, "durability": "batch"}
ONE, TWO = b"1" * 32, b"2" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store: blocks 0 to 19 of one namespace, 20 to 24 of another."""
    store = StoreDriver(tmp_path / "s", ONE, **INLINE)
    store.write(range(20), 5000)
    store.namespace = store.namespaces.id_of(TWO, b"")
    store.write(range(20, 25), 16_384)
    store.close()
    return tmp_path / "s"


def told(capsys: pytest.CaptureFixture[str], verb: Any, *args: Any, **options: Any) -> dict[str, Any]:
    capsys.readouterr()
    code = verb(*args, json_output=True, **options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found | {"code": code}


def payload_rows(folder: Path) -> dict[bytes, bytes]:
    env = lmdb.open(str(folder / "payload"), readonly=True, lock=False)
    with env.begin() as txn:
        rows = dict(txn.cursor())
    env.close()
    return rows


def served(folder: Path, **options: Any) -> int:
    store = StoreDriver(folder, ONE, **options)
    store.rescan(range(20))
    assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
    found = len(store.kept)
    store.namespace = store.namespaces.id_of(TWO, b"")
    store.rescan(range(20, 25))
    assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
    assert (store.tier.check(), store.tier.findings) == ([], [])
    store.close()
    return found + len(store.kept)


def test_a_look_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever keeps payloads inline could not see what is there, or would find the evidence changed."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock.mdb"}
    found = told(capsys, inspect, folder, verify=True)
    assert (found["code"], found["format"], found["verify"]["sound"]) == (0, 2, 25)
    assert found["disk_bytes"]["slab"] > 25 * 5000
    found = told(capsys, fsck, folder)
    assert (found["sound"], set(found["leftovers"].values())) == (25, {0})
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_damage_is_found_and_taken_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong payload would pass, for its record is right; or a repair take sound blocks with it."""
    env = lmdb.open(str(folder / "payload"), map_size=10 << 20)
    with env.begin(write=True) as txn:
        keys = [key for key, _ in txn.cursor() if len(key) == 8]
        txn.put(keys[3], txn.get(keys[4]))  # another block's frame, which is whole
        txn.put(keys[5], txn.get(keys[5])[:-1] + b"?")
        txn.delete(keys[7])
    env.close()
    found = told(capsys, fsck, folder)
    assert (found["code"], found["corrupt"]) == (1, 3)
    assert told(capsys, fsck, folder, mend=True)["repaired"] == 3
    assert told(capsys, fsck, folder)["code"] == 0
    assert served(folder, **INLINE) == 22


def test_from_inline_to_a_slab(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The way blocks lie could never be changed without losing them."""
    assert export(folder, folder.with_name("b")) == 0
    found = told(capsys, import_, folder.with_name("t"), folder.with_name("b"), capacity="10MiB")
    assert (found["imported"], (folder.with_name("t") / "slab").exists()) == (25, True)
    assert served(folder.with_name("t"), durability="batch", capacity_bytes=10 << 20) == 25
    again = StoreDriver(folder.with_name("u"), ONE, **INLINE)
    again.close()
    assert told(capsys, import_, folder.with_name("u"), folder.with_name("b"))["imported"] == 25
    assert served(folder.with_name("u"), **INLINE) == 25


def test_dropped_payloads_go(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a dropped namespace would stay for good."""
    before = payload_rows(folder)
    drop(folder, [TWO.hex()], yes=True)
    found = told(capsys, gc, folder)
    assert (found["dropped_records"], found["extents"]) == (5, 1)
    after = payload_rows(folder)
    assert len(before) - len(after) == 5
    assert all(before[key] == row for key, row in after.items() if len(key) == 8)
    assert served(folder, **INLINE) == 20


def test_broken_payloads_are_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LMDB would follow what a broken file says, and end the process."""
    (folder / "payload" / "data.mdb").write_bytes(b"nothing of the kind")
    for options in ({}, {"mend": True}):
        found = told(capsys, fsck, folder, **options)
        assert (found["code"], "the payloads cannot be read" in found["error"]) == (1, True)
    (folder / "payload" / "data.mdb").unlink()
    assert "there is an index and no slab" in told(capsys, fsck, folder)["error"]
