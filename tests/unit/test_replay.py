"""The logs of vLLM's own manager, replayed on ours; and that the replay would see a difference."""

import json
import lzma
import pathlib

import pytest

from kvtier.testing.replay import main, replay
from tests.compat.test_kept_logs import LOGS

FULL, RICH, FINE = [
    next(path for path in LOGS if path.name.startswith(kind)) for kind in ("full_0_", "richswa_", "mambahash_")
]
NAME = RICH.name.removesuffix(".xz")
# By field: the log to change it in, and another value of the same type.
CHANGES = {
    "table": (RICH, lambda tables: tables | {next(iter(tables)): [[99], [99]]}),
    "hit": (RICH, lambda tokens: tokens + 4),
    "hit_blocks": (RICH, lambda groups: [*groups[1:], [99]]),
    "boundary": (RICH, lambda tokens: tokens + 4),
    "new": (RICH, lambda groups: [[99], *groups[1:]]),
    "load_blocks": (RICH, lambda groups: [[99], *groups[1:]]),
    "after_load_alloc": (RICH, lambda names: names | {"1": "0123456789ab"}),
    "free": (RICH, lambda blocks: blocks[1:] + blocks[:1]),
    "nfree": (RICH, lambda count: count + 1),
    "refs": (RICH, lambda counts: counts | {next(iter(counts)): 9}),
    "cached": (RICH, lambda names: names | {next(iter(names)): "0123456789ab"}),
    "events": (RICH, lambda events: [*events[:-1], events[-1] + "9"]),
    "ok": (RICH, lambda done: not done),
    "freed": (RICH, lambda freed: not freed),
    "copies": (FINE, lambda copies: [[target, source] for source, target in copies]),
    "stats": (RICH, lambda stats: stats | {"hits": stats["hits"] + 1}),
    "hit ": (FULL, lambda tokens: tokens + 4),
    "events ": (FULL, lambda events: [*events[:-1], events[-1] + "9"]),
    "stats ": (FULL, lambda stats: stats | {"queries": stats["queries"] + 1}),
}


def rows_of(path):
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def changed(field, folder):
    """A copy of a log in which one value of one line is another."""
    path, change = CHANGES[field]
    name = field.strip()
    rows = rows_of(path)
    at = max(i for i, row in enumerate(rows) if row.get(name) and (name not in ("hit_blocks",) or row["hit"]))
    rows[at][name] = change(rows[at][name])
    return written(folder / path.name.removesuffix(".xz"), rows), at + 1, name


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_our_manager_decides_like_vllm(path):
    """Some table, hit, order of free blocks, name, event, copy or counter is not vLLM's."""
    assert replay(path) == []


def test_the_logs_cover_what_vllm_can_be_asked():
    """A kind of attention, or a feature of the manager, is compared with nothing."""
    configs = [rows_of(path)[0].get("config", {"groups": [{"kind": "full"}], "caching": True}) for path in LOGS]
    groups = [group for config in configs for group in config["groups"]]
    assert {group["kind"] for group in groups} == {"full", "mla", "sliding_window", "chunked_local", "mamba", "cross"}
    assert {group.get("mode") for group in groups} == {None, "align", "all"}
    assert any(group.get("speculative_blocks") for group in groups)
    assert any(group.get("retained_tokens") for group in groups)
    assert any(group.get("eagle") for group in groups)
    assert any(len({group["block_tokens"] for group in config["groups"]}) > 1 for config in configs[3:])
    assert {config["caching"] for config in configs} == {True, False}
    assert any(config.get("eagle") and not any(g["eagle"] for g in config["groups"]) for config in configs)
    assert {0, None} < {config.get("retention_tokens") for config in configs}
    assert any(config.get("watermark") for config in configs)
    rows = [row for path in LOGS for row in rows_of(path)]
    operations = {row.get("op") for row in rows} - {None}
    assert operations == {"new", "resume", "chunk", "decode", "preempt", "free", "evict", "reset"}
    for extra in ("salt", "lora", "mm", "drafts", "ext", "must_fit", "reserved", "same_step", "copies", "boundary"):
        assert any(row.get(extra) for row in rows), extra


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_is_compared(field, tmp_path):
    """A difference from vLLM in this field is not reported: zero mismatches would mean nothing."""
    path, line, name = changed(field, tmp_path)
    (found,) = replay(path)
    assert found.startswith(f"line {line}: {name} is ")


@pytest.mark.parametrize("field", ["hit", "new", "table", "free", "refs", "events"])
def test_a_field_that_the_log_does_not_have_is_missed(field, tmp_path):
    """A log that lost a field replays as if it agreed."""
    rows = rows_of(RICH)
    at = next(i for i, row in enumerate(rows) if i and row.get(field))
    del rows[at][field]
    found = replay(written(tmp_path / NAME, rows))
    assert any(text.startswith(f"line {at + 1}: {field} is") for text in found)


