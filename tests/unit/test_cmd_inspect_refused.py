"""`kvtier inspect`: stores that are broken, strange, or somebody else's."""

import errno
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
from typer.testing import CliRunner

from kvtier.cli.cmd_inspect import inspect
from kvtier.cli.main import app
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.index import Change
from kvtier.tiers.lmdb.layout import HEADER_KEY, encode_header
from kvtier.tiers.lmdb.lock import boot_id
from tests.inspected import change, folder, report

__all__ = ["folder"]


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
