"""A verb that is killed while it changes a store leaves it as it was, or further on, and never worse."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import pytest

from kvtier.cli.cmd_drop import drop
from kvtier.cli.cmd_fsck import fsck
from kvtier.cli.cmd_gc import gc
from kvtier.errors import UsageError
from kvtier.testing.fork import in_child
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb import sweep, upkeep
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.folder import state_of
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.lock import StoreLock
from kvtier.types import Status

ONE, TWO = b"1" * 32, b"2" * 32
STEPS = [(Index, "commit"), (Index, "copy_to"), (Index, "close"), (BlockFile, "punch"), (BlockFile, "cut")]
STEPS += [(StoreLock, "write_state"), (Path, "replace"), (InlineSlab, "copy_to"), (InlineSlab, "close")]
INLINE: dict[str, Any] = {"payload": "inline", "capacity_bytes": 10 << 20}


def make(folder: Path, **options: Any) -> None:
    """A closed store: 32 blocks that stay, and 32 of another namespace."""
    store = StoreDriver(folder, ONE, durability="batch", **options)
    store.write(range(32), 16_384)
    store.namespace = store.namespaces.id_of(TWO, cbor2.dumps({"name": "two"}))
    store.write(range(100, 132), 16_384)
    store.close()


def dropped(folder: Path) -> None:
    index = Index.open(folder / "index", "batch", 1 << 20)
    index.commit(Change(namespaces={(2).to_bytes(4, "big"): None}))
    index.close()


def spoilt(folder: Path) -> None:
    with (folder / "slab").open("r+b") as slab:
        slab.seek(40 * 16_384)
        slab.write(b"?")


def die_at(step: int) -> None:
    """Kill this process at its n-th step on the disk."""
    left = [step]

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for owner, name in STEPS:
        setattr(owner, name, dying(getattr(owner, name)))
    sweep.ROWS_AT_ONCE, sweep.COMPACT_BYTES_MIN, sweep.COMPACT_SHARE = 10, -1 << 30, -1


def was_killed(step: int, verb: Callable[[Path], int], folder: Path) -> bool:
    """Run the verb in a process of its own, which dies at a step if there are so many."""

    def body() -> int:
        die_at(step)
        try:
            return verb(folder)
        except UsageError:  # it was dropped by the one that was killed
            return 0

    code = in_child(body)
    assert code in (0, 1, -signal.SIGKILL)
    return code == -signal.SIGKILL


def served(folder: Path, **options: Any) -> int:
    store = StoreDriver(folder, ONE, durability="batch", **options)
    store.rescan(range(32))
    assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
    assert (store.tier.check(), store.tier.findings) == ([], [])
    store.close()
    return len(store.kept)


VERBS: dict[str, tuple[Callable[[Path], None], Callable[[Path], int], int]] = {
    "drop": (lambda folder: None, lambda folder: drop(folder, ["two"], yes=True), 4),
    "gc": (dropped, gc, 10),
    "fsck": (spoilt, lambda folder: fsck(folder, mend=True), 4),
}


@pytest.mark.parametrize(
    ("verb", "options"), [("drop", {}), ("gc", {}), ("fsck", {}), ("gc", INLINE)], ids=["drop", "gc", "fsck", "inline"]
)
def test_a_killed_verb(tmp_path: Path, verb: str, options: dict[str, Any]) -> None:
    """An operator's terminal that closes would cost the store."""
    prepare, run, steps_min = VERBS[verb]
    make(tmp_path / "kept", **options)
    prepare(tmp_path / "kept")
    step = 0
    killed = True
    while killed:
        step += 1
        shutil.copytree(tmp_path / "kept", tmp_path / "s")
        killed = was_killed(step, run, tmp_path / "s")
        if step % 2:  # else whoever opens it next has to
            assert not was_killed(0, run, tmp_path / "s"), "the next run has no trouble"
            assert (fsck(tmp_path / "s"), served(tmp_path / "s", **options)) == (0, 32)
        else:
            assert served(tmp_path / "s", **options) == 32
        for table in ("index", "payload") if options else ("index",):
            assert sorted(path.name for path in (tmp_path / "s" / table).iterdir()) == ["data.mdb", "lock.mdb"]
        shutil.rmtree(tmp_path / "s")
    assert step > steps_min


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_at_work_says_so(tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that is killed leaves a lock that says that all was closed well, and by whom it was not."""
    prepare, run, _ = VERBS[verb]
    make(tmp_path / "s")
    prepare(tmp_path / "s")
    before, seen = state_of(tmp_path / "s"), []
    commit = Index.commit

    def look(index: Index, change: Change) -> None:
        seen.append(state_of(tmp_path / "s"))
        commit(index, change)

    monkeypatch.setattr(Index, "commit", look)
    run(tmp_path / "s")
    assert seen
    assert {(state.pid, state.clean, state.durability) for state in seen} == {(os.getpid(), False, "strict")}
    assert state_of(tmp_path / "s") == before


@pytest.mark.parametrize("options", [{}, INLINE], ids=["slab", "inline"])
def test_a_file_is_on_the_disk_before_it_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A power loss after `gc` leaves the name of the index, and an empty file behind it."""
    make(tmp_path / "s", **options)
    dropped(tmp_path / "s")
    done: list[tuple[str, int]] = []
    fsync, replace_, sync = os.fsync, Path.replace, upkeep.sync_names

    def synced(fd: int) -> None:
        done.append(("sync", os.fstat(fd).st_ino))
        fsync(fd)

    def named(path: Path, target: Path) -> Path:
        done.append(("name", path.stat().st_ino))
        return replace_(path, target)

    def names(folder: Path) -> None:
        done.append(("names", 0))
        sync(folder)

    monkeypatch.setattr(sweep, "COMPACT_BYTES_MIN", -1 << 30)
    monkeypatch.setattr(sweep, "COMPACT_SHARE", -1)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", named)
    monkeypatch.setattr(upkeep, "sync_names", names)
    assert gc(tmp_path / "s") == 0
    given = [at for at, (what, _) in enumerate(done) if what == "name"]
    assert len(given) == 1 + bool(options)
    for at in given:
        assert ("sync", done[at][1]) in done[:at]
        assert done[at + 1] == ("names", 0)
