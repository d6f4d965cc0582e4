"""`kvtier inspect` tells the truth about a store, and harms none."""

import errno
import io
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import lmdb
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtier.cli import cmd_inspect
from kvtier.cli.cmd_inspect import inspect
from kvtier.cli.inspect import bar, show
from kvtier.cli.inspect.pace import Pace, parse_rate
from kvtier.cli.inspect.tally import spread
from kvtier.cli.main import app
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.tiers.lmdb import folder as folders
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.layout import HEADER_KEY, encode_header
from kvtier.tiers.lmdb.lock import boot_id
from kvtier.types import block_key_of

FIELDS = {"name": "tiny", "weights_epoch": "v1", "groups": [{"kind": "full"}]}
PLACE, AT_MS = 77, 1_700_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with two namespaces and two size classes; of a third the records are left, not the name."""
    store = StoreDriver(tmp_path / "s", durability="batch")
    store.namespace = store.namespaces.id_of(b"1" * 32, cbor2.dumps(FIELDS))
    store.write(range(10), 5000)
    store.namespace = store.namespaces.id_of(b"2" * 32, b"\xffnot CBOR")
    store.write(range(10, 13), 4096)
    store.namespace = store.namespaces.id_of(b"3" * 32, b"")
    store.write(range(20, 24), 4096)
    store.tier.drop(store.namespace)
    store.close()
    return tmp_path / "s"


def report(capsys: pytest.CaptureFixture[str], path: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    code = inspect(path, True, **options)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return code, json.loads(out)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def change(folder: Path, rows: Change) -> None:
    index = Index.open(folder / "index", "none", 1 << 20)
    index.commit(rows)
    index.close()


# ---------------------------------------------------------------- the report


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


# ---------------------------------------------------------------- checking blocks


def test_damage_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rotten store would be called sound."""
    with (folder / "slab").open("r+b") as slab:
        slab.write(b"\0" * 8192)
    for options in ({}, {"verify": True}, {"sample": 13}):
        code, found = report(capsys, folder, **options)
        assert code == 1
        assert (found["verify"]["sound"], found["verify"]["corrupt"]) == (12, 1)
        [bad] = found["condemned"]
        assert (bad["found_by"], bad["place"], bad["namespace"]) == ("inspect", 0, "31" * 32)
        assert bad["key"] == block_key_of(key_of(0)).hex()
        assert bad["detail"] == "its bytes do not match their checksum"
    code, found = report(capsys, folder, sample=0)
    assert (code, found["verify"]["mode"], found["verify"]["blocks"]) == (0, "none", 0)
    os.truncate(folder / "slab", 4096)
    code, found = report(capsys, folder)
    assert code == 1
    assert len(found["findings"]) == 13
    assert inspect(folder) == 1
    assert "damage: " in capsys.readouterr().out


