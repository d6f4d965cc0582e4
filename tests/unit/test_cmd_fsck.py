"""`kvtier fsck` finds what contradicts itself in a store, takes out exactly that, and harms nothing sound."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvtier.cli.cmd_fsck import fsck
from kvtier.cli.main import app
from kvtier.errors import KvtierError, StoreLocked
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.layout import (
    GENERATION_KEY,
    ID_KEY,
    NAMESPACE_KEY,
    PLACE_KEY,
    _sealed,
    decode_limit,
    decode_record,
    encode_extent,
    encode_limit,
    encode_namespace,
    encode_record,
)
from kvtier.tiers.lmdb.lock import StoreLock
from kvtier.types import Status

ONE, TWO = b"1" * 32, b"2" * 32
BLOCKS = 10
SLAB_PLACES = [PLACE_KEY.pack(0, slot) for slot in range(BLOCKS)]


def make(folder: Path) -> None:
    """A closed store: blocks 0 to 9 of one namespace in extent 0, and 10 to 12, smaller, of another in extent 1."""
    store = StoreDriver(folder, ONE, durability="batch")
    store.write(range(BLOCKS), 5000)
    store.namespace = store.namespaces.id_of(TWO, cbor2.dumps({"name": "two"}))
    store.write(range(BLOCKS, 13), 4096)
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "s")
    return tmp_path / "s"


def change(folder: Path, rows: Change) -> None:
    index = Index.open(folder / "index", "none", 1 << 20)
    index.commit(rows)
    index.close()


def rows_of(folder: Path) -> dict[str, dict[bytes, bytes]]:
    index = Index.open_readonly(folder / "index", live=False)
    rows = {table: dict(index.rows(table)) for table in ("meta", "namespaces", "extents", "blocks", "sidecar")}
    index.close()
    return rows


def report(capsys: pytest.CaptureFixture[str], folder: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = fsck(folder, json_output=True, **options)
    return code, json.loads(capsys.readouterr().out)


def served(folder: Path) -> list[int]:
    """The blocks that the next cache finds, all of them readable."""
    store = StoreDriver(folder, ONE, durability="batch")
    store.rescan(range(BLOCKS))
    found = list(store.kept)
    assert store.read(found) == [Status.DONE] * len(found)
    store.namespace = store.namespaces.id_of(TWO, b"")
    store.rescan(range(BLOCKS, 13))
    assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
    assert store.tier.check() == []
    found += store.kept
    store.close()
    return found


def test_a_sound_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Operators would learn to ignore it, or a look would change the evidence."""
    before = rows_of(folder)
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock.mdb"}
    code, found = report(capsys, folder)
    assert (code, found["blocks"], found["sound"], found["findings"], found["condemned"]) == (0, 13, 13, [], [])
    assert found["leftovers"] == dict.fromkeys(found["leftovers"], 0)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert report(capsys, folder, mend=True)[0] == 0
    assert rows_of(folder) == before
    assert served(folder) == list(range(13))


def damaged_record(folder: Path) -> None:
    change(folder, Change(blocks={SLAB_PLACES[3]: b"x" * 90}))


def misplaced_record(folder: Path) -> None:
    change(folder, Change(blocks={SLAB_PLACES[3]: rows_of(folder)["blocks"][SLAB_PLACES[2]]}))


def wrong_class(folder: Path) -> None:
    """A sound record of a block that would overlap its neighbours: the extent is lent to another class."""
    record = decode_record(SLAB_PLACES[3], rows_of(folder)["blocks"][SLAB_PLACES[3]])
    change(folder, Change(blocks={SLAB_PLACES[3]: encode_record(SLAB_PLACES[3], record._replace(length_bytes=9000))}))


def beyond_the_extent(folder: Path) -> None:
    change(folder, Change(blocks={PLACE_KEY.pack(0, 64): record_at(folder, PLACE_KEY.pack(0, 64))}))


def extent_without_row(folder: Path) -> None:
    change(folder, Change(blocks={PLACE_KEY.pack(7, 0): record_at(folder, PLACE_KEY.pack(7, 0))}))


