"""Recorded requests: what is written, what never is, and that it can be replayed."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import kvtier
from kvtier.blocks.hashing import hash_blocks
from kvtier.engine import recorder as recording
from kvtier.engine.hints import Advice
from kvtier.engine.recorder import TraceRecorder
from kvtier.engine.traced import Asked, Said
from kvtier.errors import ConfigError, TraceError
from kvtier.sim.flat import FlatJob
from kvtier.sim.reading import read_trace
from kvtier.sim.replay import Replay
from kvtier.sim.report import TieredJob
from kvtier.sim.setup import Setup
from kvtier.sim.trace import TracedHint
from tests.cache_bench import BLOCK_TOKENS, config_for, finish, prompt

MODEL = bytes(range(32))  # its fingerprint


def keys_of(number, blocks=3):
    return tuple(bytes([number, depth]) * 16 + bytes(4) for depth in range(blocks))


def asked(number, at_s=1.0, blocks=3):
    return Asked(at_s, blocks * BLOCK_TOKENS + 1, 2, keys_of(number, blocks), MODEL)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_a_line_without_tokens(tmp_path):
    """A recording cannot be replayed, or tells what was asked."""
    path = tmp_path / "trace"
    path.touch(0o644)
    writer = TraceRecorder(path, BLOCK_TOKENS, 2048, MODEL, epoch_ms=5000)
    assert writer.note(asked(7, at_s=2.5)) == 0
    writer.close()
    header, line = lines_of(path)
    shape = {"kvtier_trace": 1, "block_tokens": BLOCK_TOKENS, "block_bytes": 2048, "model": MODEL[:16].hex()}
    assert header == shape | {"began": 5000}
    assert line == {"t": 2.5, "in": 13, "out": 2, "ids": [key[:16].hex() for key in keys_of(7)]}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trace = read_trace(path)
    assert (trace.block_tokens, trace.block_bytes, trace.requests[0].blocks) == (BLOCK_TOKENS, 2048, [0, 1, 2])


def test_a_salt_hides_what_a_prompt_is(tmp_path):
    """Whoever has a recording and guesses a prompt sees that somebody asked it."""
    for name, salt in (("a", "one"), ("b", "one"), ("c", "two"), ("d", None)):
        writer = TraceRecorder(tmp_path / name, BLOCK_TOKENS, 2048, MODEL, salt=salt)
        writer.note(asked(1))
        writer.close()
    names = [lines_of(tmp_path / name)[1]["ids"] for name in "abcd"]
    assert names[0] == names[1]
    assert not {*names[0]} & {*names[2]}
    assert not {*names[0]} & {*names[3]}
    assert "one" not in (tmp_path / "a").read_text()
    models = [lines_of(tmp_path / name)[0]["model"] for name in "abcd"]
    assert models[0] == models[1]
    assert len({*models}) == 3
    assert models[3] == MODEL[:16].hex()


def test_it_goes_on_after_a_restart(tmp_path):
    """A restart overwrites what was recorded, or its times begin anew in the middle of the file."""
    path = tmp_path / "trace"
    for epoch_ms in (10_000, 70_000):
        writer = TraceRecorder(path, BLOCK_TOKENS, 2048, MODEL, epoch_ms=epoch_ms)
        writer.note(asked(1, at_s=1.0))
        writer.close()
    assert [line.get("t") for line in lines_of(path)] == [None, 1.0, 61.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_TAIL_BYTES", 150)
        for torn in (b'{"t": 1.5, "i', b"{" * 400):
            whole = path.read_bytes()
            path.write_bytes(whole + torn)
            assert len(read_trace(path).requests) == len(whole.splitlines()) - 1
            TraceRecorder(path, BLOCK_TOKENS, 2048, MODEL).close()
            assert path.read_bytes() == whole


def test_a_recording_counts_from_its_own_beginning(tmp_path):
    """Times count from the machine's boot, also after a file was full: a minute's recording seems to take weeks."""
    path = tmp_path / "trace"
    writer = TraceRecorder(path, BLOCK_TOKENS, 2048, MODEL, epoch_ms=5000, now_s=7200.5, bytes_max=300)
    for at_s in (7201.0, 7202.5, 7203.0, 7204.25):
        writer._write([asked(1, at_s)])
    writer.close()
    began_ms, *times_s = [line.get("began", line.get("t")) for line in lines_of(tmp_path / "trace.1")]
    assert (began_ms, times_s) == (7_205_500, [0.5, 2.0])
    began_ms, *times_s = [line.get("began", line.get("t")) for line in lines_of(path)]
    assert (began_ms, times_s) == (7_208_000, [0.0, 1.25])


def test_only_the_end_of_a_recording_may_be_torn(tmp_path):
    """A damaged trace is taken for a shorter one, and nobody sees that its figures are of less."""
    header, line = '{"kvtier_trace": 1, "block_tokens": 4}\n', '{"t": 1, "in": 4, "ids": [1]}\n'
    for text in (header + '{"t"\n' + line, header + line + '{"t"\n', line + '{"t"'):
        path = tmp_path / "trace"
        path.write_text(text)
        with pytest.raises(TraceError, match="no JSON"):
            read_trace(path)


CHILD = """
import sys, pathlib
from tests.unit.test_recorder import *
writer = TraceRecorder(pathlib.Path(sys.argv[1]), BLOCK_TOKENS, 2048, MODEL)
for number in range(10**9):
    writer.note(asked(number % 256, at_s=number / 1000, blocks=40))
    if number == 2000:
        print("go", flush=True)
