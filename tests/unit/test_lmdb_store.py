"""The store: who may open it, how much it takes, what it forgets and what it keeps."""

import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli.cmd_fsck import fsck
from kvtier.cli.cmd_gc import gc
from kvtier.cli.cmd_inspect import inspect
from kvtier.errors import ClosedError, ConfigError, StoreError, StoreFormatError, StoreLocked
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of, payload_of, slot_buffer
from kvtier.tiers.lmdb.lock import StoreLock, WriterState
from kvtier.types import DONE, ReadItem, Status, WriteBatch, WriteItem

DONE_STATUS = Status.DONE


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


def test_second_writer_is_refused(tmp_path: Path) -> None:
    """Two writers would overwrite each other's slots."""
    first = StoreDriver(tmp_path / "s")
    with pytest.raises(StoreLocked, match=r"this process has the store open.*path of its own"):
        StoreDriver(tmp_path / "s")
    code = f"""
import pathlib, sys
from kvtier.testing.stores import StoreDriver
from kvtier.errors import StoreLocked
try:
    StoreDriver(pathlib.Path({str(tmp_path / "s")!r}))
except StoreLocked as error:
    sys.exit(0 if "process {os.getpid()} has" in str(error) else str(error))
sys.exit("opened")
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    first.close()
    StoreDriver(tmp_path / "s").close()


def test_nobody_else_may_look(tmp_path: Path) -> None:
    """Other users of the machine could read what was prompted."""
    StoreDriver(tmp_path / "s").close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]}
    assert modes.pop("s") == 0o700
    assert modes.pop("index") == 0o700
    assert set(modes.values()) == {0o600}


def test_fork_is_refused(tmp_path: Path) -> None:
    """A forked child could read and write through its parent's handles, and keep the parent's lock."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    code = """
import os, pathlib, sys, warnings
warnings.simplefilter("ignore")
from kvtier.testing.stores import StoreDriver
from kvtier.errors import ClosedError
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import WriteBatch
store = StoreDriver(pathlib.Path(sys.argv[1]))
store.write([1])
if os.fork() == 0:
    refused = 0
    tier = store.tier
    batch = WriteBatch()
    verbs = [(store.read, [1]), (tier.write, batch), (tier.drop, 0), (tier.room, 1), (LmdbTier.scan, tier)]
    for verb, argument in verbs:
        try:
            verb(argument)
        except ClosedError:
            refused += 1
    tier.close()
    os._exit(refused)
code = os.waitstatus_to_exitcode(os.wait()[1])
store.read([1])
store.reopen()
sys.exit(code + len(store.kept))
"""
    store.close()
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")]).returncode == 5 + 1


def test_closed_verbs(tmp_path: Path) -> None:
    """A verb on a closed store would crash in LMDB."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    store.close()
    for verb in (lambda: store.read([1]), lambda: store.write([2]), store.tier.scan, lambda: store.tier.drop(0)):
        with pytest.raises(ClosedError, match="closed"):
            verb()


@pytest.mark.parametrize("length", [4096, 5000, 16_384])
def test_capacity_is_never_exceeded(tmp_path: Path, length: int) -> None:
    """The disk would fill up and the node be evicted (LMCache#4664)."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=3 << 20)
    number = refused = 0
    for _ in range(60):
        evict = sorted(store.kept)[:20] if refused else []
        refused = store.write(range(number, number + 40), length, evict, note=os.urandom(2000)).count(Status.NO_ROOM)
        number += 40
        assert disk_bytes(tmp_path / "s") <= 3 << 20
        assert store.tier.check() == []
    assert store.tier.used_bytes() > (3 << 20) // 3
    store.reopen()
    assert disk_bytes(tmp_path / "s") <= 3 << 20
    assert set(store.read(sorted(store.kept))) == {DONE_STATUS}
    store.close()


def test_a_full_index_can_be_emptied(tmp_path: Path) -> None:
    """Sidecar rows that fill the index would leave a store in which nothing can be evicted any more."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=2 << 20)
    assert set(store.write(range(30), 4096)) == {DONE_STATUS}
    statuses = [DONE_STATUS]
    for row in range(200):
        statuses = store.write([100 + row], 1, **{f"row{row}": os.urandom(40_000)})
        if statuses[-1] is not DONE_STATUS:
            break
    assert statuses[-1] is Status.NO_ROOM
    assert disk_bytes(tmp_path / "s") <= 2 << 20
    numbers = sorted(store.kept)
    assert set(store.write([], evict=numbers)) == {DONE_STATUS}
    assert disk_bytes(tmp_path / "s") <= 2 << 20
    assert store.tier.used_bytes() == 0
    store.close()


