"""`kvtier export` and `kvtier import`: what one store has, another one has afterwards, as far as it fits."""

import asyncio
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import pytest
from typer.testing import CliRunner

from kvtier.cli import cmd_export
from kvtier.cli.cmd_export import export
from kvtier.cli.cmd_import import import_
from kvtier.cli.main import app
from kvtier.cli.store import importing
from kvtier.engine.sidecar import WEAR_KEY
from kvtier.engine.wear import read_row
from kvtier.errors import BundleError, ConfigError, StoreLocked, UsageError
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.tiers.bundle import writing
from kvtier.tiers.bundle.manifest import encode_manifest, part_name
from kvtier.tiers.bundle.reading import read_manifest
from kvtier.tiers.lmdb.foreign import Overtaken
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.tiers.lmdb.outgoing import OutgoingBlocks
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import Status, WriteBatch, page_aligned

ONE, TWO = b"1" * 32, b"2" * 32


def make(folder: Path) -> None:
    """A closed store: blocks 0 to 19 of one namespace, then 20 to 24, smaller, of another, called two."""
    store = StoreDriver(folder, ONE, durability="batch")
    store.write(range(10), 5000)
    store.write(range(10, 20), 5000)
    store.namespace = store.namespaces.id_of(TWO, cbor2.dumps({"name": "two"}))
    store.write(range(20, 25), 4000)
    store.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make(tmp_path / "s")
    return tmp_path / "s"


@pytest.fixture
def bundle(store: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "PART_BYTES", 20_000)
        patch.setattr("kvtier.tiers.lmdb.outgoing.BATCH_BLOCKS", 3)
        assert export(store, store.with_name("b")) == 0
    return store.with_name("b")


