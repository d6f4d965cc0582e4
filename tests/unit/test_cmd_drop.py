"""`kvtier drop` takes what it was told to, all of it, and nothing else."""

import io
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import cbor2
import pytest
from typer.testing import CliRunner

from kvtier.cli.cmd_drop import drop
from kvtier.cli.cmd_inspect import inspect
from kvtier.cli.main import app
from kvtier.cli.store.choice import chosen
from kvtier.errors import StoreLocked, UsageError
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.folder import state_of
from kvtier.tiers.lmdb.index import Index
from kvtier.tiers.lmdb.lock import WriterState, boot_id
from kvtier.tiers.lmdb.upkeep import Upkeep
from kvtier.types import Status

TINY, LARGE, OTHER = b"\xaa" * 31 + b"1", b"\xaa" * 31 + b"2", b"\xbb" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with three namespaces: two epochs of one model, and another model."""
    store = StoreDriver(tmp_path / "s", durability="batch")
    for position, (fingerprint, name) in enumerate(((TINY, "tiny"), (LARGE, "large"), (OTHER, "tiny"))):
        store.namespace = store.namespaces.id_of(fingerprint, cbor2.dumps({"name": name}))
        store.write(range(10 * position, 10 * position + 4), 5000)
    store.close()
    return tmp_path / "s"


def kept(folder: Path) -> dict[bytes, int]:
    """Blocks by fingerprint, as the next cache that opens the store finds them; all of them readable."""
    store = StoreDriver(folder, durability="batch")
    found = {}
    for position, fingerprint in enumerate((TINY, LARGE, OTHER)):
        store.namespace = store.namespaces.id_of(fingerprint, b"")
        store.rescan(range(10 * position, 10 * position + 4))
        assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
        found[fingerprint] = len(store.kept)
    store.close()
    return found


def test_a_namespace_goes_and_the_others_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The wrong blocks would be lost, or the right ones be served on."""
    assert drop(folder, ["large"], yes=True, json_output=True) == 0
    row = {"fingerprint": LARGE.hex(), "name": "large", "blocks": 4, "payload_bytes": 20_000}
    assert json.loads(capsys.readouterr().out) == {"path": str(folder), "dropped": [row], "unknown_records": 0}
    assert kept(folder) == {TINY: 4, LARGE: 0, OTHER: 4}


def test_it_is_immediate(folder: Path) -> None:
    """A drop would rewrite a row for every block, and take minutes for a large store."""
    index = Index.open_readonly(folder / "index", live=False)
    before = dict(index.rows("blocks"))
    index.close()
    drop(folder, [OTHER.hex()], yes=True)
    index = Index.open_readonly(folder / "index", live=False)
    assert dict(index.rows("blocks")) == before
    assert index.count("namespaces") == 2
    index.close()


def test_several_at_once(folder: Path) -> None:
    """An operator would have to run it once a namespace, or the same one twice would be an error."""
    assert drop(folder, [TINY.hex(), "bbbb", TINY.hex()[:-1] + "1"], yes=True) == 0
    assert kept(folder) == {TINY: 0, LARGE: 4, OTHER: 0}


@pytest.mark.parametrize(
    ("word", "said"),
    [("tiny", "2 namespaces are meant"), ("aaaa", "2 namespaces are meant"), ("bbb", "no such"), ("", "no such")],
)
def test_a_doubtful_name_drops_nothing(folder: Path, word: str, said: str) -> None:
    """A slip of the pen would empty a store."""
    with pytest.raises(UsageError, match=said) as caught:
        drop(folder, [LARGE.hex(), word], yes=True)
    assert OTHER.hex() in str(caught.value) or word == "aaaa"
    assert kept(folder) == {TINY: 4, LARGE: 4, OTHER: 4}


def test_nobody_to_ask(folder: Path) -> None:
    """A script without --yes would wait for ever, or drop what nobody agreed to."""
    done = CliRunner().invoke(app, ["drop", str(folder), "--namespace", "large"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{LARGE.hex()} large: 4 blocks" in done.stderr
    assert "give --yes" in done.stderr
    assert kept(folder)[LARGE] == 4


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("yes\n", 0), ("n\n", 4), ("\n", 4), ("", 4)])
def test_the_answer_counts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    """Whoever thinks better of it would lose the blocks all the same."""
    for stream, text in (("stdin", answer), ("stderr", "")):
        terminal = io.StringIO(text)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, stream, terminal)
    with pytest.raises(UsageError, match=r"nothing was dropped$") if left else nullcontext():
        assert drop(folder, ["large"]) == 0
    assert terminal.getvalue().endswith(f"Drop this from {folder}? [y/N] ")
    assert kept(folder)[LARGE] == left


