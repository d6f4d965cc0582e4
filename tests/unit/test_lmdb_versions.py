"""What a later or an earlier kvtier wrote: left alone, refused, or brought up to date, and never misread."""

from dataclasses import replace
from pathlib import Path

import cbor2
import pytest

from kvtier.cli.cmd_fsck import fsck
from kvtier.cli.cmd_gc import gc
from kvtier.errors import InvariantError, StoreFormatError
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.tiers.lmdb import upgrades
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.layout import (
    HEADER_KEY,
    ID_KEY,
    PLACE_KEY,
    Coded,
    Record,
    UnknownVersion,
    _sealed,
    decode_header,
    decode_record,
    encode_header,
    encode_record,
)
from kvtier.tiers.lmdb.upgrades import Step
from kvtier.types import Status

LATER = b"\x63 what only a later version understands"


def change(folder: Path, rows: Change) -> None:
    index = Index.open(folder / "index", "none", 1 << 20)
    index.commit(rows)
    index.close()


def rows_of(folder: Path, table: str) -> dict[bytes, bytes]:
    index = Index.open_readonly(folder / "index", live=False)
    rows = dict(index.rows(table))
    index.close()
    return rows


def filled(folder: Path, places: list[tuple[int, int]]) -> dict[bytes, bytes]:
    """A closed store with 64 blocks of 16 KiB, two extents, where these places are a later version's; their rows."""
    store = StoreDriver(folder, durability="batch")
    store.write(range(64), 16_384)
    store.close()
    keys = [PLACE_KEY.pack(*place) for place in places]
    rows = {key: _sealed(key, LATER) for key in keys}
    change(folder, Change(blocks=dict(rows)))
    return rows


def test_a_later_record_is_told_from_a_damaged_one() -> None:
    """Damage would pass for the future, and stay for good; or the future for damage, and be removed."""
    place = PLACE_KEY.pack(0, 0)
    with pytest.raises(UnknownVersion, match="version 99"):
        decode_record(place, _sealed(place, LATER))
    for flipped in range(len(LATER) + 8):
        row = bytearray(_sealed(place, LATER))
        row[flipped] ^= 1
        with pytest.raises(Exception, match="check") as caught:
            decode_record(place, bytes(row))
        assert not isinstance(caught.value, UnknownVersion)
    record = Record(1, key_of(1)[4:], 100, 1, 0, 0, Coded("int8", 200, 4096))
    row = bytearray(encode_record(place, record))[:-8]
    assert decode_record(place, _sealed(place, bytes(row))) == record
    row[3] = 9  # a codec that is not known yet
    with pytest.raises(UnknownVersion, match="codec 9"):
        decode_record(place, _sealed(place, bytes(row)))


def test_they_outlive_a_cache(tmp_path: Path) -> None:
    """An older kvtier would delete, or write over, what a newer one had stored."""
    rows = filled(tmp_path / "s", [(0, 3), (1, 30)])
    with (tmp_path / "s" / "slab").open("rb") as slab:
        slab.seek(3 * 16_384)
        payload = slab.read(16_384)
    store = StoreDriver(tmp_path / "s", durability="batch")
    assert any("2 records are of a later version" in note for note in store.tier.notes)
    store.rescan(range(64))
    assert len(store.kept) == 62
    for start in range(100, 600, 20):  # as many as make every other slot change hands
        evict = list(store.kept)[: max(0, len(store.kept) - 100)]
        assert set(store.write(range(start, start + 20), 16_384, evict=evict)) == {Status.DONE}
    while store.kept:
        store.write([], evict=list(store.kept)[:50])
    assert (store.tier.check(), store.tier.findings) == ([], [])
    store.write([1], 16_384)
    store.reopen()
    assert store.read([1]) == [Status.DONE]
    store.close()
    assert rows.items() <= rows_of(tmp_path / "s", "blocks").items()
    assert {ID_KEY.pack(extent) for extent in (0, 1)} <= rows_of(tmp_path / "s", "extents").keys()
    with (tmp_path / "s" / "slab").open("rb") as slab:
        slab.seek(3 * 16_384)
        assert slab.read(16_384) == payload


def test_their_namespace_stays(tmp_path: Path) -> None:
    """When the last block that we know of it leaves, the later version's would count as dropped."""
    filled(tmp_path / "s", [(0, 3)])
    store = StoreDriver(tmp_path / "s", durability="batch")
    store.rescan(range(64))
    store.write([], evict=list(store.kept))
    store.reopen()
    store.close()
    assert len(rows_of(tmp_path / "s", "namespaces")) == 1


