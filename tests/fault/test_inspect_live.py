"""`kvtier inspect` beside a writer at full speed: nothing sound is called corrupt, nothing corrupt sound, and the
writer does not notice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.cli.cmd_inspect import inspect
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.tiers.lmdb.audit import Audit, Verdict
from kvtier.tiers.lmdb.folder import stamp_of
from kvtier.tiers.lmdb.foreign import Overtaken
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.types import PAGE_BYTES, Status, block_key_of

ROUNDS = 5

# Blocks of three size classes come and go, so that extents are lent to one after the other; now and then a whole
# namespace is dropped, whose records stay behind. The last line says how much was written, and what was refused.
CHURN = """
import json, pathlib, random, sys, threading
from kvtier.testing.stores import StoreDriver
from kvtier.types import Status

store = StoreDriver(pathlib.Path(sys.argv[1]), capacity_bytes=4 << 20, length_bytes_max=40_000)
chance = random.Random(1)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
number = batches = 0
refused = []
while not ended.is_set():
    if batches % 50 == 49:
        store.tier.drop(store.namespace)
        store.kept = {}
        store.namespace = store.namespaces.id_of(batches.to_bytes(32, "big"), b"")
    length = chance.choice((4096, 9000, 40_000))
    evict = sorted(store.kept)[: max(0, len(store.kept) - 40)]
    statuses = store.write(range(number, number + 8), length, evict)
    refused += [str(status) for status in statuses if status is not Status.DONE]
    number += 8
    batches += 1
    if batches == 20:
        print("ready", flush=True)
store.close()
print(json.dumps({"batches": batches, "refused": refused}))
"""

# The whole engine: a prompt after the other, each block demoted through tiers that hold a few of them only.
ENGINE = """
import json, sys, threading
import kvtier