def test_a_deed_that_differs_is_seen_in_what_follows(tmp_path):
    """An operation that our manager did not do goes unnoticed."""
    rows = rows_of(RICH)
    at = next(i for i, row in enumerate(rows) if row.get("op") == "free")
    del rows[at]
    found = replay(written(tmp_path / NAME, rows))
    assert found[0].startswith(f"line {at + 1}: ")


@pytest.mark.parametrize("path", [FULL, RICH], ids=["plain", "rich"])
def test_a_log_that_was_cut_is_seen(path, tmp_path):
    """The first lines of a log, or one without its statistics, count as agreement."""
    rows, steps = rows_of(path), int(path.name.split("_")[2])
    name = path.name.removesuffix(".xz")
    count = f"operations, but the file's name says {steps}"
    no_stats = "the last line has no stats: the log is cut"
    assert replay(written(tmp_path / name, rows[:5])) == [f"line 5: {no_stats}", f"line 5: 4 {count}"]
    assert replay(written(tmp_path / name, rows[:1])) == [f"line 1: {no_stats}", f"line 1: 0 {count}"]
    assert replay(written(tmp_path / name, rows[:-1])) == [f"line {len(rows) - 1}: {no_stats}"]
    found = replay(written(tmp_path / name, [*rows, rows[-1]]))
    assert f"line {len(rows) + 1}: there is more after the stats of line {len(rows)}, which end a log" in found


def test_a_name_that_says_no_steps_promises_none(tmp_path):
    """A log of one's own must bear vLLM's name."""
    rows = rows_of(RICH)
    assert replay(written(tmp_path / "mine.jsonl", rows)) == []
    assert replay(written(tmp_path / "mine.jsonl", rows[:5])) == ["line 5: the last line has no stats: the log is cut"]


@pytest.mark.parametrize("block", [7, None])
def test_the_null_block_is_compared(block, tmp_path):
    """A manager that hands out the block which another keeps for padding agrees with it."""
    rows = rows_of(RICH)
    rows[0]["null_block"] = block
    assert replay(written(tmp_path / NAME, rows)) == [f"line 1: null_block is 0, not {block}"]
    del rows[0]["null_block"]
    assert replay(written(tmp_path / NAME, rows)) == ["line 1: null_block is 0, not in the log"]


@pytest.mark.parametrize("path", [FULL, RICH], ids=["plain", "rich"])
def test_a_field_that_nothing_is_done_with_is_seen(path, tmp_path):
    """A log says more than is compared, and is said to agree."""
    rows = rows_of(path)
    operations = {row.get("op", "stats" if "stats" in row else "init"): at for at, row in enumerate(rows)}
    assert len(operations) >= 5
    for at in operations.values():
        changed = [row | {"surprise": 1} if i == at else row for i, row in enumerate(rows)]
        (found,) = replay(written(tmp_path / path.name.removesuffix(".xz"), changed))
        assert found == f"line {at + 1}: surprise is in the log, but neither says what to do nor is compared"
    strange = "token" if path is RICH else "tokens"
    rows[operations["decode"]][strange] = [1]
    (found,) = replay(written(tmp_path / path.name.removesuffix(".xz"), rows))
    assert f"{strange} is in the log" in found


def test_a_setting_that_nothing_is_done_with_is_seen(tmp_path):
    """A log was written under a setting that our manager does not have, and is said to agree."""
    rows = rows_of(RICH)
    rows[0]["config"]["sink"] = 4
    rows[0]["config"]["groups"][0]["window"] = 4
    assert replay(written(tmp_path / NAME, rows)) == [
        "line 1: config.sink is no setting of a manager",
        "line 1: config.groups[0].window is no setting of a manager",
    ]


def test_an_empty_salt_is_vllms_word_for_none(tmp_path):
    """A log with a salt that vLLM takes for none cannot be replayed."""
    rows = rows_of(FULL)
    for row in rows:
        if row.get("op") == "new" and row["salt"] is None:
            row["salt"] = ""
    assert replay(written(tmp_path / FULL.name.removesuffix(".xz"), rows)) == []


# ---------------------------------------------------------------- the command