def test_a_sample_is_a_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A look at a large store would take as long as reading it."""
    code, found = report(capsys, folder, sample=5)
    assert (code, found["blocks"], found["verify"]["blocks"]) == (0, 13, 5)


def test_a_block_larger_than_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The buffer for a batch would be too small for a single block of a large model."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=64 << 20, length_bytes_max=3 << 20)
    store.write(range(3), 3 << 20)
    store.write(range(3, 6), 5000)
    store.close()
    waits: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.cli.inspect.pace.Pace.__init__.__defaults__", (lambda: 0.0, waits.append))
        code, found = report(capsys, tmp_path / "s", verify=True, rate="2MiB/s")
    assert (code, found["verify"]["sound"]) == (0, 6)
    assert len(waits) == 4, "each large block is a batch of its own"
    assert waits[-1] == pytest.approx(found["verify"]["read_bytes"] / (2 << 20))


def test_a_bad_sector(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One page that the device refuses would end the look, or pass for corruption."""
    read = BlockFile.read

    def refused(file: BlockFile, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= 3 * 8192 < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")
        return read(file, buffers, offset)

    monkeypatch.setattr(BlockFile, "read", refused)
    code, found = report(capsys, folder, verify=True)
    assert code == 1
    assert (found["verify"]["sound"], found["verify"]["unreadable"], found["verify"]["corrupt"]) == (12, 1, 0)
    assert "Input/output error" in found["condemned"][0]["detail"]


def test_without_direct_io(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On filesystems without O_DIRECT nothing could be checked, or a stale page of the cache be called corrupt."""
    opened = BlockFile.open_readonly

    def buffered(path: Path) -> BlockFile:
        opened(path).close()
        return BlockFile(os.open(path, os.O_RDONLY), direct=False)

    monkeypatch.setattr(BlockFile, "open_readonly", buffered)
    assert report(capsys, folder, verify=True)[1]["verify"]["sound"] == 13
    with (folder / "slab").open("r+b") as slab:
        slab.write(b"\0" * 8192)
    stale = iter([True])
    read = BlockFile.read

    def stale_once(file: BlockFile, buffers: Sequence[memoryview], offset: int) -> int:
        moved = read(file, buffers, offset)
        if next(stale, False):
            buffers[1][0] ^= 1
        return moved

    monkeypatch.setattr(BlockFile, "read", stale_once)
    assert report(capsys, folder, verify=True)[1]["verify"]["corrupt"] == 1, "the second read was right"


def test_lists_have_an_end(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with a million bad records would fill the memory with words about them."""
    monkeypatch.setattr("kvtier.tiers.lmdb.offline.FINDINGS_KEPT", 3)
    monkeypatch.setattr("kvtier.cli.inspect.report.CONDEMNED_KEPT", 2)
    with (folder / "slab").open("r+b") as slab:
        slab.write(b"\0" * 4 * 8192)
    change(folder, Change(blocks={bytes([255, number]): b"x" for number in range(8)}))
    code, found = report(capsys, folder)
    assert (code, found["verify"]["corrupt"]) == (1, 4)
    assert (len(found["condemned"]), found["condemned_left_out"]) == (2, 2)
    assert (len(found["findings"]), found["findings_left_out"]) == (3, 5)
    monkeypatch.setattr(show, "SHOWN_MAX", 1)
    assert inspect(folder) == 1
    text = capsys.readouterr().out
    assert "... and 3 more condemned blocks" in text
    assert "... and 7 more findings" in text


# ---------------------------------------------------------------- what cannot be looked at


def refused(capsys: pytest.CaptureFixture[str], path: Path, code: int) -> str:
    """The one line in which a look ends, on stderr; to programs as JSON."""
    assert inspect(path) == code
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert report(capsys, path) == (code, {"path": str(path), "error": said.err.removeprefix("error: ").strip()})
    return said.err


@pytest.mark.parametrize("what", ["absent", "file", "empty", "foreign", "just created"])
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
    if what == "just created":
        (path / "lock").touch()
    words = {
        "absent": "no such path",
        "file": "it is not a folder",
        "empty": "it is empty",
        "foreign": "it is not a store",
        "just created": "its creation is not finished",
    }
    assert f"{path}: {words[what]}" in refused(capsys, path, 2)


def _garbage(folder: Path) -> None:
    data = folder / "index" / "data.mdb"
    data.write_bytes(random.Random(1).randbytes(data.stat().st_size))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "index cut": lambda folder: os.truncate(folder / "index" / "data.mdb", 8192),
    "index empty": lambda folder: os.truncate(folder / "index" / "data.mdb", 0),
    "index garbage": _garbage,
    "index absent": lambda folder: (folder / "index" / "data.mdb").unlink(),
    "slab absent": lambda folder: (folder / "slab").unlink(),
    "no header": lambda folder: change(folder, Change(meta={HEADER_KEY: None})),
    "damaged header": lambda folder: change(folder, Change(meta={HEADER_KEY: b"x" * 40})),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_broken_store_is_damage(folder: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    """An unreadable store would be a traceback, end the process in LMDB, or pass for none."""
    DAMAGES[damage](folder)
    assert "Delete the folder" in refused(capsys, folder, 1)


def test_a_future_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A later version's store would be read by this version's rules, or be called damaged."""
    store = StoreDriver(folder)
    header = store.tier._store.header
    store.close()
    change(folder, Change(meta={HEADER_KEY: encode_header(replace(header, format=3))}))
    assert "it has format 3, and this kvtier reads format 1 and 2" in refused(capsys, folder, 2)


def test_not_to_be_believed(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss under durability none LMDB would be given pages that never reached the disk."""
    lock = folder / "lock"
    state = {"pid": 1, "boot_id": "another", "durability": "none", "clean": False}
    lock.write_text(json.dumps(state).ljust(255) + "\n")
    assert "the machine went down under durability none" in refused(capsys, folder, 1)
    monkeypatch.setattr("kvtier.tiers.lmdb.offline.has_writer", lambda lock: True)
    assert "a writer is just opening it" in refused(capsys, folder, 2)
    monkeypatch.undo()
    lock.write_text(json.dumps(state | {"boot_id": boot_id()}).ljust(255) + "\n")
    code, found = report(capsys, folder)
    assert (code, found["clean"]) == (0, False)
    store = StoreDriver(folder, durability="none")
    store.close()
    lock.write_bytes(b"rot" * 80)
    assert "the lock file does not say" in refused(capsys, folder, 1), "the header says none, the lock says nothing"


@pytest.mark.parametrize("what", ["data.mdb", "slab", "lock"])
def test_no_permission(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Another user's store would be called damaged, which invites to delete it."""
    opened = os.open

    def denied(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path).name == what:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    assert "cannot be read: Permission denied" in refused(capsys, folder, 2)


def test_lmdb_refuses_this_process(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory, or a full table of readers, would be called damage."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise lmdb.MemoryError("Cannot allocate memory")

    monkeypatch.setattr(lmdb, "open", refuse)
    assert "cannot be opened: Cannot allocate memory" in refused(capsys, folder, 2)


def test_own_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that looks at its own open store would crash in LMDB."""
    store = StoreDriver(tmp_path / "s")
    assert "this process has the store open" in refused(capsys, tmp_path / "s", 2)
    assert store.write([1])[0].value == "done"
    store.close()


@pytest.mark.parametrize(
    "arguments",
    [["--sample", "-1"], ["--sample", "many"], ["--verify", "--sample", "3"], ["--rate", "fast"], ["--rate", "0"]],
)
def test_wrong_use(folder: Path, arguments: list[str]) -> None:
    """A mistyped option would be a traceback, or be ignored."""
    done = CliRunner().invoke(app, ["inspect", str(folder), *arguments])
    assert done.exit_code == 2
    assert arguments[0] in done.stderr
    assert done.stdout == ""


def test_the_command(folder: Path) -> None:
    """The options would not reach the verb."""
    done = CliRunner().invoke(app, ["inspect", str(folder), "--verify", "--rate", "1GiB/s", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["verify"]["mode"]) == (0, "all")


# ---------------------------------------------------------------- pieces


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


def test_samples_are_spread() -> None:
    """Only the oldest part of a store would ever be verified."""
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread(range(3), 64) == [0, 1, 2]
    assert spread(range(3), 1) == [0]
    assert spread(range(3), 0) == []


def test_pace() -> None:
    """A limited look would take the whole device in bursts, or catch up on what a slow device cost."""
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(parse_rate("4MiB/s"), lambda: now[0], sleep)
    assert pace.batch_bytes(16 << 20) == 1 << 20
    for _ in range(8):
        pace.spend(1 << 20)
    assert now[0] == pytest.approx(2.0, abs=0.25)
    now[0] += 60
    slept.clear()
    for _ in range(8):
        pace.spend(1 << 20)
    assert sum(slept) == pytest.approx(1.75)
    free = Pace(None, lambda: now[0], sleep)
    free.spend(1 << 40)
    assert free.batch_bytes(123) == 123


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
