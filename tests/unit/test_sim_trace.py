"""Traces of every kind and packing, and whatever else somebody may name as one."""

import gzip
import json
import lzma
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtier.errors import TraceError
from kvtier.sim import packed
from kvtier.sim.packed import stem_of
from kvtier.sim.reading import read_trace
from kvtier.sim.trace import Trace, TracedRequest

OURS = [
    {"t": 0.5, "in": 1100, "out": 7, "ids": [10, 11, 12]},
    {"t": 2.0, "in": 1024, "out": 0, "ids": [10, 4]},
]
READ = [TracedRequest(0.5, 1100, 7, [0, 1, 2]), TracedRequest(2.0, 1024, 0, [0, 3])]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def refused(path: Path, **options: Any) -> TraceError:
    with pytest.raises(TraceError) as error:
        read_trace(path, **options)
    assert str(path) in str(error.value)
    return error.value


def test_our_lines(tmp_path: Path) -> None:
    """A request's time, tokens or blocks are read wrongly, or equal blocks get two numbers."""
    trace = read_trace(written(tmp_path / "a.jsonl", OURS))
    assert trace == Trace("a", 512, None, READ)
    assert (trace.accesses, trace.unique_blocks, trace.input_tokens, trace.span_s) == (5, 4, 2124, 1.5)
    assert [trace.prefix_tokens(READ[0], blocks) for blocks in range(4)] == [0, 512, 1024, 1100]


def test_mooncakes_lines(tmp_path: Path) -> None:
    """Milliseconds are taken for seconds, or the published traces cannot be read at all."""
    lines = [
        {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [46, 47]},
        {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [46]},
    ]
    trace = read_trace(written(tmp_path / "m.jsonl", lines))
    assert trace.requests == [TracedRequest(1.5, 600, 3, [0, 1]), TracedRequest(3.0, 512, 1, [0])]


def test_a_recorded_trace_says_what_a_block_is(tmp_path: Path) -> None:
    """Blocks of 16 tokens are taken for 512, and their names, which are texts, for no names."""
    lines = [{"kvtier_trace": 1, "block_tokens": 16, "block_bytes": 4096}, {"t": 0, "in": 40, "ids": ["ab", "cd"]}]
    trace = read_trace(written(tmp_path / "r.jsonl", lines), block_tokens=512)
    assert trace == Trace("r", 16, 4096, [TracedRequest(0.0, 40, 0, [0, 1])])


@pytest.mark.parametrize("header", [{}, {"model": "a"}])
def test_a_name_is_of_its_model(tmp_path: Path, header: dict[str, str]) -> None:
    """One hash under two models is taken for one block, and what one has computed is found by the other."""
    first = {"kvtier_trace": 1, "block_tokens": 16} | header
    models: list[dict[str, str]] = [{}, {"model": "b"}, header, {"model": "b"}, {"model": "c"}]
    lines = [first, *({"t": 0, "in": 16, "ids": ["x"]} | model for model in models)]
    trace = read_trace(written(tmp_path / "r.jsonl", lines))
    assert [request.blocks for request in trace.requests] == [[0], [1], [0], [1], [2]]
    for bad in (first | {"model": 5}, lines[1] | {"model": ["b"]}):
        assert "'model'" in refused(written(tmp_path / "b.jsonl", [bad, *lines[1:]])).problem


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zst"])
def test_packings(tmp_path: Path, suffix: str) -> None:
    """A packed trace has to be unpacked by hand."""
    data = "".join(json.dumps(line) + "\n\n" for line in OURS).encode()  # empty lines are passed over
    pack: Any = PACKERS.get(suffix, bytes)
    path = tmp_path / f"some.trace.jsonl{suffix}"
    path.write_bytes(pack(data))
    assert read_trace(path) == Trace("some.trace", 512, None, READ)


def zstd_of(data: bytes) -> bytes:
    module: Any = packed._zstd_module() or pytest.skip("without kvtier[zstd]")
    packed_data: bytes = module.compress(data)
    return packed_data