def record_at(folder: Path, place: bytes) -> bytes:
    return encode_record(place, decode_record(SLAB_PLACES[3], rows_of(folder)["blocks"][SLAB_PLACES[3]]))


def unknown_namespace(folder: Path) -> None:
    record = decode_record(SLAB_PLACES[3], rows_of(folder)["blocks"][SLAB_PLACES[3]])
    change(folder, Change(blocks={SLAB_PLACES[3]: encode_record(SLAB_PLACES[3], record._replace(namespace=9))}))


def bad_payload(folder: Path) -> None:
    with (folder / "slab").open("r+b") as slab:
        slab.seek(3 * 8192 + 17)
        slab.write(b"?")


def cut_slab(folder: Path) -> None:
    os.truncate(folder / "slab", (1 << 19) + 4096)


DAMAGES: dict[str, tuple[Callable[[Path], None], set[int], str]] = {
    "damaged record": (damaged_record, {3}, "does not match its check"),
    "misplaced record": (misplaced_record, {3}, "does not match its check"),
    "another class": (wrong_class, {3}, "length 9000 in an extent of 2 pages"),
    "beyond the extent": (beyond_the_extent, set(), "outside the slab"),
    "no such extent": (extent_without_row, set(), "in an extent of None pages"),
    "no such namespace": (unknown_namespace, {3}, "namespace 9 is unknown"),
    "bad payload": (bad_payload, {3}, "do not match their checksum"),
    "cut slab": (cut_slab, {11, 12}, "outside the slab"),
    "place of a wrong length": (lambda f: change(f, Change(blocks={b"xyz": b"y" * 80})), set(), "at no place"),
    "damaged extent": (lambda f: change(f, Change(extents={ID_KEY.pack(1): b"z" * 12})), {10, 11, 12}, "its check"),
    "damaged namespace": (lambda f: change(f, Change(namespaces={ID_KEY.pack(2): b"?"})), {10, 11, 12}, "its check"),
    "generations given twice": (
        lambda f: change(f, Change(meta={GENERATION_KEY: encode_limit(GENERATION_KEY, 5)})),
        set(),
        "5, and 13 was given already",
    ),
    "ids given twice": (
        lambda f: change(f, Change(meta={NAMESPACE_KEY: encode_limit(NAMESPACE_KEY, 2)})),
        set(),
        "2, and 2 was given already",
    ),
    "damaged limits": (
        lambda f: change(f, Change(meta={NAMESPACE_KEY: b"", GENERATION_KEY: b"x"})),
        set(),
        "does not match its check",
    ),
    "one namespace twice": (
        lambda f: change(f, Change(namespaces={ID_KEY.pack(3): encode_namespace(3, b"9" * 32, b"")} | twice())),
        set(),
        "has the same fingerprint",
    ),
    "an id that cannot be": (
        lambda f: change(f, Change(namespaces={ID_KEY.pack(1 << 31): encode_namespace(1 << 31, b"8" * 32, b"")})),
        set(),
        "an id that no writer gives",
    ),
    "sidecar": (lambda f: change(f, Change(sidecar={b"counters": b"\xff"})), set(), "is not a CBOR map"),
}