"""


def test_a_killed_recorder_leaves_a_trace(tmp_path):
    """A crash takes the recording with it, or leaves what `simulate` refuses."""
    path = tmp_path / "trace"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"go\n"
    while path.stat().st_size < 100_000:
        os.sched_yield()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    found = len(read_trace(path).requests)
    assert found > 50
    TraceRecorder(path, BLOCK_TOKENS, 2048, MODEL).close()
    assert len(read_trace(path).requests) == found


def test_a_full_file_is_set_aside(tmp_path):
    """A recording grows until the disk is full."""
    path = tmp_path / "trace"
    writer = TraceRecorder(path, BLOCK_TOKENS, 2048, MODEL, bytes_max=600)
    for number in range(12):
        writer._write([asked(number)])
    writer.close()
    assert {file.name for file in tmp_path.iterdir()} == {"trace", "trace.1"}
    assert all(file.stat().st_size < 800 for file in tmp_path.iterdir())
    assert lines_of(path)[0] == lines_of(tmp_path / "trace.1")[0]


SHAPE = {"layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "block_tokens": BLOCK_TOKENS}
GROUP = {"kind": "full"} | SHAPE | {"layers": 1}


def asking(path, salt=None, **model):
    """One request to a cache of this model that records."""
    model = {"name": "tiny", "weights_epoch": "v1"} | ({} if "groups" in model else SHAPE) | model
    trace = {"record": str(path)} | ({"salt": salt} if salt else {})
    config = kvtier.load_config({"model": model, "tiers": [{"type": "gpu", "capacity": "64KiB"}], "trace": trace})
    with kvtier.open_sync(config) as cache:
        keys = hash_blocks([*range(9)], config.model)
        cache.release(cache.reserve(cache.match(keys, "test", tokens_max=8), 3))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"weights_epoch": "v2"},
        {"hash": "xxhash_cbor"},
        {"hash_seed": "7"},
        {"layout": "token_major"},
        {"tensor_parallel": 2},
        {"block_tokens": 2 * BLOCK_TOKENS, "layers": 1},
        {"groups": [GROUP, GROUP | {"kv_heads": 1, "head_dim": 32}]},
        {"salt": "s"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_others_name_is_set_aside(tmp_path, change):
    """Blocks of two models, or named in two ways, stand in one recording: it finds what no cache could have found."""
    path = tmp_path / "trace"
    asking(path)
    asking(path)
    before = path.read_bytes()
    assert len(lines_of(path)) == 3
    asking(path, **change)
    assert (tmp_path / "trace.1").read_bytes() == before
    assert len(lines_of(path)) == 2
    asking(path, **change)
    assert len(lines_of(path)) == 3
    assert lines_of(path)[0]["model"] != lines_of(tmp_path / "trace.1")[0]["model"]


def test_a_recording_that_names_no_model_is_read_and_not_continued(tmp_path):
    """Recordings of an earlier version are of no use any more, or go on with the blocks of any model."""
    path = tmp_path / "trace"
    asking(path)
    header, line = lines_of(path)
    del header["model"]
    path.write_text(f"{json.dumps(header)}\n{json.dumps(line)}\n")
    trace = read_trace(path)
    assert (trace.block_tokens, trace.requests[0].blocks) == (BLOCK_TOKENS, [0, 1])
    asking(path)
    assert len(lines_of(path)) == 2
    assert len(read_trace(tmp_path / "trace.1").requests) == 1


@pytest.mark.parametrize("salt", [None, "s"])
def test_weights_that_change_name_other_blocks(tmp_path, salt):
    """A recording finds after new weights what was computed with the old ones, which the cache does not."""
    path = tmp_path / "trace"
    trace = {"record": str(path)} | ({"salt": salt} if salt else {})
    config = config_for(None, host=None, trace=trace)
    found = []
    with kvtier.open_sync(config) as cache:
        keys = hash_blocks([*range(9)], config.model)
        early = cache.match(keys, "test", tokens_max=8)  # looks again when it asks for slots
        for epoch in ("v1", "v2", "v2", "v1"):
            cache.set_weights_epoch(epoch)
            lease = cache.reserve(early if epoch == "v2" and not found[1:] else cache.match(keys, "test"), 3)
            found.append(lease.tokens_ready)
            finish(cache, lease, keys)
    assert found == [0, 0, 8, 8]
    names = [line.get("model") for line in lines_of(path)]
    assert [name == names[2] for name in names] == [False, False, True, True, False]
    assert names[1] is names[4] is None
    assert [request.blocks for request in read_trace(path).requests] == [[0, 1], [2, 3], [2, 3], [0, 1]]
    asking(path, salt)
    assert len(lines_of(path)) == 6  # the configuration's weights: this recording goes on


@pytest.mark.parametrize("content", ["{}\n", "[1]\n", "text\n", "\0" * 3000])
def test_a_file_that_is_no_recording_is_kept(tmp_path, content):
    """A wrong path in the YAML costs somebody a file."""
    path = tmp_path / "trace"
    path.write_text(content + "\n")
    TraceRecorder(path, BLOCK_TOKENS, 2048, MODEL).close()
    assert (tmp_path / "trace.1").read_text() == content + "\n"
    assert len(lines_of(path)) == 1


def test_a_full_disk_loses_requests_and_says_so_once(tmp_path, monkeypatch, caplog):
    """A full disk stops the cache, fills the log, or leaves half a line in the middle of the file."""
    path = tmp_path / "trace"
    writer = TraceRecorder(path, BLOCK_TOKENS, 2048, MODEL)
    writer._write([asked(1)])
    whole, write = path.read_bytes(), os.write

    def full(file, data):
        if len(data) > 20:
            return write(file, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recording.os, "write", lambda file, data: full(file, data[:30]))
    for number in range(3):
        writer._write([asked(number), asked(number)])
    assert path.read_bytes() == whole
    monkeypatch.undo()
    assert sum("not recorded" in text for text in caplog.messages) == 1
    assert writer.note(asked(9)) == 6
    writer.close()
    assert len(read_trace(path).requests) == 2


def test_a_slow_disk_is_not_waited_for(tmp_path, monkeypatch):
    """Every request waits for the recording, or memory fills with what it has not written."""
    monkeypatch.setattr(recording, "QUEUED_MAX", 4)
    monkeypatch.setattr(TraceRecorder, "_run", lambda self: None)
    writer = TraceRecorder(tmp_path / "trace", BLOCK_TOKENS, 2048, MODEL)
    assert sum(writer.note(asked(number)) for number in range(10)) == 6


def test_what_cannot_be_written_is_refused_at_the_start(tmp_path):
    """A typing error in the path is found when the recording is wanted."""
    (tmp_path / "folder").mkdir()
    for path in ("folder", "nowhere/trace"):
        config = config_for(None, host=None, trace={"record": str(tmp_path / path)})
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            kvtier.open_sync(config)
        assert caught.value.path == "trace.record"
    first = TraceRecorder(tmp_path / "trace", BLOCK_TOKENS, 2048, MODEL)
    with pytest.raises(ConfigError, match="another cache writes it"):
        TraceRecorder(tmp_path / "trace", BLOCK_TOKENS, 2048, MODEL)
    first.close()


@pytest.mark.parametrize("host", [None, "128KiB"])
def test_the_simulator_finds_what_the_engine_found(tmp_path, host):
    """A recording is of other requests than those that were served, or a simulation of it means nothing."""
    path = tmp_path / "trace.jsonl"
    limits = {"governor": False, "load_deadline": "1h"}
    config = config_for(None, host=host, limits=limits, trace={"record": str(path), "salt": "s"})
    began_ms = time.time() * 1000
    with kvtier.open_sync(config) as cache:
        for number in (1, 2, 1, 3, 4, 2, 5, 1, 6, 1, 2):
            tokens = [number * 1000 + i for i in range((number % 3 + 2) * BLOCK_TOKENS + 1)]
            keys = hash_blocks(tokens, config.model)
            match = cache.match(keys, "test", tokens_max=len(tokens) - 1)
            cache.release(cache.match(keys, "who only looks", tokens_max=len(tokens) - 1))
            finish(cache, cache.reserve(match, number % 3 + 3), keys)
            while cache._engine.call(lambda core, now_s: core.busy):
                pass
        stats = cache.stats()
    assert (stats["traced_requests"], stats["traces_lost"]) == (11, 0)
    took_ms = time.time() * 1000 - began_ms
    assert began_ms - 2 <= lines_of(path)[0]["began"] <= began_ms + took_ms
    assert lines_of(path)[-1]["t"] <= (took_ms + 2) / 1000  # and not since the machine's boot
    trace = read_trace(path)
    replay = Replay(trace, Setup(config, trace.block_tokens))
    replay.run()
    found = replay.core.stats()
    assert stats["restored_tokens"] > 0
    assert found["restored_tokens"] == stats["restored_tokens"]
    for tier in stats["tiers"]:
        assert found["tiers"][tier]["restored_tokens"] == stats["tiers"][tier]["restored_tokens"]


def groups_of(*lengths):
    """A model with a group for each length: for 4 tokens 2 KiB of the first, 1 KiB of any other."""
    return [GROUP | {"block_tokens": length, "layers": 1 if index else 2} for index, length in enumerate(lengths)]


def serve_groups(cache, model, number, tokens):
    """One request; it commits what it has computed. Returns how much was found."""
    keys = hash_blocks([number * 1000 + i for i in range(tokens)], model)
    sizes = keys.block_tokens
    lease = cache.reserve(cache.match(keys, "test", tokens_max=tokens - 1), -(-tokens // sizes[0]))
    for group, (row, size) in enumerate(zip(keys.groups, sizes, strict=True)):
        cache.commit(lease, list(zip(lease.slots(group), row, strict=False))[lease.tokens_ready // size :])
    cache.release(lease)
    return lease.tokens_ready


@pytest.mark.parametrize(("lengths", "block_tokens"), [((4, 16), 16), ((16, 4), 16), ((8, 12), 24), ((4, 4), 4)])
def test_a_recorded_block_is_whole_in_every_group(tmp_path, lengths, block_tokens):
    """A size in bytes counts the long blocks of one group for each short one of another, or half a long block is
    found."""
    path = tmp_path / "trace.jsonl"
    model = {"name": "hybrid", "weights_epoch": "v1", "groups": groups_of(*lengths)}
    tiers = [{"type": "gpu", "capacity": "4MiB"}]
    config = kvtier.load_config({"model": model, "tiers": tiers, "trace": {"record": str(path)}})
    with kvtier.open_sync(config) as cache:
        asked = [(1, 61), (1, 61), (1, 23), (2, 101), (2, 47), (2, 3), (1, 25), (2, 97)]
        found = [serve_groups(cache, config.model, *request) for request in asked]
    trace = read_trace(path)
    assert (trace.block_tokens, trace.block_bytes) == (block_tokens, block_tokens // 4 * (2048 + 1024))
    assert [request.tokens_in for request in trace.requests] == [tokens for _, tokens in asked]
    assert [len(request.blocks) for request in trace.requests] == [tokens // block_tokens for _, tokens in asked]
    assert FlatJob("lru", 1000, "request").run(trace).found.prefix_tokens == sum(found) > 0
    apart = [request._replace(at_s=10.0 * number) for number, request in enumerate(trace.requests)]
    replay = Replay(replace(trace, requests=apart), Setup(config, trace.block_tokens))
    replay.run()
    assert replay.core.stats()["restored_tokens"] == sum(found)


SPOKEN = [
    {"ends": True},
    {"returns_in_s": 20.0},
    {"priority": -1},
    {"priority": 0, "returns_in_s": 0.0},
    {"priority": 1, "ttl_s": 3.0},
    {"pin": True, "ttl_s": 60.0},
]


def test_hints_are_recorded_as_they_were_said(tmp_path):
    """A simulation of a recording hears of other hints, or at another time, or of another session."""
    path = tmp_path / "trace.jsonl"
    config = config_for(None, trace={"record": str(path), "salt": "s"})
    with kvtier.open_sync(config) as cache:
        keys = prompt(config, 1, 3)
        finish(cache, cache.reserve(cache.match(keys, "test", session="Mrs Miller"), 3), keys)
        for said in SPOKEN:
            cache.hint("Mrs Miller", **said)
        cache.hint("nobody", pin=False)
        cache.release(cache.reserve(cache.match(keys, "test"), 3))
        assert cache.stats()["traces_lost"] == 0
    assert "Miller" not in path.read_text()
    trace = read_trace(path)
    first, second = trace.requests
    assert (len(first.session), second.session) == (32, None)
    told = [TracedHint(hint.at_s, first.session, 0, **said) for hint, said in zip(trace.hints, SPOKEN, strict=False)]
    assert [*trace.hints[:-1]] == told
    assert trace.hints[-1]._replace(at_s=0.0, session="") == TracedHint(0.0, "", None, priority=0)
    assert [hint.at_s for hint in trace.hints] == sorted(hint.at_s for hint in trace.hints)
    assert first.at_s <= trace.hints[0].at_s


def test_a_salt_hides_who_spoke(tmp_path):
    """Whoever has a recording and guesses a session's name sees when its owner was there."""
    names = {}
    for name, salt, session in (
        ("a", "one", "x"),
        ("b", "one", "x"),
        ("c", "two", "x"),
        ("d", None, "x"),
        ("e", "one", "y"),
    ):
        writer = TraceRecorder(tmp_path / name, BLOCK_TOKENS, 2048, MODEL, salt=salt)
        writer.note(Asked(1.0, 5, 0, keys_of(1, 1), MODEL, session))
        writer.note(Said(2.0, session, Advice(ends=True)))
        writer.close()
        (names[name],) = {line["session"] for line in lines_of(tmp_path / name)[1:]}
    assert names["a"] == names["b"]
    assert len({*names.values()}) == 4