def test_a_store_in_use(folder: Path) -> None:
    """The cache that has it open would serve a namespace that is gone, or write beside us."""
    store = StoreDriver(folder, durability="batch")
    with pytest.raises(StoreLocked, match="this process has the store open"):
        drop(folder, ["large"], yes=True)
    lock = folder / "lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"pid": 4242}).ljust(255) + "\n")
    done = CliRunner().invoke(app, ["drop", str(folder), "--namespace", "large", "--yes", "--json"])
    assert done.exit_code == 2
    assert "process 4242 has the store open" in json.loads(done.stdout)["error"]
    store.close()
    assert kept(folder)[LARGE] == 4


@pytest.mark.parametrize("yes", [True, False])
def test_the_store_stays_as_clean_as_it_was(folder: Path, yes: bool) -> None:
    """A look or a drop would make a clean store seem torn, or hide that one was."""
    lock = folder / "lock"
    for clean in (True, False):
        state = json.loads(lock.read_text()) | {"clean": clean, "pid": 4242}
        lock.write_text(json.dumps(state).ljust(255) + "\n")
        before = state_of(folder)
        if yes:
            drop(folder, ["large" if clean else OTHER.hex()], yes=True)
        else:
            with pytest.raises(UsageError):
                drop(folder, ["large"])
        assert state_of(folder) == before


@pytest.mark.parametrize(
    ("clean", "durability", "meanwhile"),
    [(True, "none", "strict"), (True, "batch", "strict"), (False, "none", "none"), (False, "batch", "batch")],
)
def test_a_crash_in_between(
    folder: Path, monkeypatch: pytest.MonkeyPatch, clean: bool, durability: str, meanwhile: str
) -> None:
    """A store that was whole would be emptied after a power cut; or one that was not be believed."""
    lock = folder / "lock"
    state = json.loads(lock.read_text()) | {"clean": clean, "durability": durability, "boot_id": boot_id()}
    lock.write_text(json.dumps(state).ljust(255) + "\n")
    seen = []
    monkeypatch.setattr(Upkeep, "commit", lambda upkeep, change: seen.append(state_of(folder)))
    drop(folder, ["large"], yes=True)
    assert seen == [WriterState(os.getpid(), boot_id(), meanwhile, clean=False)]
    assert state_of(folder) == WriterState(**state)


def test_not_a_store(tmp_path: Path) -> None:
    """A typing error would make a lock file in somebody's folder."""
    (tmp_path / "x").mkdir()
    done = CliRunner().invoke(app, ["drop", str(tmp_path / "x"), "--namespace", "large", "--yes"])
    assert (done.exit_code, list((tmp_path / "x").iterdir())) == (2, [])


def test_a_description_that_says_nothing() -> None:
    """An engine with descriptions of its own could not drop anything."""
    names = {3: (b"\x01" * 32, b"\xff"), 4: (b"\x02" * 32, cbor2.dumps([1]))}
    assert chosen(names, ["0202", "0101"]) == [4, 3]


def test_a_name_that_steers_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle's description would paint over what it is asked about: "Drop this? [y/N]" of another line."""
    store = StoreDriver(tmp_path / "s", durability="batch")
    name = "\x1b[31mmine\x07\n" + "b" * 64 + ": 0 blocks\u202e"
    for fingerprint in (TINY, LARGE):
        store.namespace = store.namespaces.id_of(fingerprint, cbor2.dumps({"name": name}))
        store.write(range(1), 5000)
    store.close()
    plain = "\\x1b[31mmine\\x07\\n" + "b" * 64 + ": 0 blocks\\u202e"
    for stream in ("stdin", "stderr"):
        terminal = io.StringIO("n\n" if stream == "stdin" else "")
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, stream, terminal)
    with pytest.raises(UsageError, match="nothing was dropped"):
        drop(tmp_path / "s", [TINY.hex()])
    printed = terminal.getvalue()
    monkeypatch.undo()
    assert inspect(tmp_path / "s") == 0
    printed += capsys.readouterr().out
    assert f"{TINY.hex()} {plain}: 1 blocks" in printed
    assert f"name={plain}" in printed
    assert not {"\x1b", "\x07", "\u202e"} & set(printed)
    with pytest.raises(UsageError) as raised:
        drop(tmp_path / "s", [name], yes=True)
    assert plain in str(raised.value)
    assert not {"\x1b", "\x07", "\u202e"} & set(str(raised.value).split("meant by it")[1])