def test_they_leave_last(tmp_path: Path) -> None:
    """A smaller capacity would cost what only others can read, while our own blocks stay; or would not be kept."""
    rows = filled(tmp_path / "s", [(0, 3)])
    store = StoreDriver(tmp_path / "s", durability="batch", capacity_bytes=1_700_000)
    store.rescan(range(64))
    assert {number for number in store.kept if number < 32} == set(range(32)) - {3}
    store.close()
    assert rows.items() <= rows_of(tmp_path / "s", "blocks").items()
    filled(tmp_path / "t", [(extent, slot) for extent in (0, 1) for slot in range(32)])
    store = StoreDriver(tmp_path / "t", durability="batch", capacity_bytes=1_700_000)
    lent = store.tier._store.allocator.lent_extents
    assert lent == store.tier._store.allocator.extents_max < 2
    store.close()


def test_one_that_lies_nowhere(tmp_path: Path) -> None:
    """A slot that no extent has would be an error at opening."""
    rows = filled(tmp_path / "s", [(0, 2**32 - 1), (2**32 - 1, 0)])
    store = StoreDriver(tmp_path / "s", durability="batch")
    assert store.tier.check() == []
    store.close()
    assert rows.items() <= rows_of(tmp_path / "s", "blocks").items()


# ---------------------------------------------------------------- formats


def with_format(folder: Path, version: int) -> None:
    header = decode_header(rows_of(folder, "meta")[HEADER_KEY])
    change(folder, Change(meta={HEADER_KEY: encode_header(replace(header, format=version))}))


def renewed(index: Index) -> Change:
    """A made-up step: formats before 1 counted generations backwards."""
    row = index.get("meta", HEADER_KEY)
    assert row is not None
    blocks = {}
    for key, old in index.rows("blocks"):
        record = decode_record(key, old)
        blocks[key] = encode_record(key, record._replace(generation=1000 - record.generation))
    return Change(blocks=dict(blocks), meta={HEADER_KEY: encode_header(replace(decode_header(row), format=1))})


@pytest.fixture
def old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    store = StoreDriver(tmp_path / "s", durability="batch")
    store.write(range(10))
    store.close()
    with_format(tmp_path / "s", 0)
    monkeypatch.setitem(upgrades.UPGRADES, 0, Step(1, renewed))
    return tmp_path / "s"


def test_an_older_format_is_brought_up_to_date(old_store: Path) -> None:
    """A new version would start with an empty cache, or read old rows by new rules."""
    store = StoreDriver(old_store, durability="batch")
    assert [block.key for block in store.tier.scan()] == [key_of(number) for number in reversed(range(10))]
    store.rescan(range(10))
    assert store.read(range(10)) == [Status.DONE] * 10
    store.close()
    assert decode_header(rows_of(old_store, "meta")[HEADER_KEY]).format == 1


@pytest.mark.parametrize("verb", [fsck, gc])
def test_a_look_does_not_bring_it_up_to_date(old_store: Path, verb: object) -> None:
    """Whoever only looks would change the store, or call it one of the future."""
    before = rows_of(old_store, "meta")
    with pytest.raises(StoreFormatError, match="format 0, an older one"):
        verb(old_store)  # type: ignore[operator]
    assert rows_of(old_store, "meta") == before


def test_an_interrupted_step(old_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store would be left between two formats."""
    before = rows_of(old_store, "blocks")
    monkeypatch.setattr(Index, "commit", lambda index, change: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        StoreDriver(old_store, durability="batch")
    monkeypatch.undo()
    assert rows_of(old_store, "blocks") == before
    assert cbor2.loads(rows_of(old_store, "meta")[HEADER_KEY][:-8])["format"] == 0


def test_a_step_that_leads_elsewhere(old_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in a step would be an endless loop at opening."""
    monkeypatch.setitem(upgrades.UPGRADES, 0, Step(1, lambda index: Change()))
    with pytest.raises(InvariantError, match="led to 0"):
        StoreDriver(old_store, durability="batch")


def test_a_newer_format_is_refused(old_store: Path) -> None:
    """A later version's store would be read, written or repaired by this version's rules."""
    with_format(old_store, 9)
    before = rows_of(old_store, "blocks")
    for attempt in (lambda: StoreDriver(old_store), lambda: fsck(old_store, mend=True), lambda: gc(old_store)):
        with pytest.raises(StoreFormatError, match="it has format 9"):
            attempt()
    assert rows_of(old_store, "blocks") == before