def test_a_recording_with_hints_finds_what_the_engine_found(tmp_path):
    """As above, of a cache that was told which sessions end: without that the simulation finds something else."""
    path = tmp_path / "trace.jsonl"
    limits = {"governor": False, "load_deadline": "1h"}
    config = config_for(None, host=None, limits=limits, trace={"record": str(path)})
    with kvtier.open_sync(config) as cache:
        for turn in range(60):
            number = turn % 3 if turn % 2 else turn + 10  # three sessions that go on, and many that end at once
            tokens = [number * 1000 + i for i in range(3 * BLOCK_TOKENS + 1)]
            keys = hash_blocks(tokens, config.model)
            match = cache.match(keys, "test", session=str(number), tokens_max=len(tokens) - 1)
            finish(cache, cache.reserve(match, 4), keys)
            if number >= 10:
                cache.hint(str(number), ends=True)
            while cache._engine.call(lambda core, now_s: core.busy):
                pass
        stats = cache.stats()
    assert stats["traces_lost"] == 0
    trace = read_trace(path)
    setup = Setup(config, trace.block_tokens)
    replay = Replay(trace, setup)
    replay.run()
    found = replay.core.stats()
    assert (found["hints"], found["restored_tokens"]) == (stats["hints"], stats["restored_tokens"])
    assert found["tiers"]["gpu"]["hinted_blocks"] == stats["tiers"]["gpu"]["hinted_blocks"] > 0
    silent = TieredJob(Setup(config, trace.block_tokens, recorded_hints=False)).run(trace)
    assert silent.prefix_tokens < stats["restored_tokens"]


