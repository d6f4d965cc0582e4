"""The demo's verdict and figures: they can fail, and are what was measured."""

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.cli.demo import table
from kvtier.cli.demo.job import Answer, Filled, Restored, Seconds
from kvtier.cli.demo.summary import Summary, rows_of
from kvtier.cli.demo.text import Prompt

pytest.importorskip("torch")  # its version belongs to the result
pytest.importorskip("transformers")

PROMPTS = [Prompt("Who?", (1, 2, 3, 4)), Prompt("When?", (1, 2, 3, 5)), Prompt("Where?", (1, 2, 3, 6))]
REFERENCES = [[10, 11], [12, 13], [14, 15]]


def answer(tokens: Sequence[int], cpu_s: float, lmdb: int = 3, problem: str | None = None) -> Answer:
    restored, floor = Seconds(cpu_s, 2 * cpu_s), Seconds(cpu_s / 2, cpu_s)
    return Answer(list(tokens), restored, floor, lmdb, {"gpu": 0, "lmdb": lmdb}, 4096 * lmdb, problem)


def summary_of(answers: list[Answer], kept: list[list[int]] | None = None) -> Summary:
    cold = [Seconds(10.0, 20.0), Seconds(30.0, 40.0), Seconds(20.0, 31.0)]
    filled = Filled(cold, REFERENCES, REFERENCES[:2] if kept is None else kept, {"gpu": 0, "lmdb": 7})
    rows = rows_of(PROMPTS, ["he", "then", "there"], filled, Restored(answers))
    return Summary(rows, prefix_tokens=3, threads=1, store_tier="lmdb", written_blocks=filled.written_blocks)


GOOD = [answer(REFERENCES[0], 1.0), answer(REFERENCES[1], 4.0), answer(REFERENCES[2], 2.0)]


def test_figures_are_medians_and_ratios_of_medians() -> None:
    """The demo would print a best case, or a mean that one slow request spoils."""
    record = summary_of(GOOD).record()
    assert record["ttft_cold_s"] == 20.0
    assert record["ttft_cold_wall_s"] == 31.0
    assert record["ttft_restored_s"] == 2.0
    assert record["speedup"] == 10.0
    assert record["speedup_wall"] == 31.0 / 4.0
    assert record["restored_over_floor"] == 2.0
    assert record["hit_tokens_by_tier"] == {"gpu": 0, "lmdb": 9}
    assert record["tokens_identical"] is True
    assert [request["speedup"] for request in record["requests"]] == [10.0, 7.5, 10.0]
    assert json.loads(json.dumps(record)) == record


def test_one_different_token_is_told() -> None:
    """A cache that changes answers would pass the demo."""
    changed = [*GOOD[:2], answer([14, 99], 2.0)]
    result = summary_of(changed)
    assert result.record()["tokens_identical"] is False
    assert [row.tokens_identical for row in result.rows] == [True, True, False]
    assert result.verdict == "1 of 3 answers differ from stock generate()"


def test_answers_of_the_first_process_count_too() -> None:
    """Wrong tokens while blocks move down would go unseen."""
    result = summary_of(GOOD, kept=[[10, 11], [12, 99]])
    assert [row.tokens_identical for row in result.rows] == [True, False, True]


def test_a_demo_that_restored_nothing_fails_and_says_why() -> None:
    """Equal tokens prove nothing when everything was recomputed."""
    nothing = [answer(tokens, 9.0, lmdb=0, problem="reserve failed") for tokens in REFERENCES]
    assert summary_of(nothing).verdict == ("the second process restored nothing from the tier lmdb: reserve failed")
    assert summary_of(GOOD).verdict is None


def shown(summary: Summary) -> str:
    console = Console(width=80, file=StringIO(), record=True)
    table.show(console, summary)
    return console.export_text()


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    """Headings and figures would be cut off."""
    long = replace(GOOD[0], tokens_by_tier={"gpu": 4096, "host": 4096, "lmdb": 4096}, tokens_restored=-4096)
    said = shown(summary_of([long, *GOOD[1:]]))
    assert "…" not in said
    for word in ("identical", "speed-up", "restored", "floor", "new", "lmdb", "Who?", "10.0x", "read from the device"):
        assert word in said
    assert "NO" not in said


def test_what_is_wrong_shows_in_the_table() -> None:
    """A reader of the table alone would miss the only thing that matters."""
    assert "NO" in shown(summary_of([*GOOD[:2], answer([0], 1.0)]))
    cached = [replace(answer, device_bytes=0) for answer in GOOD]
    assert "all through the page cache" in shown(summary_of(cached))


def test_findings_survive_their_files(tmp_path: Path) -> None:
    """What a process measured would be lost on its way to the other."""
    filled = Filled([Seconds(1.0, 2.0)], [[1]], [[1]], {"gpu": 1})
    filled.write(tmp_path / "fill.json")
    assert Filled.read(tmp_path / "fill.json") == filled
    Restored(GOOD).write(tmp_path / "restore.json")
    assert Restored.read(tmp_path / "restore.json") == Restored(GOOD)
