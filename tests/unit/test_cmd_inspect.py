"""`kvtier inspect` tells the truth about a store, and harms none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cbor2
import pytest

from kvtier.cli.cmd_inspect import inspect, spread
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.offline import has_writer

FIELDS = {"name": "tiny", "weights_epoch": "v1", "groups": [{"kind": "full"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with two namespaces and two size classes."""
    store = StoreDriver(tmp_path / "s", durability="batch")
    store.namespace = store.namespaces.id_of(b"1" * 32, cbor2.dumps(FIELDS))
    store.write(range(10), 5000)
    store.namespace = store.namespaces.id_of(b"2" * 32, b"\xffnot CBOR")
    store.write(range(10, 13), 4096)
    store.close()
    return tmp_path / "s"


def report(capsys: pytest.CaptureFixture[str], path: Path, sample: int = 64) -> tuple[int, dict[str, object]]:
    code = inspect(path, True, sample)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return code, json.loads(out)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts that watch stores would read wrong numbers."""
    code, found = report(capsys, folder)
    assert code == 0
    assert (found["format"], found["durability"], found["live"], found["clean"]) == (1, "batch", False, True)
    assert (found["capacity_bytes"], found["extent_bytes"]) == (4 << 20, 1 << 19)
    assert (found["blocks"], found["payload_bytes"]) == (13, 10 * 5000 + 3 * 4096)
    assert found["slot_bytes"] == 10 * 8192 + 3 * 4096
    assert found["extents"] == {"lent": 2, "capacity": 8}
    assert found["namespaces"] == [
        {"fingerprint": "31" * 32, "name": "tiny", "fields": FIELDS, "blocks": 10, "payload_bytes": 50_000},
        {"fingerprint": "32" * 32, "name": "", "fields": {}, "blocks": 3, "payload_bytes": 12_288},
    ]
    assert found["size_classes"] == [
        {"stride_bytes": 4096, "extents": 1, "blocks": 3},
        {"stride_bytes": 8192, "extents": 1, "blocks": 10},
    ]
    assert found["sample"] == {"verified": 13, "corrupt": 0}
    assert found["findings"] == []
    assert 1.6e12 < found["oldest_ms"] <= found["newest_ms"]


def test_nothing_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Looking at a dead store would change the evidence, or need the right to write."""
    before = snapshot(folder)
    assert inspect(folder) == 0
    text = capsys.readouterr().out
    assert "13 blocks" in text
    assert "tiny" in text
    assert "31" * 32 in text
    assert snapshot(folder) == before


def test_damage_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rotten store would be called sound."""
    with (folder / "slab").open("r+b") as slab:
        slab.write(b"\0" * 8192)
    code, found = report(capsys, folder)
    assert code == 1
    assert found["sample"] == {"verified": 13, "corrupt": 1}
    assert len(found["findings"]) == 1
    assert report(capsys, folder, sample=0)[0] == 0, "no sample, no payload is read"
    os.truncate(folder / "slab", 4096)
    code, found = report(capsys, folder)
    assert code == 1
    assert len(found["findings"]) == 13
    assert inspect(folder) == 1
    assert "damage: " in capsys.readouterr().out


def test_a_broken_index_is_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unreadable store would be a traceback, or pass for none."""
    os.truncate(folder / "index" / "data.mdb", 8192)
    code, found = report(capsys, folder)
    assert code == 1
    assert set(found) == {"path", "error"}


@pytest.mark.parametrize("what", ["absent", "file", "empty", "foreign"])
def test_not_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    """A mistyped path would be a traceback."""
    path = tmp_path / what
    if what == "file":
        path.write_text("x")
    elif what != "absent":
        path.mkdir()
    if what == "foreign":
        (path / "index").mkdir()
        (path / "slab").write_text("x")
    assert inspect(path) == 2
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert str(path) in out


WRITER = """
import pathlib, sys
from kvtier.testing.stores import StoreDriver

store = StoreDriver(pathlib.Path(sys.argv[1]), durability="batch")
store.write(range(40))
number = 40
print("ready", flush=True)
while True:
    store.write(range(number, number + 20), evict=sorted(store.kept)[:20])
    number += 20
"""


def test_beside_a_live_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Looking would disturb the writer, or call a healthy store corrupt (9 of 7,776 blocks in a trial)."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "s")], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        assert has_writer(tmp_path / "s" / "lock")
        for _ in range(5):
            code, found = report(capsys, tmp_path / "s")
            assert (code, found["live"], found["findings"]) == (0, True, [])
            assert found["blocks"] >= 20
        assert writer.poll() is None
        writer.kill()
    assert not has_writer(tmp_path / "s" / "lock")


def test_own_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that looks at its own open store would crash in LMDB."""
    store = StoreDriver(tmp_path / "s")
    assert inspect(tmp_path / "s") == 2
    assert "this process has the store open" in capsys.readouterr().out
    assert store.write([1])[0].value == "done"
    store.close()


def test_samples_are_spread() -> None:
    """Only the oldest part of a store would ever be verified."""
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread(range(3), 64) == [0, 1, 2]
    assert spread(range(3), 1) == [0]
    assert spread(range(3), 0) == []
