"""The power goes at any moment: never a wrong byte, and what the durability mode promises is there.

Every write and every sync of a real writer, those of LMDB too, are recorded by a library that is loaded before it.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.tiers.lmdb import opening
from kvtier.types import Status
from tests.fault.power.disk import Disk, Note, notes
from tests.fault.power.writer import BATCH_ROW, options

RECORDER = Path(__file__).parent / "power" / "recorder.c"
LUCK = (0.0, 0.5, 0.5, 0.9, 1.0)
MAKING_CALLS = 45  # until a new store is open


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("recorder") / "recorder.so"
    command = ["gcc", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", str(RECORDER), "-o", str(library)]
    done = subprocess.run([*command, "-ldl", "-lpthread"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def recorded(recorder: Path, folder: Path, durability: str, payload: str, batches: int, seed: int) -> list[Note]:
    """What a writer did."""
    root = folder / "disk"
    root.mkdir()
    environment = os.environ | {
        "LD_PRELOAD": str(recorder),
        "KVTIER_RECORDED": str(root),
        "KVTIER_RECORD": str(folder / "record"),
    }
    command = [sys.executable, "-m", "tests.fault.power.writer", str(root), durability, payload]
    done = subprocess.run([*command, str(batches), str(seed)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(notes(folder / "record"))


class Journal:
    """What the writer had said when the power went."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()  # of every block that may be there
        self.kept: dict[int, list[int]] = {0: []}  # batch -> the blocks after it, oldest first
        self.leaving: dict[int, set[int]] = {}
        self.begun = self.done = self.closed = 0  # batches
        self.is_closed = False

    def add(self, line: dict[str, Any]) -> None:
        if "begun" in line:
            self.begun = line["begun"]
            self.numbers |= {*line["items"]}
            self.leaving[self.begun] = {*line["leaving"]}
            before = self.kept[self.begun - 1]
            self.kept[self.begun] = [number for number in before if number not in line["leaving"]] + line["items"]
        elif "done" in line:
            self.done = line["done"]
            assert self.kept[self.done] == line["kept"], "the writer is to have room"
        elif "closed" in line:
            self.closed = line["closed"]
        self.is_closed = "closed" in line

    def may_leave_after(self, batch: int) -> set[int]:
        """The blocks that later batches let go, whose slots may have been used again."""
        return {number for later in range(batch + 1, self.begun + 1) for number in self.leaving[later]}


class Found(NamedTuple):
    """What a store has after the power came back."""

    numbers: list[int]  # oldest write first
    batch: int
    statuses: dict[int, Status]
    findings: list[str]


def look(folder: Path, journal: Journal, durability: str, payload: str) -> Found:
    """Open an image and read all of it; fails if a byte is wrong, or if nothing can be stored any more."""
    store = StoreDriver(folder, **options(durability, payload))
    store.rescan(sorted(journal.numbers))
    number_of = {key_of(number, store.namespace): number for number in journal.numbers}
    numbers = [number_of[block.key] for block in store.tier.scan()]
    batch = int(dict(store.tier.sidecar()).get(BATCH_ROW, b"0"))
    statuses = dict(zip(numbers, store.read(numbers), strict=True))
    found = Found(numbers, batch, statuses, store.tier.findings)
    bad = [number for number, status in statuses.items() if status is not Status.DONE]
    assert store.write(range(10**6, 10**6 + 3), 5000, evict=bad) == [Status.DONE] * (3 + len(bad))
    assert store.tier.check() == []
    store.reopen()
    assert store.read(list(store.kept)) == [Status.DONE] * (len(numbers) - len(bad) + 3)
    store.close()
    return found


def judge(found: Found, journal: Journal, durability: str) -> None:
    """The promises of the mode, and that all of a commit is there or nothing."""
    bad = {number for number, status in found.statuses.items() if status is not Status.DONE}
    if durability == "none":
        assert not bad
        assert found.numbers == journal.kept[found.batch]
        assert found.batch in ({journal.closed} if journal.is_closed else {0, journal.done})
        return
    undone = 1 if durability == "batch" else 0
    assert max(journal.done - undone, journal.closed) <= found.batch <= journal.begun, "what was promised is lost"
    missing = set(journal.kept[found.batch]) - set(found.numbers)  # with the end of the file that a later batch cut off
    left = [number for number in journal.kept[found.batch] if number not in missing]
    assert found.numbers == left, "the store is not that of one commit"
    assert bad | missing <= (journal.may_leave_after(found.batch) if undone else set()), "an acknowledged block is lost"
    assert len(found.findings) == len(missing)


def explore(did: list[Note], root: Path, folder: Path, durability: str, payload: str, losses: int, seed: int) -> None:
    """Let the power go `losses` times, each time anew."""
    chance = random.Random(seed)
    making = chance.choices(range(MAKING_CALLS), k=losses // 4)
    states = [called + 1 for called, note in enumerate(did) if note.path.name == "lock"]  # opened and closed
    moments = sorted(making + 2 * states + chance.choices(range(len(did) + 1), k=losses - len(making)))
    disk, journal = Disk(root), Journal()
    applied = 0
    for moment in moments:
        for note in did[applied:moment]:
            if note.path.name != "journal":
                disk.apply(note)
            elif note.payload:
                journal.add(json.loads(note.payload))
        applied = moment
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        luck = chance.choice(LUCK)
        disk.image(folder, chance, luck)
        try:
            judge(look(folder / "s", journal, durability, payload), journal, durability)
        except Exception as error:
            error.add_note(f"after {moment} of {len(did)} calls, luck {luck}")
            raise


@pytest.mark.parametrize("payload", ["slab", "inline"])
@pytest.mark.parametrize("durability", ["none", "batch", "strict"])
@pytest.mark.parametrize(
    ("batches", "losses", "seeds"), [(16, 20, [0]), pytest.param(60, 200, range(4), marks=pytest.mark.soak)]
)
def test_power_loss(
    recorder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    durability: str,
    payload: str,
    batches: int,
    losses: int,
    seeds: Sequence[int],
) -> None:
    """A write that nobody waited for is needed to read what was promised, or half a commit is believed."""
    monkeypatch.setattr(opening, "boot_id", lambda: "the next boot")
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        did = recorded(recorder, folder, durability, payload, batches, seed)
        explore(did, folder / "disk", folder / "image", durability, payload, losses, seed)
        shutil.rmtree(folder)


def test_a_new_slab_that_is_not_empty_yet(recorder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that never had a block is called damaged for good: the page that tried O_DIRECT is there, and its cut
    is not."""
    monkeypatch.setattr(opening, "boot_id", lambda: "the next boot")
    did = recorded(recorder, tmp_path, "batch", "slab", 0, 0)
    cut = next((at for at, note in enumerate(did) if note.path.name == "slab" and note.kind == ord("c")), None)
    if cut is None:
        pytest.skip("this file system refuses O_DIRECT at once")
    synced = next(at for at, note in enumerate(did) if note.path.name == "slab" and note.kind == ord("s"))
    assert cut < synced
    for moment in range(cut, synced + 1):
        disk = Disk(tmp_path / "disk")
        for note in did[:cut] + did[cut + 1 : moment]:
            if note.path.name != "journal":
                disk.apply(note)
        shutil.rmtree(tmp_path / "image", ignore_errors=True)
        (tmp_path / "image").mkdir()
        disk.image(tmp_path / "image", random.Random(0), 1.0)
        look(tmp_path / "image" / "s", Journal(), "batch", "slab")