def twice() -> dict[bytes, bytes | None]:
    return {ID_KEY.pack(tier_id): encode_namespace(tier_id, b"9" * 32, b"") for tier_id in (4, 5)}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_found_and_taken_out(folder: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    """A block would be served wrong, or sound blocks be thrown away with a bad one."""
    harm, lost, said = DAMAGES[damage]
    harm(folder)
    before = rows_of(folder)
    code, found = report(capsys, folder)
    told = found["findings"] + [entry["detail"] for entry in found["condemned"]]
    assert (code, any(said in text for text in told)) == (1, True), told
    assert rows_of(folder) == before
    assert fsck(folder) == 1
    assert "kvtier fsck --repair" in capsys.readouterr().out
    code, found = report(capsys, folder, mend=True)
    assert (code, found["repaired"] > 0) == (1, True)
    code, found = report(capsys, folder)
    assert (code, found["findings"], found["condemned"]) == (0, [], [])
    assert found["sound"] == 13 - len(lost)
    assert set(served(folder)) == set(range(13)) - lost


def test_limits_lie_above_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A generation or an id would be given twice, and one block pass for another."""
    unknown_namespace(folder)
    change(folder, Change(meta={GENERATION_KEY: b"", NAMESPACE_KEY: b""}))
    report(capsys, folder, mend=True)
    meta = rows_of(folder)["meta"]
    assert decode_limit(GENERATION_KEY, meta[GENERATION_KEY]) == 14
    assert decode_limit(NAMESPACE_KEY, meta[NAMESPACE_KEY]) > 9


@pytest.mark.parametrize(("key", "newest"), [(NAMESPACE_KEY, 2), (GENERATION_KEY, 13)])
@pytest.mark.parametrize("limit", [None, 2])
def test_a_cache_mends_a_limit(
    folder: Path, capsys: pytest.CaptureFixture[str], key: bytes, newest: int, limit: int | None
) -> None:
    """A limit that was lost stays damage for good, of which a cache says nothing; and what it guards is given twice."""
    row = rows_of(folder)["meta"][key] if limit is None else None
    change(folder, Change(meta={key: limit and encode_limit(key, limit), key[:-1] + b"?": row}))
    assert report(capsys, folder)[0] == 1
    store = StoreDriver(folder, ONE, durability="batch")
    assert store.tier.findings == [f"meta {key.decode()}: {limit or 1}, and {newest} was given already"]
    store.rescan(range(BLOCKS))
    assert store.read(sorted(store.kept)) == [Status.DONE] * BLOCKS
    store.close()
    assert report(capsys, folder)[0] == 0
    assert decode_limit(key, rows_of(folder)["meta"][key]) > newest + 1
    assert served(folder) == [*range(13)]
    store = StoreDriver(folder, ONE, durability="batch")
    assert store.tier.findings == []
    store.close()


def test_the_newer_of_two_namespaces_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A repair throws away what was written last, and keeps what nobody has used since."""
    change(folder, Change(namespaces={ID_KEY.pack(2): encode_namespace(2, ONE, b"")}))
    assert report(capsys, folder, mend=True)[0] == 1
    assert [*rows_of(folder)["namespaces"]] == [ID_KEY.pack(2)]
    assert report(capsys, folder)[1]["sound"] == 3


def test_condemned_blocks_are_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody could see afterwards what was lost; or the notes would grow without end."""
    old = {b"condemned/" + n.to_bytes(8, "big"): cbor2.dumps({"at_ms": n}) for n in range(1000, 1064)}
    change(folder, Change(sidecar=dict(old)))
    bad_payload(folder)
    report(capsys, folder, mend=True)
    rows = rows_of(folder)["sidecar"]
    new = [key for key in rows if key not in old]
    assert (len(rows), new, set(old) - set(rows)) == (64, [b"condemned/" + (6).to_bytes(8, "big")], {min(old)})
    fields = cbor2.loads(rows[new[0]])
    assert (fields["namespace"], fields["length"]) == (ONE, 5000)


def test_leftovers_are_no_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What every drop and every crash leaves would alarm somebody each time."""
    record = decode_record(SLAB_PLACES[3], rows_of(folder)["blocks"][SLAB_PLACES[3]])
    place = PLACE_KEY.pack(0, 20)
    newer = encode_record(place, record._replace(generation=14))
    change(folder, Change(blocks={place: newer}, extents={ID_KEY.pack(5): encode_extent(5, 2)}))
    with (folder / "slab").open("r+b") as slab:
        slab.seek(3 * 8192)
        block = slab.read(8192)
        slab.seek(20 * 8192)
        slab.write(block)
        slab.seek(4 << 19)
        slab.write(bytes(3 << 19))
    change(folder, Change(namespaces={ID_KEY.pack(2): None}))
    code, found = report(capsys, folder)
    assert (code, found["findings"], found["sound"]) == (0, [], 11)
    left = found["leftovers"]
    assert (left["dropped_records"], left["superseded_records"], left["empty_extents"]) == (3, 1, 2)
    assert fsck(folder) == 0
    assert "kvtier gc gives it back" in capsys.readouterr().out


def test_records_of_later_versions_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An older kvtier that looks at a store would destroy what a newer one wrote there."""
    place = PLACE_KEY.pack(0, 30)
    later = _sealed(place, b"\x63 whatever it says")
    change(folder, Change(blocks={place: later}))
    bad_payload(folder)
    code, found = report(capsys, folder, mend=True)
    assert (code, found["findings"], len(found["condemned"])) == (1, [], 1)
    assert found["leftovers"]["unknown_records"] == 1
    assert rows_of(folder)["blocks"][place] == later


def test_a_store_in_use(folder: Path) -> None:
    """A repair would take rows away from under a cache."""
    lock = StoreLock.acquire(folder)
    with pytest.raises(StoreLocked, match="has the store open"):
        fsck(folder, mend=True)
    lock.release()
    assert fsck(folder, mend=True) == 0


def test_broken_beyond_repair(folder: Path) -> None:
    """A program would see a traceback or code 2 where the answer is: this store is damaged."""
    (folder / "index" / "data.mdb").write_bytes(b"no index")
    for options in ([], ["--repair"]):
        done = CliRunner().invoke(app, ["fsck", str(folder), "--json", *options])
        assert done.exit_code == 1
        assert "Delete the folder" in json.loads(done.stdout)["error"]


def test_a_rate(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a large store would take the whole disk from whoever serves from it."""
    waits: list[float] = []
    monkeypatch.setattr("kvtier.cli.inspect.pace.Pace.__init__.__defaults__", (lambda: 0.0, waits.append))
    _, found = report(capsys, folder, rate="1MiB/s")
    assert sum(waits) + 0.25 >= found["read_bytes"] / (1 << 20) > 0.05
    done = CliRunner().invoke(app, ["fsck", str(folder), "--rate", "fast"])
    assert done.exit_code == 2


TABLES = st.sampled_from(["meta", "namespaces", "extents", "blocks", "sidecar"])
KEYS = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.sampled_from([*SLAB_PLACES, *map(ID_KEY.pack, (0, 1, 2, 2**32 - 1)), GENERATION_KEY, NAMESPACE_KEY]),
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsck") / "kept"
    make(folder)
    return folder


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.dictionaries(st.tuples(TABLES, KEYS), st.tuples(st.booleans(), st.binary(max_size=90)), max_size=8))
def test_hostile_rows(kept: Path, rows: dict[tuple[str, bytes], tuple[bool, bytes]]) -> None:
    """A row that nobody foresaw would be a traceback, or leave a store that no repair makes usable."""
    folder = kept.with_name("tried")
    shutil.copytree(kept, folder)
    try:
        harm = Change()
        for (table, key), (sealed, row) in rows.items():
            getattr(harm, table)[key] = _sealed(key, row) if sealed and table != "sidecar" else row
        change(folder, harm)
        fsck(folder)
        fsck(folder, mend=True)
        assert fsck(folder) == 0
        others_touched = any(table in ("meta", "namespaces", "extents") for table, _ in rows)
        sound = [slot for slot in range(BLOCKS) if not others_touched and ("blocks", SLAB_PLACES[slot]) not in rows]
        assert set(sound) <= set(served(folder))
    finally:
        shutil.rmtree(folder)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(where=st.floats(0, 1, exclude_max=True), flips=st.binary(min_size=1, max_size=16), cut=st.booleans())
def test_hostile_files(kept: Path, where: float, flips: bytes, cut: bool) -> None:
    """A broken index would end the process in LMDB, or be a traceback."""
    folder = kept.with_name("tried")
    shutil.copytree(kept, folder)
    try:
        data = folder / "index" / "data.mdb"
        content = bytearray(data.read_bytes())
        at = int(where * len(content))
        content[at : at + len(flips)] = flips
        data.write_bytes(content[:at] if cut else content)
        for mend in (False, True, False):
            try:
                code = fsck(folder, mend=mend)
            except KvtierError:
                break
            assert code in (0, 1)
    finally:
        shutil.rmtree(folder)
