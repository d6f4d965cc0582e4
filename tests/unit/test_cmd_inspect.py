"""`kvtier inspect`: what it tells of a store, in words and as JSON, and that it harms none."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import cbor2
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtier.cli import cmd_inspect
from kvtier.cli.cmd_inspect import inspect
from kvtier.cli.inspect import bar, show
from kvtier.cli.main import app
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.tiers.lmdb import folder as folders
from kvtier.tiers.lmdb.index import Change
from kvtier.types import block_key_of
from tests.inspected import AT_MS, FIELDS, PLACE, change, folder, report, snapshot

__all__ = ["folder"]


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
    assert (found["namespaces_gone"], found["dropped_records"]) == (1, 4)
    assert found["size_classes"] == [
        {"stride_bytes": 4096, "extents": 1, "blocks": 3},
        {"stride_bytes": 8192, "extents": 1, "blocks": 10},
    ]
    assert found["verify"].pop("seconds") >= 0
    assert found["verify"] == {
        "mode": "sample",
        "blocks": 13,
        "sound": 13,
        "moved": 0,
        "corrupt": 0,
        "unreadable": 0,
        "read_bytes": found["slot_bytes"],
    }
    assert (found["policy"], found["counters"]) == (None, None)
    assert (found["condemned"], found["condemned_left_out"]) == ([], 0)
    assert (found["findings"], found["findings_left_out"]) == ([], 0)
    assert 1.6e12 < found["created_ms"] <= found["oldest_ms"] <= found["newest_ms"] <= found["now_ms"]
    assert found["generation"]["newest"] < found["generation"]["limit"]


def test_ages(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks would be told to be younger or older than they are."""
    now_ms = report(capsys, folder)[1]["newest_ms"] + 7200 * 1000
    monkeypatch.setattr("kvtier.cli.inspect.report.time.time_ns", lambda: now_ms * 10**6)
    _, found = report(capsys, folder)
    blocks = {row["below_s"]: row["blocks"] for row in found["ages"]}
    assert blocks == {60: 0, 3600: 0, 86_400: 13, 604_800: 0, 2_592_000: 0, None: 0}
    assert sum(row["payload_bytes"] for row in found["ages"]) == found["payload_bytes"]
    assert show.age(2 * 3600 * 1000) == "2 hours"
    assert show.age((3 * 86_400 + 3600) * 1000) == "3 days 1 hour"
    assert show.age((86_400 + 59) * 1000) == "1 day"
    assert show.age(-5) == "less than a second"


