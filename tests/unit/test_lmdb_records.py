"""Records and pages looked at together are judged as they are one by one."""

import random
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb import pages
from kvtier.tiers.lmdb.layout import PLACE_KEY, Coded, Record, decode_record, encode_record
from kvtier.tiers.lmdb.leaves import plain_nodes
from kvtier.tiers.lmdb.records import Records
from kvtier.types import BlockKey, page_aligned


def record_of(rng: random.Random, hash_bytes: int) -> Record:
    key = BlockKey(rng.randbytes(hash_bytes + 4))
    numbers = [rng.getrandbits(bits) for bits in (32, 32, 64, 64, 64)]
    length_bytes = numbers[1] | 1
    stride_bytes = page_aligned(length_bytes) + 4096 * rng.randrange(3)
    coded = Coded(rng.choice(("int8", "fp8", "exp4")), rng.randrange(1, 2**32), stride_bytes)
    return Record(numbers[0], key, length_bytes, *numbers[2:], coded if rng.random() < 0.4 else None)


def damaged(row: bytes, rng: random.Random) -> bytes:
    """Flipped somewhere, cut, or of another version with a right check."""
    at = rng.randrange(len(row))
    return rng.choice([row[:at] + bytes([row[at] ^ 1 << rng.randrange(8)]) + row[at + 1 :], row[:at], row + b"\0"])


def decoded(records: Records) -> dict[bytes, tuple[int, ...]]:
    """What the columns say, by place."""
    found = {}
    for columns in records.drain():
        cells = zip(*(columns[name].tolist() for name in ("extent", "slot")), strict=True)
        rest = zip(*(columns[name].tolist() for name in ("namespace", "key", "length", "generation")), strict=True)
        found |= {PLACE_KEY.pack(*place): row for place, row in zip(cells, rest, strict=True)}
    return found


def expected(rows: dict[bytes, bytes]) -> tuple[dict[bytes, tuple[int, ...]], list[bytes]]:
    """What a look at each row by itself says, and the places of those that are not believed."""
    found, wrong = {}, []
    for key, row in rows.items():
        try:
            record = decode_record(key, row)
        except CorruptBlock:
            wrong.append(key)
        else:
            found[key] = (record.namespace, record.key, record.raw_bytes, record.generation)
    return found, wrong


