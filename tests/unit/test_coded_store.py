"""A store that keeps blocks coded: what its records say, what does not shrink, and what is damaged."""

import errno
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.blocks.codec import checksum
from kvtier.blocks.coding import HEAD_BYTES, UNCODED, Codings
from kvtier.blocks.namespace import NamespaceTable
from kvtier.cli.cmd_gc import gc
from kvtier.cli.cmd_inspect import inspect
from kvtier.errors import CorruptBlock
from kvtier.kernels import quantize
from kvtier.kernels.floats import float_to_bfloat16
from kvtier.testing.tiers import key_of, slot_buffer
from kvtier.tiers.lmdb import layout
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.coding import KEPT_MAX, BlockCoding
from kvtier.tiers.lmdb.index import Change
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import EvictItem, GroupSpec, Outcome, ReadItem, Status, WriteBatch, WriteItem, page_aligned

GROUP = GroupSpec("full", (0,), 1, 64, "bfloat16", 16)
RAW_BYTES = 65_536
CODECS = ("int8", "fp8", "exp4")


def codings(codec: str) -> Codings:
    return Codings(codec, [GROUP])


def kv(number: int) -> bytes:
    """A block that shrinks, with values of all kinds in it."""
    values = np.random.default_rng(number).standard_normal(RAW_BYTES // 2).astype(np.float32)
    bits = float_to_bfloat16(values)
    bits[:6] = [0, 0x8000, 0x0001, 0x7F80, 0xFFC1, 0x7F7F]  # 0, -0, a denormal, infinity, a NaN, the largest
    return bits.tobytes()


def noise(number: int) -> bytes:
    """A block that exp4 makes longer."""
    return np.random.default_rng(number).bytes(RAW_BYTES)


class Store:
    """One store, opened again and again with another codec. Blocks by number."""

    def __init__(self, path: Path, codec: str) -> None:
        self.path, self.namespaces = path, NamespaceTable()
        self.namespaces.id_of(b"f" * 32, b"")
        self.at: dict[int, Outcome] = {}
        self.open(codings(codec))

    def open(self, coded: Codings, **options: object) -> None:
        settings = {"capacity_bytes": 8 << 20, "length_bytes_max": RAW_BYTES, "min_free_bytes": 0}
        settings |= {"durability": "none", "io_threads": 2} | options
        self.tier = LmdbTier.open(self.path, name="disk", namespaces=self.namespaces, codings=coded, **settings)  # type: ignore[arg-type]

    def reopen(self, coded: Codings, **options: object) -> None:
        self.tier.close()
        self.open(coded, **options)

    def write(self, blocks: dict[int, bytes], codec: str = "none") -> list[Outcome]:
        items = [
            WriteItem(key_of(n), len(block), slot_buffer(page_aligned(len(block)), block), codec=codec)
            for n, block in blocks.items()
        ]
        outcomes = self.tier.write(WriteBatch(items))
        self.at |= {n: outcome for n, outcome in zip(blocks, outcomes, strict=True) if outcome.done}
        return outcomes

    def read(self, number: int, length_bytes: int = RAW_BYTES, codec: str = "none") -> tuple[Status, bytes]:
        into = slot_buffer(page_aligned(length_bytes), b"\xee" * page_aligned(length_bytes))
        at = self.at[number]
        (outcome,) = self.tier.read([ReadItem(key_of(number), at.place, at.generation, length_bytes, into, codec)])
        assert not (outcome.done and any(into[length_bytes:]))
        return outcome.status, bytes(into[:length_bytes])

    def record(self, number: int) -> layout.Record:
        key = self._place_key(number)
        (row,) = self.tier._store.index.fetch([key])
        assert row is not None
        return layout.decode_record(key, row)

    def _place_key(self, number: int) -> bytes:
        (slot,) = self.tier._store.allocator.slots_of([self.at[number].place])
        assert slot is not None
        return layout.PLACE_KEY.pack(*slot)

    def spoil(self, number: int, offset: int, *, seal: bool) -> None:
        """Change a byte of the payload on disk; `seal`: and make the record's checksum that of the new bytes."""
        place = self.at[number].place * 4096
        self.tier.close()
        with (self.path / "slab").open("r+b") as file:
            file.seek(place + offset)
            byte = file.read(1)[0]
            file.seek(place + offset)
            file.write(bytes([byte ^ 0x40]))
        self.open(codings("none"))
        if seal:
            self._seal(number, place)

    def _seal(self, number: int, place: int) -> None:
        record, key, change = self.record(number), self._place_key(number), Change()
        with (self.path / "slab").open("rb") as file:
            file.seek(place)
            sealed = record._replace(checksum=checksum(record.key, file.read(record.length_bytes)))
        change.blocks[key] = layout.encode_record(key, sealed)
        self.tier._store.index.commit(change)


def after(block: bytes, codec: str) -> bytes:
    """What comes back of a block that was coded."""
    if codec == "exp4":
        return block
    rows = np.frombuffer(block, np.uint16).reshape(-1, 64)
    return quantize.decode(quantize.encode(rows, "bfloat16", codec), "bfloat16", *rows.shape, codec).tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_a_record_says_how_its_block_is_coded(tmp_path: Path, codec: str) -> None:
    """A reader takes codes for values, or a codec that was switched on saves nothing."""
    store = Store(tmp_path / "s", codec)
    store.write({1: kv(1), 2: kv(2)})
    record = store.record(1)
    assert record.coded is not None
    assert (record.coded.codec, record.raw_bytes) == (codec, RAW_BYTES)
    assert record.stride_bytes == codings(codec).slot_bytes(RAW_BYTES) < RAW_BYTES
    assert record.length_bytes <= record.stride_bytes
    assert store.tier.stride_bytes_at(store.at[1].place) == record.stride_bytes
    assert store.tier.used_bytes() == 2 * record.stride_bytes
    assert store.read(1) == (Status.DONE, after(kv(1), codec))
    store.reopen(codings(codec))
    assert [block.length_bytes for block in store.tier.scan()] == [RAW_BYTES] * 2, "the directory knows raw lengths"
    assert store.read(2) == (Status.DONE, after(kv(2), codec))
    assert store.tier.check() == []
    store.tier.close()


def test_switching_exp4_on_and_off_loses_nothing(tmp_path: Path) -> None:
    """A change of the codec in the YAML makes a store's blocks unreadable."""
    store = Store(tmp_path / "s", "none")
    store.write({1: kv(1)})
    store.reopen(codings("exp4"))
    store.write({2: kv(2)})
    store.reopen(codings("none"))
    store.write({3: kv(3)})
    for coded in (codings("none"), codings("exp4")):
        store.reopen(coded)
        assert len(list(store.tier.scan())) == 3
        assert [store.read(n) for n in (1, 2, 3)] == [(Status.DONE, kv(n)) for n in (1, 2, 3)]
        assert [store.tier.stride_bytes_at(store.at[n].place) < RAW_BYTES for n in (1, 2, 3)] == [False, True, False]
        assert store.tier.check() == []
    gone = store.tier.write(
        WriteBatch(evict=[EvictItem(key_of(n), a.place, a.generation) for n, a in store.at.items()])
    )
    assert [outcome.status for outcome in gone] == [Status.DONE] * 3
    assert store.tier.used_bytes() == 0
    store.tier.close()


def varied(number: int) -> bytes:
    """A block of which exp4 shortens more or less."""
    block = bytearray(kv(number))
    start = len(block) * (number % 5) // 4
    block[start:] = noise(number)[start:]
    return bytes(block)


def test_exp4_values_of_many_lengths_lie_inline(tmp_path: Path) -> None:
    """A value that is longer or shorter than the one before it in its slot brings back bytes of either."""
    store = Store(tmp_path / "other", "none")
    store.tier.close()
    options = {"payload": "inline", "capacity_bytes": 12 << 20, "durability": "batch"}
    store.path = tmp_path / "inline"
    store.open(codings("exp4"), **options)
    kept: dict[int, bytes] = {}
    for batch in range(12):
        blocks = {n: varied(n) for n in range(batch * 6, batch * 6 + 6)}
        leaving = list(kept)[: max(0, len(kept) - 18)]
        evict = [EvictItem(key_of(n), store.at[n].place, store.at[n].generation) for n in leaving]
        assert {outcome.status for outcome in store.tier.write(WriteBatch(evict=evict))} <= {Status.DONE}
        kept = {n: block for n, block in kept.items() if n not in leaving}
        kept |= {n: blocks[n] for n, end in zip(blocks, store.write(blocks), strict=True) if end.done}
        taken_bytes = sum(path.stat().st_blocks * 512 for path in store.path.rglob("*") if path.is_file())
        assert taken_bytes <= 12 << 20
    assert len(kept) > 18
    for _ in range(2):
        assert {n: store.read(n) for n in kept} == {n: (Status.DONE, block) for n, block in kept.items()}
        assert len({store.tier.stride_bytes_at(store.at[n].place) for n in kept}) > 1
        store.reopen(codings("exp4"), **options)
    assert store.tier.check() == []
    store.tier.close()
    assert gc(store.path) == 0
    store.open(codings("exp4"), **options)
    assert {n: store.read(n) for n in kept} == {n: (Status.DONE, block) for n, block in kept.items()}
    store.tier.close()


def test_a_block_that_does_not_shrink_is_kept_as_it_is(tmp_path: Path) -> None:
    """It is refused, or stored longer than it was; its neighbours in the batch get its bytes."""
    store = Store(tmp_path / "s", "exp4")
    store.write({1: kv(1), 2: noise(2), 3: kv(3), 4: noise(4)})
    assert [store.record(n).coded is None for n in (1, 2, 3, 4)] == [False, True, False, True]
    assert store.record(2).length_bytes == store.record(2).stride_bytes == RAW_BYTES
    for n, block in ((1, kv(1)), (2, noise(2)), (3, kv(3)), (4, noise(4))):
        assert store.read(n) == (Status.DONE, block)
    store.reopen(codings("exp4"))
    assert store.read(4) == (Status.DONE, noise(4))
    store.tier.close()


def test_lengths_that_no_codec_shortens(tmp_path: Path) -> None:
    """A block of other groups, or of a page, ends in an exception of the worker."""
    store = Store(tmp_path / "s", "exp4")
    blocks = {n: kv(n)[:length] for n, length in enumerate((1, 127, 4096, 130, 65_408))}
    assert all(outcome.done for outcome in store.write(blocks))
    for n, block in blocks.items():
        assert store.read(n, len(block)) == (Status.DONE, block)
    assert [store.record(n).coded is not None for n in blocks] == [False, False, False, False, True]
    store.tier.close()


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_what_comes_coded_stays_as_it_came(tmp_path: Path, codec: str) -> None:
    """A block that the tier above has coded is coded twice, or given to the top tier as codes."""
    store = Store(tmp_path / "s", codec)
    rows = np.frombuffer(kv(1), np.uint16).reshape(-1, 64)
    coded = quantize.encode(rows, "bfloat16", codec).tobytes()
    assert store.write({1: coded}, codec)[0].done
    assert store.record(1).raw_bytes == RAW_BYTES
    assert store.read(1, len(coded), codec) == (Status.DONE, coded)
    assert store.read(1) == (Status.DONE, after(kv(1), codec))
    other = {"int8": "fp8", "fp8": "int8"}[codec]
    assert store.read(1, len(coded), other)[0] is Status.MISSING, "nobody who wants another codec gets this one"
    assert store.read(1, len(coded))[0] is Status.MISSING
    assert store.write({2: b"\x09" * 64}, codec)[0].status is Status.FAILED, "no coded block at all"
    store.tier.close()


def test_one_batch_of_coded_and_uncoded_blocks(tmp_path: Path) -> None:
    """A raw block that is as long as its neighbour's codes is taken for codes, or the other way round."""
    store = Store(tmp_path / "s", "int8")
    rows = np.frombuffer(kv(1), np.uint16, 3584).reshape(-1, 64)
    coded = quantize.encode(rows, "bfloat16", "int8").tobytes()
    plain = kv(2)[: len(coded)]
    assert len(coded) % 128 == 0, "the raw one is whole rows as well"
    pairs = ((1, coded, "int8"), (2, plain, "none"), (3, coded, "int8"))
    items = [WriteItem(key_of(n), len(b), slot_buffer(page_aligned(len(b)), b), codec=c) for n, b, c in pairs]
    outcomes = store.tier.write(WriteBatch(items))
    store.at = dict(zip((1, 2, 3), outcomes, strict=True))
    assert store.read(3, len(coded), "int8") == (Status.DONE, coded)
    assert store.read(2, len(plain)) == (Status.DONE, after(plain, "int8"))
    assert store.read(1, 7168)[0] is Status.DONE
    store.tier.close()


def test_blocks_of_one_length_share_a_class(tmp_path: Path) -> None:
    """Blocks of two groups, as long as each other but not when coded, are sought in another's extents."""
    groups = [GROUP, GroupSpec("full", (1,), 8, 8, "bfloat16", 16)]
    store = Store(tmp_path / "s", "int8")
    store.reopen(Codings("int8", groups))
    rows = np.frombuffer(kv(1), np.uint16).reshape(-1, 64)
    store.write({1: quantize.encode(rows, "bfloat16", "int8").tobytes()}, "int8")
    store.write({2: kv(2)})
    stride_bytes = Codings("int8", groups).slot_bytes(RAW_BYTES)
    assert stride_bytes > codings("int8").slot_bytes(RAW_BYTES)
    assert [store.tier.stride_bytes_at(store.at[n].place) for n in (1, 2)] == [stride_bytes] * 2
    assert store.read(2) == (Status.DONE, after(kv(2), "int8"))
    store.tier.close()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_head_is_a_corrupt_block(tmp_path: Path, codec: str, verify: bool) -> None:
    """What cannot be decoded is served, or raises in the engine; or `inspect --verify` finds such a store sound."""
    store = Store(tmp_path / "s", codec)
    store.write({1: kv(1), 2: kv(2)})
    store.spoil(1, 4, seal=verify)  # the number of values; without verify nobody looks at the checksum
    store.reopen(codings(codec), verify=verify)
    assert store.read(1)[0] is Status.CORRUPT
    assert store.read(2) == (Status.DONE, after(kv(2), codec))
    store.tier.close()


def test_a_disk_that_refuses_spoils_no_block(tmp_path: Path) -> None:
    """What did not come is decoded, found to be no block and condemned, though it may come the next time."""

    class Refusing(BlockFile):
        refuses = False

        def read(self, buffers: Sequence[memoryview], offset: int) -> int:
            if self.refuses:
                raise OSError(errno.EIO, "no")
            return super().read(buffers, offset)

    store = Store(tmp_path / "s", "int8")
    store.reopen(codings("int8"), open_file=Refusing.open)
    store.write({1: kv(1)})
    Refusing.refuses = True
    store.reopen(codings("int8"), open_file=Refusing.open)  # whose scratch memory is fresh
    assert store.read(1)[0] is Status.FAILED
    Refusing.refuses = False
    assert store.read(1) == (Status.DONE, after(kv(1), "int8"))
    store.tier.close()


def test_inspect_verifies_coded_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store whose blocks cannot be decoded is called sound, and what a codec gains is not told."""
    store = Store(tmp_path / "s", "exp4")
    store.write({1: kv(1), 2: kv(2), 3: noise(3)})
    length_bytes = store.record(1).length_bytes + store.record(2).length_bytes
    store.tier.close()
    assert inspect(store.path, True, verify=True) == 0
    codecs = {row.pop("codec"): row for row in json.loads(capsys.readouterr().out)["codecs"]}
    assert codecs["exp4"] == {"blocks": 2, "raw_bytes": 2 * RAW_BYTES, "payload_bytes": length_bytes}
    assert codecs["none"] == {"blocks": 1, "raw_bytes": RAW_BYTES, "payload_bytes": RAW_BYTES}
    assert inspect(store.path, False) == 0
    assert "2 blocks in exp4: 97.5 KiB for 128.0 KiB, 1.31 times" in capsys.readouterr().out
    store.open(codings("exp4"))
    store.spoil(2, 12, seal=True)
    store.tier.close()
    assert inspect(store.path, True, verify=True) == 1
    (condemned,) = json.loads(capsys.readouterr().out)["condemned"]
    assert condemned["key"] == key_of(2)[4:].hex()


def test_a_reader_without_codecs_leaves_coded_blocks_alone(tmp_path: Path) -> None:
    """A version of before takes codes for KV; one that opens a store without its model's shape crashes."""
    store = Store(tmp_path / "s", "exp4")
    store.write({1: kv(1)})
    record = store.record(1)
    row = layout.encode_record(bytes(8), record)
    assert row[0] == 2, "version 1 readers skip what has another version"
    store.reopen(UNCODED)
    assert store.read(1)[0] is Status.CORRUPT
    store.tier.close()


@pytest.mark.parametrize(("offset", "value"), [(3, 0), (3, 9), (36, 0), (40, 0)])
def test_impossible_coded_records_are_refused(offset: int, value: int) -> None:
    """A codec that does not exist, a block of no bytes or a slot shorter than its block is believed."""
    coded = layout.Coded("exp4", 256, 4096)
    record = layout.Record(1, key_of(1)[4:], 200, 1, 2, 3, coded)  # type: ignore[arg-type]
    place = bytes(8)
    assert layout.decode_record(place, layout.encode_record(place, record)) == record
    body = bytearray(layout.encode_record(place, record)[:-8])
    width = 1 if offset == 3 else 4
    body[offset : offset + width] = value.to_bytes(width, "little")
    with pytest.raises(CorruptBlock):
        layout.decode_record(place, layout._sealed(place, bytes(body)))
    with pytest.raises(CorruptBlock):
        layout.decode_record(place, layout._sealed(place, bytes(body[:38])))


def test_room_counts_coded_slots(tmp_path: Path) -> None:
    """A codec saves disk, and the planner evicts as if it did not; or takes blocks for shorter than they are."""
    store = Store(tmp_path / "s", "int8")
    room = store.tier.room(RAW_BYTES)
    assert room > 1.7 * Store(tmp_path / "plain", "none").tier.room(RAW_BYTES)
    outcomes = store.write({n: kv(n % 5) for n in range(room + 1)})
    assert [outcome.status for outcome in outcomes] == [Status.DONE] * room + [Status.NO_ROOM]
    assert store.tier.room(RAW_BYTES) == 0
    for n in (0, room // 2, room - 1):  # the batch was coded in several pieces
        assert store.read(n) == (Status.DONE, after(kv(n % 5), "int8"))
    store.tier.close()


def test_scratch_memory_is_used_again() -> None:
    """Every batch leaves memory behind, or two batches at once write into the same."""
    coding = BlockCoding(codings("exp4"))
    with coding.scratch(10_000) as first, coding.scratch(10_000) as second:
        first[:1], second[:1] = b"1", b"2"
        assert bytes(first[:1]) == b"1"
    with coding.scratch(5_000) as third, coding.scratch(5_000) as fourth:
        assert {bytes(third[:1]), bytes(fourth[:1])} == {b"1", b"2"}, "memory of before, and for each its own"
        assert len(third) % 4096 == 0
    for size in range(2 * KEPT_MAX):
        with coding.scratch(20_000 + 4096 * size):
            pass
    assert len(coding._scratch) <= KEPT_MAX
    assert HEAD_BYTES == 16