def test_a_sidecar_without_room_costs_no_block(tmp_path: Path) -> None:
    """The order of blocks would be worth more than the blocks."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=2 << 20)
    assert store.write(range(30), 4096, note=os.urandom(3 << 20)) == [DONE_STATUS] * 30 + [Status.NO_ROOM]
    assert list(store.tier.sidecar()) == []
    assert set(store.read(range(30))) == {DONE_STATUS}
    assert store.write([30], 4096, [0], note=b"small") == [DONE_STATUS] * 3
    store.close()


def test_the_index_grows_into_unlent_extents(tmp_path: Path) -> None:
    """Many small rows would end as NO_ROOM although the store is nearly empty."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=8 << 20)
    before = store.tier.traits.capacity_bytes
    for row in range(40):
        assert store.write([row], 1, **{f"row{row}": os.urandom(60_000)}) == [DONE_STATUS] * 2
    assert store.tier.traits.capacity_bytes < before
    assert len(list(store.tier.sidecar())) == 40
    store.close()


def test_size_classes_share_extents(tmp_path: Path) -> None:
    """A store filled with one size would have no room for another, even after all of the first left."""
    store = StoreDriver(tmp_path / "s")
    store.write(range(2000), 4096)
    assert store.tier.room(16_384) == 0
    store.write([], evict=sorted(store.kept))
    room = store.tier.room(16_384)
    assert room > 100
    assert set(store.write(range(room), 16_384)) == {DONE_STATUS}
    assert set(store.read(range(room))) == {DONE_STATUS}
    store.close()


def test_emptied_extents_give_disk_back(tmp_path: Path) -> None:
    """An evicted store would still occupy the disk."""
    store = StoreDriver(tmp_path / "s")
    store.write(range(150), 16_384)
    full = disk_bytes(tmp_path / "s" / "slab")
    extents = {store.tier.neighbours(stored.place) for _, stored in store.kept.values()}
    leaving = [n for n, (_, stored) in store.kept.items() if store.tier.neighbours(stored.place) == min(extents)]
    store.write([], evict=leaving)
    assert disk_bytes(tmp_path / "s" / "slab") <= full - len(leaving) * 16_384
    assert set(store.read(sorted(store.kept))) == {DONE_STATUS}
    store.close()


def test_smaller_capacity_evicts_oldest_extents(tmp_path: Path) -> None:
    """A store opened with less capacity would keep its old size."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=8 << 20)
    store.write(range(300), 16_384)
    kept = set(store.kept)
    store.reopen(capacity_bytes=4 << 20)
    assert disk_bytes(tmp_path / "s") <= 4 << 20
    assert store.kept
    assert set(store.kept) < kept
    assert min(store.kept) > min(kept - set(store.kept)), "the oldest leave"
    assert set(store.kept) == set(range(min(store.kept), 300))
    assert set(store.read(sorted(store.kept))) == {DONE_STATUS}
    assert store.tier.check() == []
    assert store.tier.findings == []
    store.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"capacity_bytes": 1000}, "1kB, less 512KiB of index and 320.01KiB of overhead, leave nothing"),
        ({"durability": "bach"}, "Did you mean 'batch'"),
        ({"length_bytes_max": 0}, "blocks of 0 bytes"),
        ({"io_threads": 0}, "0 I/O threads"),
        ({"min_free_bytes": -1}, "min_free"),
    ],
)
def test_bad_settings(tmp_path: Path, options: dict[str, object], problem: str) -> None:
    """A configuration that cannot work would fail later, or leave a folder behind."""
    with pytest.raises(ConfigError, match=problem):
        StoreDriver(tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


def test_larger_blocks_than_extents(tmp_path: Path) -> None:
    """Reopened for larger blocks, a store would refuse each of them in silence."""
    StoreDriver(tmp_path / "s").close()
    with pytest.raises(ConfigError, match="extents of 512KiB"):
        StoreDriver(tmp_path / "s", capacity_bytes=64 << 20, length_bytes_max=600_000)


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    """A mistyped path would have its files mixed with ours."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(StoreFormatError, match="is not a store"):
        StoreDriver(tmp_path / "home")
    with pytest.raises(StoreFormatError, match="is not a store"):
        StoreDriver(tmp_path / "home" / "thesis.tex")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        StoreDriver(tmp_path / "file" / "deeper")