def test_what_the_engine_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order, the counters and the condemned blocks of a store would only be known while its engine runs."""
    key = block_key_of(key_of(5))
    condemned = {"key": key, "namespace": b"1" * 32, "length": 5000, "at_ms": AT_MS, "detail": "wrong"}
    rows: dict[bytes, bytes | None] = {
        b"policy/head": cbor2.dumps({"policy": "arc", "snapshot": 3, "residents": 12, "ghosts": 4}),
        b"policy/snapshot/a": bytes(70),
        b"policy/snapshot/b": bytes(30),
        b"policy/log/a": bytes(8),
        b"counters": cbor2.dumps({"since_ms": AT_MS, "lmdb.evicted": 12_345, "lookups": 0}),
        b"condemned/" + PLACE.to_bytes(8, "big"): cbor2.dumps(condemned),
        b"of a later version": b"\xff",
    }
    change(folder, Change(sidecar=rows))
    code, found = report(capsys, folder)
    assert (code, found["findings"]) == (0, []), "what was condemned before is gone"
    sizes = {"snapshot_bytes": 100, "log_rows": 1, "log_bytes": 8}
    assert found["policy"] == {"name": "arc", "ordered_blocks": 12, "ghosts": 4, **sizes}
    assert found["counters"] == {"since_ms": AT_MS, "lmdb.evicted": 12_345, "lookups": 0}
    assert found["condemned"] == [
        {
            "found_by": "engine",
            "place": PLACE,
            "key": key.hex(),
            "namespace": "31" * 32,
            "length_bytes": 5000,
            "stored_ms": None,
            "at_ms": AT_MS,
            "detail": "wrong",
        }
    ]
    assert inspect(folder) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "arc, 12 blocks in known order and 4 remembered; snapshot 100 B, log 8 B in 1 row" in text
    assert "since 2023-11-14 22:13:20 UTC: lmdb.evicted 12,345 checked" in text
    assert f"condemned: place {PLACE}" in text


def test_unreadable_notes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged row of the engine's would be a traceback."""
    rows: dict[bytes, bytes | None] = {
        b"policy/head": b"\xff",
        b"counters": cbor2.dumps([1]),
        b"condemned/x": cbor2.dumps({"key": 5, "at_ms": "soon"}),
        b"condemned/": b"",
    }
    change(folder, Change(sidecar=rows))
    code, found = report(capsys, folder)
    assert (code, found["policy"], found["counters"]) == (1, None, None)
    assert [entry["place"] for entry in found["condemned"]] == [None, None]
    assert len(found["findings"]) == 3
    assert inspect(folder) == 1


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_text(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """What people copy from the output would be cut by a narrow terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with (folder / "slab").open("r+b") as slab:
        slab.write(b"\0" * 8192)
    key = report(capsys, folder)[1]["condemned"][0]["key"]
    assert inspect(folder) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == f"{folder}: a store, closed"
    assert f"key {key}" in lines
    assert "31" * 32 in " ".join(lines)
    assert any(line.startswith("blocks") and "13 in 2 namespaces" in line for line in lines)
    assert any(line.startswith("oldest") and "ago" in line for line in lines)


def test_text_escapes_markup(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model's name could break the output, or colour it."""
    store = StoreDriver(folder)
    store.namespace = store.namespaces.id_of(b"4" * 32, cbor2.dumps({"name": "a[/red]b[bold]"}))
    store.write([50])
    store.close()
    assert inspect(folder) == 0
    assert "a[/red]b[bold]" in capsys.readouterr().out


def test_nothing_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Looking at a dead store would change the evidence, or fail on a filesystem mounted read-only."""
    (folder / "index" / "lock.mdb").unlink()
    before = snapshot(folder)
    assert inspect(folder, verify=True) == 0
    assert capsys.readouterr().err == "", "no progress bar where nobody watches"
    assert snapshot(folder) == before


def test_a_narrow_terminal_cuts_no_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes and counts would end in dots."""
    _, found = report(capsys, folder)
    said = []
    for width in (20, 200):
        console = Console(width=width, file=io.StringIO(), record=True)
        show.show(console, found)
        said.append(console.export_text())
    assert "…" not in said[0]
    assert set(said[1].split()) <= set(said[0].split())


@pytest.mark.parametrize("text", ["model: {a: b", None])
def test_a_file_that_cannot_be_used_is_told_as_json(tmp_path: Path, text: str | None) -> None:
    """A program that looks at many stores would not know which one the error is about, or get no JSON at all."""
    file = tmp_path / "kvtier.yaml"
    if text is not None:
        file.write_text(text)
    done = CliRunner().invoke(app, ["inspect", str(file), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told.keys(), told["path"]) == (2, {"path", "error"}, str(file))
    assert done.stderr == f"error: {told['error']}\n"


def test_what_may_not_be_read_is_told_as_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of someone else would give four lines of usage on stderr and no JSON."""
    monkeypatch.setattr(os, "access", lambda *args, **options: False)  # what the parser of options would ask

    def refuse(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder / "lock"))

    monkeypatch.setattr(cmd_inspect.StoreReader, "open", refuse)
    done = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    problem = f"{folder / 'lock'}: cannot be read: Permission denied"
    assert (done.exit_code, json.loads(done.stdout)) == (2, {"path": str(folder), "error": problem})
    assert done.stderr == f"error: {problem}\n"


def test_a_yaml_file_names_its_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever has the configuration would have to look the folder up in it."""
    yaml = folder.parent / "kvtier.yaml"
    model = "model: {name: x, weights: ./not-here, layers: 1, kv_heads: 1, head_dim: 64, dtype: float32}\n"
    tiers = "tiers: [{type: gpu, capacity: 1MiB}"
    yaml.write_text(model + tiers + ", {type: lmdb, path: ./s, capacity: 16MiB}]")
    code, found = report(capsys, yaml)
    assert (code, found["path"], found["blocks"]) == (0, str(folder), 13)
    yaml.write_text(model + tiers + "]")
    done = CliRunner().invoke(app, ["inspect", str(yaml)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "no tier of type lmdb" in done.stderr


def test_a_writer_on_a_filesystem_with_two_device_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On btrfs a live store would be taken for a dead one: /proc/locks and stat name different devices."""
    lock = tmp_path / "lock"
    lock.write_text(json.dumps({"pid": 4242, "boot_id": "", "durability": "none", "clean": False}).ljust(255) + "\n")
    found = lock.stat()
    table = tmp_path / "locks"
    monkeypatch.setattr(folders, "_LOCKS", table)
    here = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    for kind, pid, device, inode, held in [
        ("FLOCK", 1, here, found.st_ino, True),
        ("FLOCK", 4242, "00:2a", found.st_ino, True),
        ("FLOCK", 1, "00:2a", found.st_ino, False),
        ("POSIX", 4242, here, found.st_ino, False),
        ("FLOCK", 4242, here, found.st_ino + 1, False),
    ]:
        table.write_text(f"1: {kind}  ADVISORY  WRITE {pid} {device}:{inode} 0 EOF\n")
        assert folders.has_writer(lock) is held
    table.unlink()
    assert folders.has_writer(lock), "where the kernel does not tell, the careful way is taken"


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that takes an hour would not say how far it is."""
    screen = io.StringIO()
    monkeypatch.setattr(bar, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=100))
    with bar.progress_bar(quiet=False, reading="checking") as progress:
        progress(3, 12, 8192)
    assert "3 of 12 blocks, 8.0 KiB" in screen.getvalue()
    screen.seek(0)
    screen.truncate()
    with bar.progress_bar(quiet=True, reading="checking") as progress:
        progress(3, 12, 8192)
    assert screen.getvalue() == ""