def test_the_command_counts_over_all_files(capsys, tmp_path):
    """A script cannot tell from the exit code and the last line whether the managers agree."""
    assert main([str(FULL), str(FINE)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "mismatches: 0"
    path, _, _ = changed("hit", tmp_path)
    assert main([str(FULL), str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "mismatches: 1"
    assert f"{FULL}: 0 mismatches" in lines


def test_only_the_first_mismatches_are_shown(capsys, tmp_path):
    """One wrong decision floods the terminal."""
    rows = rows_of(RICH)
    for row in rows[1:-1]:
        row["nfree"] += 1
    assert main([str(written(tmp_path / NAME, rows))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 10
    assert lines[-1] == f"mismatches: {len(rows) - 2}"


def no_logs(folder):
    """Files that cannot be replayed, by what is wrong with them."""
    packed = FULL.read_bytes()
    first = json.dumps(rows_of(FULL)[0])
    contents = {
        "empty_0_60_17_4.jsonl": b"",
        "text_0_60_17_4.jsonl": b"hello\n",
        "list_0_60_17_4.jsonl": b"[1]\n",
        "other_0_60_17_4.jsonl": b"{}\n",
        "binary_0_60_17_4.jsonl": b"\xff\xfe\x00",
        "unnumbered.jsonl": first.encode(),
        "word_0_60_x_4.jsonl": first.encode(),
        "truncated_0_60_17_4.jsonl.xz": packed[: len(packed) // 2],
        "unpacked_0_60_17_4.jsonl.xz": first.encode(),
        "cut_0_60_17_4.jsonl": lzma.decompress(packed)[:-20],
        "unknown_0_60_17_4.jsonl": (first + '\n{"op": "dance", "id": "r0"}\n').encode(),
        "stranger_0_60_17_4.jsonl": (first + '\n{"op": "decode", "id": "r0", "token": 1}\n').encode(),
        "block_0_60_1_4.jsonl": first.encode(),
        "kind_0_60_17_4.jsonl": first.replace('"full"', '"odd"').encode(),
        "settings_0_60_17_4.jsonl": b'{"init": "full", "config": {}}\n',
        "number_0_60_17_4.jsonl": b'{"init": "full", "config": 5}\n',
        "list_op_0_60_17_4.jsonl": (first + '\n{"op": ["free"], "id": "r0"}\n').encode(),
        "no_op_0_60_17_4.jsonl": (first + '\n{"id": "r0"}\n').encode(),
        "items_0_60_17_4.jsonl": (
            first + '\n{"op": "new", "id": "r", "tokens": [1], "salt": null, "mm": 5}\n'
        ).encode(),
        "deep_0_60_17_4.jsonl": (first + "\n" + "[" * 100_000 + "\n").encode(),
        "config_0_60_17_4.jsonl": b'{"init": "x", "config": {"groups": [{"kind": "x", "block_tokens": 4}]}}\n',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [*contents, "missing_0_60_17_4.jsonl", "."]


def test_what_is_no_log_is_refused(capsys, tmp_path):
    """A file that is none counts as agreement, or ends in a traceback."""
    for name in no_logs(tmp_path):
        assert main([str(tmp_path / name)]) == 2, name
        out, error = capsys.readouterr()
        assert out == "mismatches: 0\n", name
        assert len(error.splitlines()) == 1, name
        assert str(tmp_path) in error, name


WRONG_LINES = {
    '{"op": "danse", "id": "r0"}': "unknown operation 'danse'. Known: chunk, decode, evict",
    '{"op": "decoda", "id": "r0"}': "unknown operation 'decoda'. Did you mean 'decode'?",
    '{"id": "r0"}': "the field 'op' is missing",
    '{"op": "decode", "token": 1}': "the field 'id' is missing",
    '{"op": "decode", "id": "r0", "token": 1}': "no request 'r0' runs",
    '{"op": "preempt", "id": "r0"}': "no request 'r0' runs",
    '{"op": "resume", "id": "r0"}': "no request 'r0' waits",
    '{"op": "free", "id": "r0"}': "no request 'r0' runs or waits",
    '{"op": "free", ': "is no JSON: Expecting property name enclosed in double quotes at column",
    "": "is no JSON: Expecting value at column 1",
    "5": "is no object",
}


@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_wrong_line_is_named_by_its_number_in_the_file(line, capsys, tmp_path):
    """One is sent to another line, or told the name of an exception."""
    path = written(tmp_path / "mine_0_60_17_4.jsonl", rows_of(FULL)[:2])
    with path.open("a") as file:
        file.write(line.replace("r0", "r99") + "\n")
    assert main([str(path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"{path}: line 3")
    assert WRONG_LINES[line].replace("r0", "r99") in error
    assert "KeyError" not in error


def test_a_broken_file_does_not_hide_the_others(capsys, tmp_path):
    """The total is not printed, or not that of the files that could be replayed."""
    path, _, _ = changed("hit", tmp_path)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("hello\n")
    assert main([str(path), str(broken), str(path)]) == 2
    out, error = capsys.readouterr()
    assert out.splitlines()[-1] == "mismatches: 2"
    assert error.splitlines() == [f"{broken}: line 1 is no JSON: Expecting value at column 1"]


def test_the_command_says_how_it_is_used(capsys):
    """Nothing to compare is reported as agreement, or --help is taken for a file."""
    for arguments, code in (([], 2), (["--bogus"], 2), (["--help"], 0), (["-h"], 0)):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == code
        out, error = capsys.readouterr()
        assert "usage: python -m kvtier.testing.replay" in (error if code else out)


def test_logs_are_where_they_are_looked_for():
    """All tests above ran over no file."""
    assert len(LOGS) > 40
    assert all(isinstance(path, pathlib.Path) for path in LOGS)