def some_rows(rng: random.Random, count: int) -> dict[bytes, bytes]:
    rows = {}
    for place in rng.sample(range(4 * count), count):
        key = PLACE_KEY.pack(place // 64, place % 64)
        row = encode_record(key, record_of(rng, rng.choice([1, 16, 32, 32, 32, 64])))
        rows[key] = damaged(row, rng) if rng.random() < 0.1 else row
    return dict(sorted(rows.items()))


@pytest.mark.parametrize("seed", range(5))
def test_records_together_are_what_they_are_one_by_one(seed: int) -> None:
    """A damaged record would be believed, or an intact one lost, when a store is opened."""
    rows = some_rows(random.Random(seed), 400)
    records = Records()
    records.add_rows(rows.items())
    found, wrong = expected(rows)
    assert sorted(records.doubtful) == sorted(wrong)
    assert decoded(records) == found


@pytest.mark.parametrize("byte", [0, 1, 2, 3])
def test_a_record_of_another_kind_is_left_to_a_closer_look(byte: int) -> None:
    """A record of a later version, whose check is right, would be read by this version's rules."""
    import xxhash

    key = PLACE_KEY.pack(1, 2)
    row = bytearray(encode_record(key, record_of(random.Random(0), 32))[:-8])
    row[byte] += 1
    records = Records()
    records.add_rows([(key, bytes(row) + xxhash.xxh3_64_intdigest(key + row).to_bytes(8, "little"))])
    assert (decoded(records), records.doubtful) == ({}, [key])


def index_with(folder: Path, rows: dict[bytes, bytes], rng: random.Random) -> Path:
    """An LMDB file whose pages have seen rows come and go, in no order."""
    with lmdb.open(str(folder), map_size=1 << 22, max_dbs=2, sync=False) as env:
        blocks, other = env.open_db(b"blocks"), env.open_db(b"other")
        for _ in range(3):
            with env.begin(write=True) as txn:
                for key in rng.sample(list(rows), len(rows)):
                    txn.put(key, rng.randbytes(rng.randrange(120)), db=blocks)
                    txn.put(key, b"x", db=other)
            with env.begin(write=True) as txn:
                for key in rng.sample(list(rows), len(rows) // 3):
                    txn.delete(key, db=blocks)
        with env.begin(write=True) as txn:
            for key, row in rows.items():
                txn.put(key, row, db=blocks)
            txn.put(b"long" * 5, rng.randbytes(6000), db=blocks)
    return folder / "data.mdb"


def walked(path: Path) -> tuple[dict[bytes, tuple[int, ...]], set[bytes]] | None:
    """The records and the doubtful keys that a walk over the pages finds; None if it refuses them."""
    try:
        records = pages.check_index(path, "blocks")
    except CorruptBlock:
        return None
    return decoded(records), set(records.doubtful)


def somewhere(whole: bytes, rng: random.Random) -> int:
    """A byte that says something: in a page's head, or in that of a node, mostly in one of many small ones."""
    page = 0
    while not page or whole[page + 10] != 2 or whole[page + 12] < 40:
        page = rng.randrange(2, len(whole) // 4096) * 4096
    node = page + 16 + 2 * rng.randrange((whole[page + 12] - 16) // 2)
    offset = int.from_bytes(whole[node : node + 2], "little")
    return rng.choice([page + rng.randrange(16), node, page + offset + rng.randrange(16), page + rng.randrange(4096)])


@pytest.mark.parametrize("seed", range(3))
def test_pages_together_are_what_they_are_one_by_one(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB would be given a page that sends it astray, or an intact store be called damaged."""
    rng = random.Random(seed)
    rows = some_rows(rng, 300)
    path = index_with(tmp_path / "index", rows, rng)
    right, wrong = expected(rows)
    intact = walked(path)
    assert intact is not None
    found, doubtful = intact
    assert found.items() <= right.items()
    assert {*wrong, b"long" * 5} <= doubtful  # and those that share a page with the long key
    assert found.keys() | doubtful == {*rows, b"long" * 5}
    assert len(found) > len(right) * 0.8
    whole = path.read_bytes()
    refused = 0
    for _ in range(120):
        flipped = bytearray(whole)
        flipped[somewhere(whole, rng)] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        together = walked(path)
        with monkeypatch.context() as patch:
            patch.setattr(pages, "_bounds", lambda level: None)
            alone = walked(path)
        refused += alone is None
        assert (together is None) == (alone is None)
        if together is not None and alone is not None:
            assert alone[0] == {}
            assert together[0].keys() | together[1] == alone[1]
    assert 20 < refused < 110


def test_a_page_with_keys_of_its_neighbour_is_not_plain(tmp_path: Path) -> None:
    """Keys out of order between two pages, each in order by itself, make LMDB's search go round in circles."""
    rng = random.Random(7)
    path = index_with(tmp_path / "index", some_rows(rng, 300), rng)
    level = np.fromfile(path, np.uint8).reshape(-1, 4096)
    numbers = np.arange(len(level), dtype=np.uint64)
    least, greatest = np.zeros(len(level), np.uint64), np.full(len(level), 2**64 - 1, np.uint64)
    plain = np.flatnonzero(plain_nodes(level, numbers, least, greatest).plain)
    assert len(plain) > 3
    for page in plain.tolist():
        part = slice(page, page + 1)
        starts = plain_nodes(level[part], numbers[part], least[part], greatest[part]).starts.tolist()
        first, last = (
            int.from_bytes(level[page, start : start + 8].tobytes(), "big") for start in (starts[0], starts[-1])
        )
        for low, high, right in ((first, last, True), (first + 1, last, False), (first, last - 1, False)):
            bounds = np.array([[low], [high]], np.uint64)
            assert plain_nodes(level[part], numbers[part], *bounds).plain.tolist() == [right]