def told(capsys: pytest.CaptureFixture[str], verb: Callable[..., int], *args: Path, **options: Any) -> dict[str, Any]:
    capsys.readouterr()
    code = verb(*args, json_output=True, **options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found | {"code": code}


def served(folder: Path, **options: Any) -> list[int]:
    """The blocks of a store in the order of writing, all of them readable, with the bytes of their numbers."""
    store = StoreDriver(folder, ONE, **({"durability": "batch"} | options))
    two = store.namespaces.id_of(TWO, b"")
    names = {key_of(number, store.namespace): number for number in range(20)}
    names |= {key_of(number, two): number for number in range(20, 30)}
    order = [names[block.key] for block in store.tier.scan()]
    for namespace, numbers in ((store.namespace, range(20)), (two, range(20, 30))):
        store.namespace = namespace
        store.rescan(numbers)
        assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
    assert (store.tier.check(), store.tier.findings) == ([], [])
    store.close()
    return order


# ---------------------------------------------------------------- there and back


def test_there_and_back(store: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine that is replaced would begin with a cold cache, or with wrong bytes, or forget what is new."""
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.name != "lock.mdb"}
    assert export(store, store.with_name("c")) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    found = told(capsys, import_, store.with_name("t"), bundle, capacity="4MiB")
    counts = {"imported": 25, "present": 0, "left_out": 0, "no_room": 0, "failed": 0}
    assert found.items() >= ({"code": 0, "blocks": 25} | counts).items()
    assert served(store.with_name("t")) == served(store) == list(range(25))
    found = told(capsys, import_, store.with_name("t"), bundle)
    assert (found["imported"], found["present"]) == (0, 25)
    reader = StoreReader.open(store.with_name("t"))
    assert set(reader.namespaces().values()) == {(ONE, b""), (TWO, cbor2.dumps({"name": "two"}))}
    reader.close()


def test_one_namespace(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model could not be moved without all the others of its store."""
    found = told(capsys, export, store, store.with_name("b"), namespaces=["two"])
    assert (found["blocks"], found["payload_bytes"], found["code"]) == (5, 20_000, 0)
    told(capsys, import_, store.with_name("t"), store.with_name("b"), capacity="4MiB")
    assert served(store.with_name("t")) == list(range(20, 25))
    with pytest.raises(UsageError, match="no such namespace"):
        export(store, store.with_name("c"), namespaces=["three"])
    assert not store.with_name("c").exists()


def test_through_the_command_line(store: Path, tmp_path: Path) -> None:
    """The verbs would work from Python only, or a YAML file not name its store."""
    yaml = tmp_path / "kvtier.yaml"
    model = "model: {name: x, weights_epoch: a, layers: 1, kv_heads: 1, head_dim: 64, dtype: float32}\n"
    yaml.write_text(model + "tiers: [{type: gpu, capacity: 1MiB}, {type: lmdb, path: ./t, capacity: 16MiB}]")
    out = str(tmp_path / "b")
    done = CliRunner().invoke(app, ["export", str(store), out])
    assert (done.exit_code, f"{out}: 25 blocks, 117.2 KiB" in done.stdout) == (0, True)
    digest = done.stdout.split("digest ")[1].strip()
    done = CliRunner().invoke(app, ["import", str(yaml), out, "--digest", "00" * 32, "--json"])
    assert (done.exit_code, "another one" in json.loads(done.stdout)["error"]) == (2, True)
    done = CliRunner().invoke(app, ["import", str(yaml), out, "--digest", digest.upper()])
    assert (done.exit_code, "25 blocks were imported" in done.stdout) == (0, True)
    reader = StoreReader.open(tmp_path / "t")
    assert reader.header.capacity_bytes == 16 << 20
    reader.close()
    done = CliRunner().invoke(app, ["import", str(yaml), out, "--capacity", "1GiB"])
    assert (done.exit_code, "leave --capacity" in done.stderr) == (2, True)


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store without blocks would be an error, or a store be made for nothing."""
    StoreDriver(tmp_path / "s", durability="batch").close()
    assert told(capsys, export, tmp_path / "s", tmp_path / "b")["blocks"] == 0
    assert told(capsys, import_, tmp_path / "t", tmp_path / "b", capacity="4MiB")["imported"] == 0
    assert not (tmp_path / "t").exists()


# ---------------------------------------------------------------- export


def test_an_interrupted_export_goes_on(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large store would have to be exported without a break; and what came meanwhile would be left out."""
    monkeypatch.setattr(writing, "PART_BYTES", 20_000)
    monkeypatch.setattr("kvtier.tiers.lmdb.outgoing.BATCH_BLOCKS", 3)
    real, calls = OutgoingBlocks._read, []

    def interrupted(blocks: OutgoingBlocks, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(blocks, batch)

    monkeypatch.setattr(OutgoingBlocks, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(store, store.with_name("b"))
    with pytest.raises(BundleError, match="its export was interrupted"):
        import_(store.with_name("t"), store.with_name("b"), capacity="4MiB")
    assert not store.with_name("t").exists()
    more = StoreDriver(store, TWO, durability="batch")
    more.write(range(25, 28), 4000)
    more.close()
    found = told(capsys, export, store, store.with_name("b"))
    assert (found["blocks"], found["blocks_before"]) == (28, 12)
    told(capsys, import_, store.with_name("t"), store.with_name("b"), capacity="4MiB")
    assert served(store.with_name("t")) == list(range(28))


def test_bad_blocks_stay_behind(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rot would be carried to another machine, with a checksum that makes it right."""
    with (store / "slab").open("r+b") as slab:
        slab.seek(3 * 8192 + 100)
        slab.write(b"?")
    found = told(capsys, export, store, store.with_name("b"))
    assert (found["code"], found["blocks"], found["corrupt"]) == (1, 24, 1)
    told(capsys, import_, store.with_name("t"), store.with_name("b"), capacity="4MiB")
    assert served(store.with_name("t")) == [number for number in range(25) if number != 3]
    assert export(store, store.with_name("c")) == 1
    assert "left out: 1 blocks that are corrupt" in capsys.readouterr().out


def test_blocks_that_move_meanwhile(store: Path) -> None:
    """Beside a writer a block would go into the bundle under another's name, or out of its order."""
    reader = StoreReader.open(store)
    blocks = OutgoingBlocks(reader, [1, 2], 0)
    assert len(blocks) == 25
    reader.close()
    driver = StoreDriver(store, ONE, durability="batch")
    driver.rescan(range(20))
    driver.write([], evict=range(5))
    driver.write(range(100, 103), 5000)  # in places that were listed
    driver.close()
    reader = StoreReader.open(store)
    blocks._reader = reader
    numbers = [number for batch in blocks.batches() for number in (one.stored.record.generation for one in batch)]
    assert numbers == list(range(6, 26))
    assert blocks.verdicts[cmd_export.Verdict.MOVED] == 5
    reader.close()


def test_a_writer_comes(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An export would end in an error because somebody started an engine."""
    tries = []
    real = StoreReader.open.__func__  # type: ignore[attr-defined]

    def opened(cls: type[StoreReader], folder: Path, live: bool = False) -> StoreReader:
        tries.append(live)
        reader: StoreReader = real(cls, folder, False)
        if not live:
            monkeypatch.setattr(reader, "expect_undisturbed", lambda: (_ for _ in ()).throw(Overtaken()))
        return reader

    monkeypatch.setattr(StoreReader, "open", classmethod(opened))
    found = told(capsys, export, store, store.with_name("b"))
    assert (tries, found["blocks"]) == ([False, True], 25)


# ---------------------------------------------------------------- import


def test_what_does_not_fit(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smaller store would get the oldest blocks, or throw out its own."""
    target = bundle.with_name("t")
    driver = StoreDriver(target, TWO, durability="batch", capacity_bytes=1_080_000, length_bytes_max=8192)
    extents = driver.tier._store.allocator.extents_max
    slots = extents * (driver.tier._store.header.extent_bytes // 8192)
    taken = slots - 10
    driver.write(range(1000, 1000 + taken), 8192)
    driver.close()
    found = told(capsys, import_, target, bundle)
    assert (found["imported"], found["left_out"], found["no_room"]) == (10, 15, 0)
    driver = StoreDriver(target, TWO, durability="batch", capacity_bytes=1_080_000, length_bytes_max=8192)
    driver.rescan(range(1000, 1000 + taken))
    assert driver.read(list(driver.kept)) == [Status.DONE] * taken
    keys = [block.key for block in driver.tier.scan()][taken:]
    driver.close()
    assert [key[4:] for key in keys] == [key_of(number)[4:] for number in range(10, 20)], "the newest of their size"


def test_what_fits_is_what_writes_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan would promise room that is not there, and the newest blocks be refused."""
    chance = random.Random(3)
    driver = StoreDriver(tmp_path / "s", ONE, durability="none", capacity_bytes=64 << 20)
    for number in range(0, 600, 20):
        driver.write(range(number, number + 20), chance.choice((4000, 5000, 12_000, 16_000)))
    driver.close()
    assert export(tmp_path / "s", tmp_path / "b") == 0
    for capacity in ("1MB", "2MiB", "4MiB", "16MiB"):
        folder = tmp_path / capacity
        found = told(capsys, import_, folder, tmp_path / "b", capacity=capacity)
        assert (found["no_room"], found["imported"] + found["left_out"]) == (0, 600)
        driver = StoreDriver(folder, ONE, capacity_bytes=folder_capacity(folder), durability="batch")
        sizes = {block.length_bytes for block in driver.tier.scan()}
        assert all(driver.tier.fitting([page_aligned(length)]) == [False] for length in sizes) or not found["left_out"]
        assert driver.tier.check() == []
        driver.close()


def folder_capacity(folder: Path) -> int:
    reader = StoreReader.open(folder)
    reader.close()
    return reader.header.capacity_bytes


def test_what_the_store_has_stays(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A newer block would be replaced by an old one, or be there twice."""
    target = bundle.with_name("t")
    driver = StoreDriver(target, ONE, durability="batch")
    driver.write([3, 7], 5000)
    before = {block.key: block for block in driver.tier.scan()}
    driver.close()
    found = told(capsys, import_, target, bundle)
    assert (found["imported"], found["present"]) == (23, 2)
    driver = StoreDriver(target, ONE, durability="batch")
    after = {block.key: block for block in driver.tier.scan()}
    driver.close()
    assert before.items() <= after.items()
    assert len(after) == 25


def test_nothing_else_reaches_the_disk(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of one block, maybe of another tenant, would lie in the padding of the next."""
    monkeypatch.setattr(importing, "BATCH_BYTES", 3 * 8192)
    import_(bundle.with_name("t"), bundle, capacity="4MiB")
    reader = StoreReader.open(bundle.with_name("t"))
    slab = (bundle.with_name("t") / "slab").read_bytes()
    for stored in reader.records():
        start = reader.offset_of(stored)
        assert not any(slab[start + stored.record.length_bytes : start + stored.stride_bytes])
    reader.close()


@pytest.mark.parametrize("options", [{}, {"capacity": "4MiB"}, {"capacity": "4096KiB"}], ids=str)
def test_an_interrupted_import_goes_on(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    """What was written would be lost, or be written twice; or the same command be refused for naming the capacity."""
    monkeypatch.setattr(importing, "BATCH_BYTES", 40_000)
    target, calls = bundle.with_name("t"), []
    real = importing.Importer._items

    def interrupted(importer: importing.Importer, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(importer, batch)

    monkeypatch.setattr(importing.Importer, "_items", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_(target, bundle, capacity="4MiB")
    with pytest.raises(UsageError, match=r"keeps its capacity, 4MiB; leave --capacity out"):
        import_(target, bundle, capacity="5MiB")
    found = told(capsys, import_, target, bundle, **options)
    assert (found["imported"] + found["present"], found["present"] > 0) == (25, True)
    assert served(target) == list(range(25))


def test_a_bundle_that_lies_changes_nothing(bundle: Path) -> None:
    """Half of a bad bundle would be in the store before it turns out to be bad."""
    target = bundle.with_name("t")
    make(target)
    before = {path.name: path.read_bytes() for path in target.rglob("slab")}
    last = bundle / sorted(path.name for path in bundle.glob("*.frames"))[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    for options in ({"path": target}, {"path": bundle.with_name("new"), "capacity": "4MiB"}):
        with pytest.raises(BundleError, match="payload does not match"):
            import_(bundle=bundle, **options)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in target.rglob("slab")} == before
    assert not bundle.with_name("new").exists()
    assert served(target) == list(range(25))


def test_a_bundle_that_changes_meanwhile(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read and believed would not be what is written."""
    real = importing.Importer._plan

    def planned(importer: importing.Importer, contents: importing.Contents) -> Any:
        data = bytearray((bundle / part_name(0)).read_bytes())
        data[5000] ^= 1
        (bundle / part_name(0)).write_bytes(data)
        return real(importer, contents)

    monkeypatch.setattr(importing.Importer, "_plan", planned)
    with pytest.raises(BundleError, match="payload does not match"):
        import_(bundle.with_name("t"), bundle, capacity="4MiB")


@pytest.mark.parametrize("numbers", [range(10, 20), range(20)], ids=["as many", "more"])
def test_a_bundle_that_becomes_another(
    bundle: Path, numbers: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody else exported, sound in itself, would come into the store behind a digest that was checked."""
    other = StoreDriver(tmp_path / "o", ONE, durability="batch")
    other.write(numbers, 5000)
    other.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "PART_BYTES", 20_000 if len(numbers) == 10 else 1 << 20)
        patch.setattr("kvtier.tiers.lmdb.outgoing.BATCH_BLOCKS", 3)
        assert export(tmp_path / "o", tmp_path / "ob") == 0
    real = importing.read_part

    def read_part(folder: Path, manifest: Any, part: Any) -> Any:
        return real(tmp_path / "ob", exchanged, exchanged.parts[0]) if exchanged else real(folder, manifest, part)

    exchanged: Any = None

    def planned(importer: importing.Importer, contents: importing.Contents) -> Any:
        nonlocal exchanged
        exchanged = asyncio.run(read_manifest(tmp_path / "ob"))
        return plan(importer, contents)

    plan = importing.Importer._plan
    monkeypatch.setattr(importing, "read_part", read_part)
    monkeypatch.setattr(importing.Importer, "_plan", planned)
    with pytest.raises(BundleError, match="changed since it was checked"):
        import_(tmp_path / "t", bundle, capacity="4MiB")
    assert served(tmp_path / "t") == []


def test_a_block_that_no_store_could_take(bundle: Path) -> None:
    """A bundle that lies about its blocks would have them read into memory before anybody asks."""
    manifest = replace(asyncio.run(read_manifest(bundle)), block_bytes_max=6 << 30)
    (bundle / "manifest.cbor").write_bytes(encode_manifest(manifest))
    (bundle / part_name(0)).unlink()  # nobody looks at it
    with pytest.raises(ConfigError, match="blocks of 6442450944 bytes"):
        import_(bundle.with_name("t"), bundle, capacity="100GiB")
    (bundle / "manifest.cbor").write_bytes(encode_manifest(replace(manifest, block_bytes_max=1 << 30)))
    with pytest.raises(ConfigError, match="capacity"):
        import_(bundle.with_name("t"), bundle, capacity="2GiB")
    assert not bundle.with_name("t").exists()


def test_a_block_that_comes_twice(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An export that went on has what was stored anew twice: more would be imported than there is, or the older one."""
    blocks = OutgoingBlocks.batches

    def twice(self: OutgoingBlocks) -> Any:
        for batch in blocks(self):
            yield [*batch, batch[0]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutgoingBlocks, "batches", twice)
        assert export(store, store.with_name("b")) == 0
    found = told(capsys, import_, store.with_name("t"), store.with_name("b"), capacity="4MiB")
    assert (found["blocks"], found["imported"], found["repeated"], found["present"]) == (26, 25, 1, 0)
    assert served(store.with_name("t")) == [*range(1, 25), 0], "as the one that was stored last"
    found = told(capsys, import_, store.with_name("t"), store.with_name("b"))
    assert (found["imported"], found["repeated"], found["present"]) == (0, 1, 25)


def wear_row(folder: Path) -> dict[str, Any]:
    driver = StoreDriver(folder, durability="batch")
    row = read_row(dict(driver.tier.sidecar()).get(WEAR_KEY, b""))
    driver.close()
    return row


def test_an_import_wears_the_disk(store: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever imports each night wears a drive out of which `inspect` and the budget know nothing."""
    target = store.with_name("t")
    manifest = asyncio.run(read_manifest(bundle))
    assert told(capsys, import_, target, bundle, capacity="4MiB")["imported"] == 25
    row = wear_row(target)
    assert row["payload"] == manifest.payload_bytes
    assert row["slots"] >= row["payload"]
    assert row["index"] > 0
    assert sum(row["days"].values()) == row["slots"] + row["index"]
    assert told(capsys, import_, target, bundle)["present"] == 25
    assert wear_row(target) == row, "nothing was written"
    driver = StoreDriver(target, ONE, durability="batch")
    driver.rescan(range(20))
    account = {"since_ms": 0, "at_ms": 1 << 50, "payload": 0, "slots": 0, "index": 0, "days": []}
    account |= {"per_day": 1000, "burst": 10**9, "saved": 10**8}
    driver.write([], evict=[0], **{WEAR_KEY.decode(): cbor2.dumps(account)})
    driver.close()
    assert told(capsys, import_, target, bundle)["imported"] == 1
    again = wear_row(target)
    assert (again["payload"], again["slots"]) == (5000, 8192)
    assert again["saved"] == 10**8 - 8192 - again["index"]


def test_an_import_that_is_killed_has_worn_the_disk(
    store: Path, bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that is cut off and goes on counts only what it did at last."""
    monkeypatch.setattr(importing, "BATCH_BYTES", 64 << 10)
    write, left = LmdbTier.write, [2]

    def dies(tier: LmdbTier, batch: WriteBatch) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return write(tier, batch)

    target = store.with_name("t")
    with monkeypatch.context() as patch:
        patch.setattr(LmdbTier, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            import_(target, bundle, capacity="4MiB")
    first = wear_row(target)
    served(target)
    assert told(capsys, import_, target, bundle)["imported"] > 0
    manifest = asyncio.run(read_manifest(bundle))
    assert wear_row(target)["payload"] == manifest.payload_bytes > first["payload"] > 0


def test_a_store_in_use(store: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers would ruin a store; and the refusal would come after an hour of reading the bundle."""
    monkeypatch.setattr("kvtier.cli.cmd_import.believed", lambda *args: 1 / 0)
    driver = StoreDriver(store, durability="batch")
    monkeypatch.setattr("kvtier.cli.cmd_import.header_of", lambda folder: driver.tier._store.header)  # another process
    with pytest.raises(StoreLocked, match="this process has the store open"):
        import_(store, bundle)
    driver.close()


def test_what_must_be_said(store: Path, bundle: Path) -> None:
    """A store would be made in the wrong place, or of a size that nobody chose."""
    with pytest.raises(UsageError, match="say with --capacity"):
        import_(bundle.with_name("t"), bundle)
    with pytest.raises(UsageError, match="keeps its capacity, 4MiB"):
        import_(store, bundle, capacity="5MiB")
    with pytest.raises(UsageError, match="--capacity: "):
        import_(store, bundle, capacity="much")
    with pytest.raises(UsageError, match="--capacity: "):
        import_(bundle.with_name("t"), bundle, capacity="much")
    with pytest.raises(BundleError, match="larger than the store"):
        import_(bundle.with_name("t"), bundle, capacity="1kB")
    with pytest.raises(ConfigError, match="Give at least"):
        import_(bundle.with_name("t"), bundle, capacity="100kB")
    with pytest.raises(BundleError, match="is not a bundle"):
        import_(bundle.with_name("t"), store, capacity="4MiB")
    assert not bundle.with_name("t").exists()


def test_a_disk_that_refuses(bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were not written would be counted as there."""

    def refuse(*args: Any) -> int:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patch:
        patch.setattr("kvtier.tiers.lmdb.blockfile.BlockFile.write", refuse)
        found = told(capsys, import_, bundle.with_name("t"), bundle, capacity="4MiB")
    assert (found["code"], found["imported"], found["failed"]) == (1, 0, 25)
    assert served(bundle.with_name("t")) == []