def test_two_namespaces(tmp_path: Path) -> None:
    """Models with equal hashes would get each other's blocks."""
    one = StoreDriver(tmp_path / "s", fingerprint=b"1" * 32)
    one.write([1, 2])
    one.close()
    two = StoreDriver(tmp_path / "s", fingerprint=b"2" * 32)
    two.rescan([1, 2])
    assert two.kept == {}
    two.write([1])
    assert two.read([1]) == [DONE_STATUS]
    first = two.namespaces.find(b"1" * 32)
    assert first is not None
    foreign = {block.key for block in two.tier.scan()} - {key_of(1, two.namespace)}
    assert foreign == {key_of(1, first), key_of(2, first)}
    assert two.tier.drop(first) == DONE
    assert [block.key for block in two.tier.scan()] == [key_of(1, two.namespace)]
    two.close()


def test_drop(tmp_path: Path) -> None:
    """After new weights old blocks would still be served, or their space be lost (vLLM#42125)."""
    store = StoreDriver(tmp_path / "s")
    store.write(range(150), 16_384)
    full = disk_bytes(tmp_path / "s")
    assert store.tier.drop(store.namespace) == DONE
    assert store.tier.drop(store.namespace) == DONE
    assert set(store.read(range(150))) == {Status.MISSING}
    assert store.tier.used_bytes() == 0
    assert disk_bytes(tmp_path / "s") < full // 4
    assert store.tier.check() == []
    store.write([7], 5000)
    assert store.read([7]) == [DONE_STATUS]
    kept = dict(store.kept)
    store.reopen()
    assert store.kept == {7: kept[7]}
    assert store.tier.findings == []
    store.close()


def test_generations_only_grow(tmp_path: Path) -> None:
    """A reader from before a restart could be served a newer block that got its old generation."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    newest = store.kept[1][1].generation
    store.write([], evict=[1])
    store.reopen()
    store.write([2])
    assert store.kept[2][1].generation > newest
    store.close()


def test_unaligned_and_short_views(tmp_path: Path) -> None:
    """O_DIRECT would refuse a caller's memory with EINVAL."""
    store = StoreDriver(tmp_path / "s")
    memory = slot_buffer(65_536)
    source = memory[64 : 64 + 5000]
    source[:] = payload_of(1, 5000)
    [stored] = store.tier.write(WriteBatch([WriteItem(key_of(1), 5000, source)]))
    assert stored.done
    into = memory[20_001:25_001]
    for view, status in ((into, DONE_STATUS), (into[:4999], Status.FAILED), (into.toreadonly(), Status.FAILED)):
        outcome = store.tier.read([ReadItem(key_of(1), stored.place, stored.generation, 5000, view)])[0]
        assert outcome.status is status
    assert bytes(into) == payload_of(1, 5000)
    store.close()


def test_items_that_cannot_be_kept(tmp_path: Path) -> None:
    """A bad item would be stored under a name that nobody can ask for, or raise in the executor."""
    store = StoreDriver(tmp_path / "s")
    view = slot_buffer(32_768)
    bad = [
        WriteItem(key_of(1), 0, view),
        WriteItem(key_of(1), 16_385, view),
        WriteItem(key_of(1), 5000, view[:4999]),
        WriteItem(key_of(1, hash_bytes=65), 5000, view),
        WriteItem(key_of(1, hash_bytes=0), 5000, view),
        WriteItem(key_of(1, namespace=9), 5000, view),
    ]
    assert {outcome.status for outcome in store.tier.write(WriteBatch(bad))} == {Status.FAILED}
    assert store.tier.used_bytes() == 0
    assert store.tier.check() == []
    store.close()


def test_the_same_key_twice(tmp_path: Path) -> None:
    """After a restart one key would name two blocks, and the older one's slot be lost."""
    store = StoreDriver(tmp_path / "s")
    store.write([1], 5000)
    store.write([1], 6000)
    newest = store.kept[1]
    store.reopen()
    assert store.kept == {1: newest}
    assert store.tier.used_bytes() == 8192
    assert store.tier.check() == []
    store.close()


def test_sidecar(tmp_path: Path) -> None:
    """Policies would start from nothing after a restart."""
    store = StoreDriver(tmp_path / "s")
    store.write([1], a=b"1", b=b"2")
    store.tier.write(WriteBatch(sidecar={b"a": None, b"c": b"3"}))
    store.reopen()
    assert list(store.tier.sidecar()) == [(b"b", b"2"), (b"c", b"3")]
    store.close()


def after_reboot(path: Path, durability: str, clean: bool) -> None:
    """Make the store look as if its last writer had run in an earlier boot of the machine."""
    lock = StoreLock.acquire(path)
    lock.write_state(WriterState(1, "an earlier boot", durability, clean))
    lock.release()