PACKERS: dict[str, Any] = {".xz": lzma.compress, ".gz": gzip.compress, ".zst": zstd_of}


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("suffix", PACKERS)
def test_half_a_packed_file_is_none(tmp_path: Path, suffix: str, header: bool) -> None:
    """A download that broke off is simulated as a shorter trace, or said to be no JSON; a recording may lack a line."""
    rng = random.Random(1)
    lines = [{"kvtier_trace": 1, "block_tokens": 512}] * header
    lines += [{"t": n, "in": 512, "ids": [rng.randrange(1 << 60)]} for n in range(3000)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path, pack = tmp_path / f"t.jsonl{suffix}", PACKERS[suffix]
    whole = pack(data)
    path.write_bytes(pack(data[: len(data) // 2]) + pack(data[len(data) // 2 :]))  # one behind the other is one file
    assert len(read_trace(path).requests) == 3000
    for part in (0.6, 0.001, 0.999):
        path.write_bytes(whole[: int(part * len(whole))])
        assert "packing is damaged" in refused(path).problem
    path.write_bytes(pack(data[:-5]))  # of a recording that was packed while it was written
    assert "no JSON" in refused(path).problem if not header else len(read_trace(path).requests) == 2999


@pytest.mark.parametrize("suffix", PACKERS)
def test_what_is_not_packed_as_it_is_called(tmp_path: Path, suffix: str) -> None:
    """A name that is wrong ends in a traceback of whoever unpacks."""
    zstd_of(b"") if suffix == ".zst" else None
    error = refused(written(tmp_path / f"a.jsonl{suffix}", OURS))
    assert "packing is damaged" in error.problem
    assert suffix in error.remedy


def test_zstd_takes_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .zst is read as if it were text, or not at all although a decoder is there; without one nobody says why."""
    path = written(tmp_path / "z.jsonl.zst", OURS)
    monkeypatch.setattr(packed, "ZSTD_MODULES", ("no_such_decoder",))
    error = refused(path)
    assert "no decoder" in error.problem
    assert "zstd -d" in error.remedy
    decoder: Any = ModuleType("a_decoder")
    decoder.open = lambda file, mode: file.open(mode)  # as those packages do it, but for the packing
    decoder.ZstdError = ValueError
    monkeypatch.setitem(sys.modules, "a_decoder", decoder)
    monkeypatch.setattr(packed, "ZSTD_MODULES", ("no_such_decoder", "a_decoder"))
    assert read_trace(path).requests == READ


def test_names_without_suffixes() -> None:
    """A run is called after the packing of its trace."""
    names = ["a.jsonl", "a.jsonl.xz", "a.json.gz", "a", "a.b.jsonl.zst"]
    assert [stem_of(Path("x") / name) for name in names] == ["a", "a", "a", "a", "a.b"]


BROKEN: dict[str, Any] = {
    "no JSON": "{",
    "no request": {"a": 1},
    "a number": 5,
    "null": None,
    "no ids": {"t": 1, "in": 5},
    "ids that are none": {"t": 1, "in": 5, "ids": [1.5]},
    "ids of truth": {"t": 1, "in": 5, "ids": [True]},
    "ids in no list": {"t": 1, "in": 5, "ids": "ab"},
    "a block twice": {"t": 1, "in": 1024, "ids": [3, 3]},
    "too many blocks": {"t": 1, "in": 512, "ids": [1, 2]},
    "no tokens": {"t": 1, "in": 0, "ids": []},
    "negative tokens": {"t": 1, "in": -5, "ids": []},
    "half a token": {"t": 1, "in": 5.5, "ids": [1]},
    "tokens beyond all": {"t": 1, "in": 1 << 70, "ids": [1]},
    "no time": {"in": 5, "ids": [1]},
    "a time before the start": {"t": -1, "in": 5, "ids": [1]},
    "no number for a time": {"t": "1", "in": 5, "ids": [1]},
    "endless time": {"t": float("inf"), "in": 5, "ids": [1]},
    "time beyond all": {"t": 10**400, "in": 5, "ids": [1]},
    "time that is none": {"t": float("nan"), "in": 5, "ids": [1]},
    "a wrong answer": {"t": 1, "in": 5, "out": -1, "ids": [1]},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, what: str) -> None:
    """Somebody searches a file of a million lines for the one that is wrong, or reads our traceback."""
    line = BROKEN[what]
    path = written(tmp_path / "a.jsonl", OURS)
    with path.open("a", encoding="utf-8") as file:
        file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    error = refused(path)
    assert error.line == 3
    assert f"{path}, line 3: {error.problem}. {error.remedy}" == str(error)


@pytest.mark.parametrize(
    "line",
    [
        {"kvtier_trace": 2, "block_tokens": 16},
        {"kvtier_trace": True, "block_tokens": 16},
        {"kvtier_trace": 1},
        {"kvtier_trace": 1, "block_tokens": 0},
        {"kvtier_trace": 1, "block_tokens": 1 << 30},
        {"kvtier_trace": 1, "block_tokens": 16, "block_bytes": "4KiB"},
    ],
    ids=str,
)
def test_a_broken_header_is_refused(tmp_path: Path, line: dict[str, Any]) -> None:
    """A file of another version, or of blocks of no size, is read as something that it is not."""
    assert refused(written(tmp_path / "a.jsonl", [line, *OURS])).line == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, suffix: str) -> None:
    """A trace that an editor has saved is said to be no JSON, by a character that nobody sees."""
    data = b"\xef\xbb\xbf" + "".join(json.dumps(line) + "\n" for line in OURS).encode()
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    assert read_trace(path).requests == READ


def test_files_that_hold_no_trace(tmp_path: Path) -> None:
    """A file that is missing, empty, damaged or no text ends in a traceback."""
    assert "No such file" in refused(tmp_path / "none.jsonl").problem
    assert "directory" in refused(tmp_path).problem
    assert "no request" in refused(written(tmp_path / "empty.jsonl", [])).problem
    assert "no request" in refused(written(tmp_path / "h.jsonl", [{"kvtier_trace": 1, "block_tokens": 4}])).problem
    for name, data in (("a.xz", b"no xz"), ("b.xz", lzma.compress(b"{}" * 99)[:-20]), ("c.gz", b"no gz")):
        (tmp_path / name).write_bytes(data)
        assert "packing is damaged" in refused(tmp_path / name).problem
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(OURS[0]).encode() * 50)[:-12])
    assert "packing is damaged" in refused(tmp_path / "cut.gz").problem
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "no UTF-8" in refused(tmp_path / "binary").problem
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 200_000, encoding="utf-8")
    assert refused(deep).line == 1


# ---------------------------------------------------------------- events of vLLM


def stored(names: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": []}
    return event | {"block_size": 16, "medium": "GPU"} | more


def test_events_become_requests(tmp_path: Path) -> None:
    """Of a log of events no prompt can be made: a parent is forgotten, or each chunk is a prompt of its own."""
    log = [
        {"ts": 100.0, "events": [stored([1, 2])]},
        {"ts": 100.5, "events": [stored([3], parent=2), {"type": "BlockRemoved", "block_hashes": [9]}]},
        {"ts": 200.0, "events": [stored([4, 5], parent=2)]},  # another request with the same beginning
        {"ts": 300.0, "events": [stored([6], parent=5)]},  # much later: a request that goes on from there
        {"ts": 301.0, "events": [{"type": "AllBlocksCleared"}, stored([8], parent=7)]},  # of before the log
    ]
    trace = read_trace(written(tmp_path / "e.jsonl", log), block_tokens=512)
    assert trace.block_tokens == 16
    assert trace.requests == [
        TracedRequest(0.0, 48, 0, [0, 1, 2]),
        TracedRequest(100.0, 64, 0, [0, 1, 3, 4]),
        TracedRequest(200.0, 80, 0, [0, 1, 3, 4, 5]),
        TracedRequest(201.0, 32, 0, [6, 7]),
    ]


def test_events_as_arrays(tmp_path: Path) -> None:
    """Logs of older vLLM, which wrote its events as arrays, cannot be read."""
    log = [[5.0, [["BlockStored", ["aa", "bb"], None, [1, 2], 4, None]]], [6.0, [["BlockRemoved", ["aa"]]], 0]]
    assert read_trace(written(tmp_path / "e.jsonl", log)).requests == [TracedRequest(0.0, 8, 0, [0, 1])]


def test_ranks_store_for_requests_of_their_own(tmp_path: Path) -> None:
    """What one engine computes is taken for the continuation of another's request."""
    alike = [{"ts": ts, "data_parallel_rank": rank, "events": [stored([1, 2])]} for ts, rank in ((0.0, 0), (0.1, 1))]
    log = [*alike, [0.2, [stored([3], parent=2)], 0], [0.3, [stored([4], parent=2)], 1]]
    requests = read_trace(written(tmp_path / "e.jsonl", log)).requests
    assert [request.blocks for request in requests] == [[0, 1, 2], [0, 1, 3]]


def test_copies_below_are_no_requests(tmp_path: Path) -> None:
    """A block that was offloaded counts as one that somebody asked for."""
    below = [stored([1], medium=medium) for medium in ("CPU", "STORAGE")]
    log = [{"ts": 0, "events": [stored([1, 2]), *below, stored([1], group_idx=1)]}]
    assert len(read_trace(written(tmp_path / "e.jsonl", log)).requests) == 1
    as_list = ["BlockStored", [1], None, [], 32, None, "GPU", None, None, 1]
    assert len(read_trace(written(tmp_path / "l.jsonl", [*log, [1, [as_list]]])).requests) == 1


@pytest.mark.parametrize(
    "batch",
    [
        {"ts": "now", "events": []},
        {"ts": 1.0, "events": {}},
        [1.0],
        [1.0, [], "rank"],
        7,
        {"ts": 1.0, "events": [7]},
        {"ts": 1.0, "events": [{"type": 7}]},
        {"ts": 1.0, "events": [stored([])]},
        {"ts": 1.0, "events": [stored([1.5])]},
        {"ts": 1.0, "events": [stored([3], parent=[1])]},
        {"ts": 1.0, "events": [stored([3], block_size=0)]},
        {"ts": 1.0, "events": [stored([3], block_size=32)]},
        {"ts": 1.0, "events": [stored([3, 3])]},
        {"ts": 1.0, "events": [stored([3], parent=3)]},
        {"ts": 1.0, "events": [stored([1], parent=2), stored([9], parent=1)]},
    ],
    ids=lambda batch: str(batch)[:60],
)
def test_a_broken_batch_is_named(tmp_path: Path, batch: Any) -> None:
    """A log that is none ends in a traceback, or in an endless search for the beginning of a prompt."""
    path = written(tmp_path / "e.jsonl", [{"ts": 0.0, "events": [stored([1, 2])]}, batch])
    assert refused(path).line == 2


def test_a_log_without_requests(tmp_path: Path) -> None:
    """An empty log is taken for a trace, and something is divided by nothing later."""
    assert "no request" in refused(written(tmp_path / "e.jsonl", [{"ts": 0.0, "events": []}])).problem