def test_a_lookup_is_recorded_once_and_stores_are_not(tmp_path):
    """A request that has to ask for slots twice counts twice, or a foreign engine's stores are taken for requests."""
    from kvtier.engine.polled import Store

    path = tmp_path / "trace.jsonl"
    config = config_for(None, trace={"record": str(path)})
    with kvtier.open_sync(config) as cache:
        keys = prompt(config, 1, 3)
        match = cache.match(keys, "test")
        assert not isinstance(cache.reserve(match, 100), kvtier.Lease)
        lease = cache.reserve(match, 3)
        finish(cache, lease, keys)
        cache.submit(Store(prompt(config, 2, 2), "foreign"))
    [request] = read_trace(path).requests
    assert (request.tokens_in, len(request.blocks)) == (3 * BLOCK_TOKENS, 3)


def test_a_recorded_prompt_is_no_shorter_than_its_blocks(tmp_path):
    """A lookup of a part of a prompt is recorded as a shorter one, or an answer as if the prompt were a part of it."""
    path = tmp_path / "trace.jsonl"
    config = config_for(None, trace={"record": str(path)})
    with kvtier.open_sync(config) as cache:
        keys = prompt(config, 1, 3)
        for tokens_max, blocks_total in ((BLOCK_TOKENS, 5), (3 * BLOCK_TOKENS + 2, 5), (None, 2)):
            match = cache.match(keys, "test", tokens_max=tokens_max)
            cache.release(cache.reserve(match, blocks_total))
    requests = read_trace(path).requests
    assert [(request.tokens_in, request.tokens_out) for request in requests] == [(12, 8), (15, 5), (12, 0)]