config = kvtier.load_config({
    "model": {"name": "busy", "weights_epoch": "v1", "layers": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float32"},
    "tiers": [{"type": "gpu", "capacity": "1MiB"}, {"type": "host", "capacity": "2MiB"},
              {"type": "lmdb", "path": sys.argv[1], "capacity": "4MiB", "durability": "none"}],
})
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
turn = 0
with kvtier.open_sync(config) as cache:
    while not ended.is_set():
        keys = kvtier.hash_blocks([turn * 1000 + i for i in range(128)], config.model)
        lease = cache.reserve(cache.match(keys, owner="t"), blocks_total=8)
        for slot in lease.slots():
            for layer in (0, 1):
                kv = cache.kv(0, layer)
                kv["k"][slot] = kv["v"][slot] = turn
        cache.commit(lease, list(zip(lease.slots(), keys.groups[0])))
        cache.release(lease)
        turn += 1
        if turn % 20 == 0:
            cache.flush()
        if turn == 40:
            print("ready", flush=True)
    disk = cache.stats()["tiers"]["lmdb"]
print(json.dumps({"turns": turn, "disk": disk}, default=str))
"""


class Writer:
    """A process that writes to a store until it is told to end."""

    def __init__(self, code: str, folder: Path) -> None:
        command = [sys.executable, "-c", code, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def end(self) -> dict[str, Any]:
        """What it says about its life."""
        out, _ = self.process.communicate()
        assert self.process.returncode == 0
        told: dict[str, Any] = json.loads(out)
        return told


@contextmanager
def writing(code: str, folder: Path) -> Iterator[Writer]:
    writer = Writer(code, folder)
    try:
        yield writer
    finally:
        writer.process.kill()
        writer.process.wait()
        for pipe in (writer.process.stdin, writer.process.stdout):
            pipe.close()


def report(capsys: pytest.CaptureFixture[str], folder: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    code = inspect(folder, True, **options)
    return code, json.loads(capsys.readouterr().out)


def flip(folder: Path, offset: int) -> None:
    """Damage one byte on the device, past the cache of whoever reads it."""
    with (folder / "slab").open("r+b") as slab:
        slab.seek(offset)
        byte = slab.read(1)[0]
        slab.seek(offset)
        slab.write(bytes([byte ^ 0x10]))
        slab.flush()
        os.fsync(slab.fileno())


# ---------------------------------------------------------------- a writer at full speed


def test_churn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy store would be called corrupt (9 of 7,776 blocks in a trial), or the writer run out of index."""
    checked = moved = 0
    with writing(CHURN, tmp_path / "s") as writer:
        for _ in range(ROUNDS):
            code, found = report(capsys, tmp_path / "s", verify=True)
            verify = found["verify"]
            assert (code, found["live"], found["findings"], found["condemned"]) == (0, True, [], [])
            assert verify["blocks"] == verify["sound"] + verify["moved"] == found["blocks"]
            checked, moved = checked + verify["sound"], moved + verify["moved"]
        told = writer.end()
    assert told["refused"] == []
    assert told["batches"] > 20
    assert checked
    assert report(capsys, tmp_path / "s", verify=True)[0] == 0


def test_the_whole_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Looking at a store would cost the cache above it blocks."""
    with writing(ENGINE, tmp_path / "s") as writer:
        for _ in range(ROUNDS):
            code, found = report(capsys, tmp_path / "s", verify=True)
            assert (code, found["live"], found["condemned"]) == (0, True, [])
            assert [row["name"] for row in found["namespaces"]] == ["busy"]
        told = writer.end()
    assert told["disk"]["written_blocks"] > 0
    assert told["disk"]["write_failed"] == 0
    assert told["disk"]["corrupt"] == 0


# ---------------------------------------------------------------- moments, one by one

BESIDE = """
import pathlib, sys
from kvtier.testing.stores import StoreDriver

print("ready", flush=True)
for line in sys.stdin:
    verb, *words = line.split()
    numbers = [int(word) for word in words if word.isdecimal()]
    answer = ""
    if verb == "open":
        store = StoreDriver(pathlib.Path(words[0]), capacity_bytes=64 << 20)
    elif verb == "write":
        answer = {str(s) for s in store.write(range(*numbers[:2]), numbers[2])}
    elif verb == "evict":
        answer = {str(s) for s in store.write([], evict=range(*numbers))}
    elif verb == "drop":
        answer = store.tier.drop(store.namespace).status
        store.kept = {}
    elif verb == "name":
        store.namespace = store.namespaces.id_of(bytes([numbers[0]]) * 32, b"")
    elif verb == "rows":
        answer = {str(s) for n in range(numbers[0]) for s in store.write([n], 4096, **{f"row{n}": bytes(numbers[1])})}
    elif verb == "offset":
        answer = store.offset_of(numbers[0])
    elif verb == "reopen":
        store.reopen()
    elif verb == "close":
        store.close()
    print(answer, flush=True)
"""


class Beside:
    """A writer in another process that does one thing at a time."""

    def __init__(self) -> None:
        self.folder = Path()
        self.process = subprocess.Popen(
            [sys.executable, "-c", BESIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready"

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self._read()
        assert "FAILED" not in answer
        assert "NO_ROOM" not in answer
        return answer

    def open(self, folder: Path) -> None:
        self.folder = folder
        self.tell(f"open {folder}")

    def offset_of(self, number: int) -> int:
        return int(self.tell(f"offset {number}"))

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.endswith("\n"), "the writer has died"
        return line.strip()


@pytest.fixture(scope="module")
def other_process() -> Iterator[Beside]:
    other = Beside()
    yield other
    other.process.communicate()


@pytest.fixture
def beside(tmp_path: Path, other_process: Beside) -> Iterator[Beside]:
    """With a store open in `tmp_path/s`."""
    other_process.open(tmp_path / "s")
    yield other_process
    other_process.tell("close")


def verdicts_when(beside: Beside, meanwhile: Callable[[], None]) -> list[Verdict]:
    """Check all blocks; `meanwhile` happens once, between finding the first records and reading their payload."""
    reader = StoreReader.open(beside.folder)
    read, pending = reader.slab.read, [meanwhile]

    def overtaken(*args: Any, **kwargs: Any) -> None:
        if pending:
            pending.pop()()
        read(*args, **kwargs)

    reader.slab.read = overtaken
    try:
        return [audited.verdict for batch in Audit(reader).run(reader.records()) for audited in batch]
    finally:
        reader.close()


def test_real_damage_is_found(beside: Beside, capsys: pytest.CaptureFixture[str]) -> None:
    """A rotten block of a store in use would be taken for one that moved."""
    beside.tell("write 0 30 5000")
    offset = beside.offset_of(11)
    flip(beside.folder, offset + 4999)
    for options in ({"verify": True}, {"sample": 30}):
        code, found = report(capsys, beside.folder, **options)
        assert (code, found["live"], found["findings"]) == (1, True, [])
        assert (found["verify"]["sound"], found["verify"]["corrupt"], found["verify"]["moved"]) == (29, 1, 0)
        [bad] = found["condemned"]
        assert (bad["found_by"], bad["place"], bad["length_bytes"]) == ("inspect", offset // PAGE_BYTES, 5000)
        assert bad["namespace"] == b"f".hex() * 32


def test_evicted_while_reading(beside: Beside) -> None:
    """A block whose slot has a newer occupant would be condemned."""
    beside.tell("write 0 4 5000")

    def meanwhile() -> None:
        beside.tell("evict 1 3")
        beside.tell("write 10 12 5000")

    verdicts = verdicts_when(beside, meanwhile)
    assert verdicts == [Verdict.SOUND, Verdict.MOVED, Verdict.MOVED, Verdict.SOUND]


def test_a_list_that_is_out_of_date(beside: Beside) -> None:
    """On a busy store a slow look would list much and check little (2 of 5 blocks at 100 MiB/s)."""
    beside.tell("write 0 8 5000")
    reader = StoreReader.open(beside.folder)
    listed = list(reader.records())
    beside.tell("evict 0 3")
    beside.tell("write 10 12 5000")
    verdicts = [audited.verdict for batch in Audit(reader).run(listed) for audited in batch]
    assert sorted(verdict.value for verdict in verdicts) == ["moved"] + ["sound"] * 7
    flip(beside.folder, beside.offset_of(10))
    wrong = [audited for batch in Audit(reader).run(listed) for audited in batch if audited.verdict is Verdict.CORRUPT]
    assert len(wrong) == 1
    assert wrong[0].stored.record.key == block_key_of(key_of(10))
    reader.close()


def test_an_extent_lent_anew_while_reading(beside: Beside) -> None:
    """Blocks of another size class would be read for those that lay there before."""
    beside.tell("write 0 8 5000")

    def meanwhile() -> None:
        beside.tell("evict 0 8")
        beside.tell("write 10 14 16384")

    assert set(verdicts_when(beside, meanwhile)) == {Verdict.MOVED}


def test_dropped_while_reading(beside: Beside) -> None:
    """A drop leaves records behind whose slots are written again: they would look like damage."""
    beside.tell("write 0 4 5000")

    def meanwhile() -> None:
        beside.tell("drop")
        beside.tell("name 7")
        beside.tell("write 10 12 16384")

    assert Verdict.CORRUPT not in verdicts_when(beside, meanwhile)


def test_a_namespace_that_is_new_since(beside: Beside) -> None:
    """Blocks of a model that came while the list was read would be passed over, or be damage."""
    beside.tell("write 0 1200 4096")
    reader = StoreReader.open(beside.folder)
    records = reader.records()
    first = next(records)
    beside.tell("name 7")
    beside.tell("write 2000 2300 4096")
    listed = [first, *records]
    assert len(listed) == 1500
    assert {fingerprint for fingerprint, _ in reader.names.values()} == {b"f" * 32, b"\7" * 32}
    assert not reader.findings
    reader.close()


def test_the_index_grows_while_reading(beside: Beside) -> None:
    """LMDB refuses a reader whose map is smaller than the file: the store would be called damaged."""
    beside.tell("write 0 1200 4096")
    reader = StoreReader.open(beside.folder)
    records = reader.records()
    first = next(records)
    before = (beside.folder / "index" / "data.mdb").stat().st_size
    beside.tell(f"rows 14 {1 << 20}")
    assert (beside.folder / "index" / "data.mdb").stat().st_size > max(before, 10 << 20)
    assert len([first, *records]) >= 1200
    reader.close()


def test_the_writer_comes_and_goes(beside: Beside, capsys: pytest.CaptureFixture[str]) -> None:
    """A restart of the engine would end the look, or spoil it."""
    beside.tell("write 0 1200 4096")
    reader = StoreReader.open(beside.folder)
    records = reader.records()
    first = next(records)
    beside.tell("reopen")
    beside.tell("write 2000 2010 4096")
    verdicts = [audited.verdict for batch in Audit(reader).run([first, *records]) for audited in batch]
    assert set(verdicts) == {Verdict.SOUND}
    beside.tell("close")
    assert len(list(reader.records())) == 1210
    reader.close()
    code, found = report(capsys, beside.folder, verify=True)
    assert (code, found["live"], found["clean"], found["blocks"]) == (0, False, True, 1210)


def test_a_writer_that_comes_late(beside: Beside, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages that a writer reuses under a reader it does not know of would be read as an index."""
    beside.tell("write 0 1200 4096")
    beside.tell("close")
    reader = StoreReader.open(beside.folder)
    assert not reader.live
    records = reader.records()
    next(records)
    beside.open(beside.folder)
    with pytest.raises(Overtaken):
        list(records)
    reader.close()
    opened, stamp = StoreReader.open, stamp_of(beside.folder)

    def opened_too_early(folder: Path, live: bool = False) -> StoreReader:
        found = opened(folder, live)
        if not live:
            beside.tell("write 5000 5001 4096")
        return found

    with pytest.MonkeyPatch.context() as patch:  # as if it came after the last look at the lock
        patch.setattr("kvtier.tiers.lmdb.offline.stamp_of", lambda folder: stamp)
        patch.setattr("kvtier.tiers.lmdb.offline.has_writer", lambda lock: False)
        patch.setattr("kvtier.tiers.lmdb.foreign.stamp_of", lambda folder: stamp)
        patch.setattr(StoreReader, "open", opened_too_early)
        code, found = report(capsys, beside.folder, verify=True)
    assert (code, found["live"], found["blocks"]) == (0, True, 1201)


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_the_store_goes_away(tmp_path: Path, beside: Beside, what: str) -> None:
    """A look at files that nobody can reach any more would be taken for one at the store."""
    beside.tell("write 0 1200 4096")
    reader = StoreReader.open(beside.folder)
    records = reader.records()
    next(records)
    beside.folder.rename(tmp_path / "away")
    if what == "replaced":
        StoreDriver(tmp_path / "s").close()
    with pytest.raises(Exception, match="deleted or replaced while it was read"):
        list(records)
    reader.close()


# ---------------------------------------------------------------- the writer

KILLED = """
import pathlib, sys
from kvtier.tiers.lmdb.offline import StoreReader

reader = StoreReader.open(pathlib.Path(sys.argv[1]))
open_transaction = reader._index._index._env.begin()
print("inside", flush=True)
sys.stdin.read()
"""


def killed_inside(folder: Path) -> str:
    """The pid of a look that ended with SIGKILL in the middle of a transaction."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"inside\n"
        reader.send_signal(signal.SIGKILL)
    return str(reader.pid)


def test_killed_inside_a_transaction(tmp_path: Path) -> None:
    """A dead reader would pin the index's old pages, and the writer run out of them (after 46 batches in a trial)."""
    store = StoreDriver(tmp_path / "s")
    store.write(range(200), 4096)
    killed_inside(tmp_path / "s")
    for start in range(1000, 5000, 100):
        statuses = store.write(range(start, start + 100), 4096, evict=sorted(store.kept)[:100])
        assert set(statuses) == {Status.DONE}
    assert store.tier.check() == []
    store.close()


def test_readers_leave_the_table(beside: Beside, capsys: pytest.CaptureFixture[str]) -> None:
    """Looks that were killed would fill LMDB's table of readers (126), and the next one find no place."""
    beside.tell("write 0 10 4096")
    pid = killed_inside(beside.folder)
    assert report(capsys, beside.folder, verify=True)[0] == 0
    env = lmdb.open(str(beside.folder / "index"), readonly=True, max_dbs=5)
    assert pid not in env.readers()
    env.close()


def test_no_transaction_during_payload(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look at a slow disk would stop the reuse of index pages for as long as it lasts."""
    beside.tell("write 0 50 4096")
    reader = StoreReader.open(beside.folder)
    env = reader._index._index._env

    def open_transactions() -> list[str]:
        lines = [line.split() for line in env.readers().splitlines()]
        return [words[2] for words in lines if words[0] == str(os.getpid()) and words[2] != "-"]

    with env.begin():
        assert len(open_transactions()) == 1
    read, during = reader.slab.file.read, []

    def watched(*args: Any) -> int:
        during.append(open_transactions())
        return read(*args)

    monkeypatch.setattr(reader.slab.file, "read", watched)
    verdicts = [audited.verdict for batch in Audit(reader).run(reader.records()) for audited in batch]
    assert verdicts == [Verdict.SOUND] * 50
    assert during
    assert not any(during)
    reader.close()