@pytest.mark.parametrize(
    ("durability", "clean", "kept"),
    [("none", False, False), ("none", True, True), ("batch", False, True), ("strict", False, True)],
)
def test_after_a_reboot(tmp_path: Path, durability: str, clean: bool, kept: bool) -> None:
    """Pages that never reached the disk would be believed; or a store that is sound be thrown away."""
    store = StoreDriver(tmp_path / "s", durability=durability)
    store.write([1, 2])
    store.close()
    after_reboot(tmp_path / "s", durability, clean)
    store.tier = store._open()
    store.rescan([1, 2])
    assert set(store.kept) == ({1, 2} if kept else set())
    assert store.write([3]) == [DONE_STATUS]
    store.close()


def test_a_lost_lock_file(tmp_path: Path) -> None:
    """Without the writer's state an unsynced store would be believed, and a synced one thrown away."""
    for durability, kept in (("none", set()), ("batch", {1})):
        store = StoreDriver(tmp_path / durability, durability=durability)
        store.write([1])
        store.close()
        (tmp_path / durability / "lock").write_bytes(b"\0garbage")
        store.tier = store._open()
        store.rescan([1])
        assert set(store.kept) == kept
        store.close()


@pytest.mark.parametrize("payload", ["slab", "inline"])
@pytest.mark.parametrize(("durability", "kept"), [("none", False), ("batch", True), ("strict", True)])
def test_an_emptied_lock_file(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    payload: str,
    durability: str,
    kept: bool,
) -> None:
    """A full store would be taken for one that was never finished, and be deleted without a word."""
    options = {"payload": payload, "durability": durability, "capacity_bytes": 10 << 20}
    store = StoreDriver(tmp_path / "s", **options)
    store.write(range(20))
    store.close()
    (tmp_path / "s" / "lock").write_bytes(b"")
    for look in (fsck, inspect):
        assert look(tmp_path / "s") == 1
        told = "".join(capsys.readouterr())
        assert "lock" in told
        assert "does not say how the last writer left" in told
    with caplog.at_level(logging.WARNING):
        store.tier = store._open()
    assert ("starting with an empty store" in caplog.text) is not kept
    store.rescan(range(20))
    assert len(store.kept) == 20 * kept
    assert set(store.read(sorted(store.kept))) <= {DONE_STATUS}
    assert store.tier.check() == []
    store.close()


def test_a_repair_lets_the_lock_file_speak_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every look at a store whose blocks are all sound would end in damage, until a cache opens it."""
    store = StoreDriver(tmp_path / "s", durability="batch")
    store.write(range(20))
    store.close()
    (tmp_path / "s" / "lock").write_bytes(b"")
    assert gc(tmp_path / "s") == 0
    assert fsck(tmp_path / "s") == 1, "gc leaves it as it is"
    assert fsck(tmp_path / "s", mend=True) == 1
    assert "repaired: 1" in capsys.readouterr().out
    assert fsck(tmp_path / "s") == 0
    store.tier = store._open()
    store.rescan(range(20))
    assert len(store.kept) == 20
    store.close()


def test_a_copied_store_opens(tmp_path: Path) -> None:
    """A store could not be moved to another machine or restored from a copy."""
    store = StoreDriver(tmp_path / "s")
    store.write(range(5))
    store.close()
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    copy = StoreDriver(tmp_path / "copy")
    copy.rescan(range(5))
    assert copy.read(range(5)) == [DONE_STATUS] * 5
    copy.close()


def test_a_dropped_block_stays_nobodys(tmp_path: Path) -> None:
    """A block of before a drop would be served, or its slot freed twice, once its namespace is stored anew."""
    store = StoreDriver(tmp_path / "s")
    store.write([1, 2])
    assert store.tier.drop(store.namespace) is DONE
    store.write([3])  # over one of them; the other's record and bytes are still there
    assert store.read([1, 2, 3]) == [Status.MISSING, Status.MISSING, Status.DONE]
    assert store.write([], evict=[1, 2]) == [Status.MISSING] * 2
    assert store.tier.check() == []
    store.close()


def test_a_block_leaves_once(tmp_path: Path) -> None:
    """A block that is evicted twice in one batch would count as two."""
    store = StoreDriver(tmp_path / "s")
    store.write([1, 2])
    item = store.evict_item(1)
    ends = store.tier.write(WriteBatch(evict=[item, item]))
    assert [end.status for end in ends] == [Status.DONE, Status.MISSING]
    assert store.tier.check() == []
    store.close()
