"""The demo's verdict and figures: they can fail, and are what was measured."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtier.cli.demo import table
from kvtier.cli.demo.job import Answer, Filled, Restored
from kvtier.cli.demo.summary import Summary
from tests.demo_findings import FILLED, REFERENCES, RESTORED, answer, summary_of

GOOD = RESTORED.prompts


def answers(*prompts: Answer) -> Summary:
    return summary_of(restored=replace(RESTORED, prompts=list(prompts)))


def test_figures_are_medians_and_ratios_of_medians() -> None:
    """The demo would print a best case, or a mean that one slow request spoils."""
    record = summary_of().record()
    assert record["ttft_cold_s"] == 20.0
    assert record["ttft_cold_wall_s"] == 31.0
    assert record["ttft_restored_s"] == 2.0
    assert record["load_s"] == 0.5
    assert record["forward_wall_s"] == 3.0
    assert record["speedup"] == 10.0
    assert record["speedup_wall"] == 31.0 / 4.0
    assert record["restored_over_floor"] == 2.0
    assert record["hit_tokens_by_tier"] == {"gpu": 0, "lmdb": 9}
    assert record["tokens_identical"] is True
    assert [request["speedup"] for request in record["requests"]] == [10.0, 7.5, 10.0]
    assert json.loads(json.dumps(record)) == record


def test_a_length_has_figures_of_its_own_prompts() -> None:
    """The curve would mix lengths, or set cold times beside other prompts' restored ones."""
    short, long = summary_of().record()["lengths"]
    assert (short["prefix_tokens"], short["prompt_tokens"]) == (2, [3, 3])
    assert short["samples_s"]["cold"] == [5.0, 7.0]
    assert short["samples_s"]["restored"] == [0.5, 1.5]
    assert (short["ttft_cold_s"], short["ttft_restored_s"], short["load_s"], short["speedup"]) == (6.0, 1.0, 0.25, 6.0)
    assert (long["prefix_tokens"], long["count"]) == (3, 2)
    assert long["samples_s"]["cold"] == [10.0, 30.0]  # of the questions: they are not asked twice
    assert long["samples_s"]["floor"] == [1.0, 2.0]
    assert long["speedup_wall"] == 30.0 / 6.0


def test_one_different_token_is_told() -> None:
    """A cache that changes answers would pass the demo."""
    result = answers(*GOOD[:2], answer([14, 99], 2.0))
    assert result.record()["tokens_identical"] is False
    assert [row.tokens_identical for row in result.rows] == [True, True, False]
    assert result.verdict == "1 of 3 answers differ from stock generate()"


def test_answers_of_the_first_process_count_too() -> None:
    """Wrong tokens while blocks move down would go unseen."""
    result = summary_of(replace(FILLED, kept=[[10, 11], [12, 99]]))
    assert [row.tokens_identical for row in result.rows] == [True, False, True]


@pytest.mark.parametrize(
    ("filled", "restored", "verdict"),
    [
        ({}, {"sweep": [answer([99], 1.0), *RESTORED.sweep[1:]]}, "first tokens differ .* prefix of 2 tokens"),
        ({}, {"late": answer([99], 1.0)}, "after kill -9 differs"),
        ({"late_kept": [99]}, {}, "after kill -9 differs"),
    ],
)
def test_tokens_of_sweep_and_restart_count_too(filled: Any, restored: Any, verdict: str) -> None:
    """Wrong KV would only show in figures that are too good."""
    result = summary_of(replace(FILLED, **filled), replace(RESTORED, **restored))
    assert result.record()["tokens_identical"] is False
    assert re.search(verdict, str(result.verdict))


def test_a_demo_that_restored_nothing_fails_and_says_why() -> None:
    """Equal tokens prove nothing when everything was recomputed."""
    nothing = [answer(tokens, 9.0, lmdb=0, problem="reserve failed") for tokens in REFERENCES]
    assert answers(*nothing).verdict == "the second process restored nothing from the tier lmdb: reserve failed"
    assert summary_of().verdict is None


def test_what_survived_the_kill_is_counted_not_claimed() -> None:
    """The restart proof would be a sentence that is always the same."""
    flushed, unflushed = summary_of().restart.lines
    steps = "kill -9, start again, send again"
    assert flushed.startswith(f"send, flush, {steps}: 3 of 4 tokens from lmdb, the same answer. SIGKILL came 12 ms")
    assert unflushed.startswith(f"send, no flush, {steps}: 0 of 3 tokens from lmdb, the same answer.")
    changed = answers(answer([99], 1.0, lmdb=2), *GOOD[1:])
    assert "2 of 4 tokens from lmdb, ANOTHER ANSWER" in changed.restart.lines[0]
    assert changed.record()["restart"]["flushed"]["tokens_from_store"] == 2


def shown(summary: Summary, width: int = 80) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    table.show(console, summary)
    return console.export_text()


def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    """Headings and figures would be cut off."""
    long = replace(GOOD[0], tokens_by_tier={"gpu": 4096, "host": 4096, "lmdb": 4096}, tokens_restored=-4096)
    said = shown(answers(long, *GOOD[1:]))
    assert "…" not in said
    for word in ("identical", "speed-up", "restored", "floor", "new", "lmdb", "Who?", "10.0x", "read from the device"):
        assert word in said
    for word in ("load", "forward", "6.0x", "kill -9"):
        assert word in said
    assert "NO" not in said


def test_a_narrow_terminal_cuts_no_figure() -> None:
    """Times would end in dots, or be broken in two."""
    narrow, wide = (shown(summary_of(), width) for width in (40, 200))
    assert "…" not in narrow
    assert set(wide.split()) <= set(narrow.split())


def test_what_is_wrong_shows_in_the_table() -> None:
    """A reader of the table alone would miss the only thing that matters."""
    assert "NO" in shown(answers(*GOOD[:2], answer([0], 1.0)))
    wrong = [answer([0], 1.0), *RESTORED.sweep[1:]]
    assert "NO" in shown(summary_of(restored=replace(RESTORED, sweep=wrong)))
    cached = [replace(answer, device_bytes=0) for answer in GOOD]
    assert "all through the page cache" in shown(answers(*cached))


def test_findings_survive_their_files(tmp_path: Path) -> None:
    """What a process measured would be lost on its way to the other."""
    FILLED.write(tmp_path / "fill.json")
    assert Filled.read(tmp_path / "fill.json") == FILLED
    RESTORED.write(tmp_path / "restore.json")
    assert Restored.read(tmp_path / "restore.json") == RESTORED


def test_every_key_of_the_json_is_documented() -> None:
    """A script that reads the results would have to guess, or break without notice."""
    documented = set(re.findall(r"`([a-z_]+)`", (Path(__file__).parents[2] / "docs" / "demo.md").read_text()))
    assert keys_of(summary_of().record()) <= documented


def keys_of(record: Any) -> set[str]:
    if isinstance(record, list):
        return set().union(*map(keys_of, record)) if record else set()
    if not isinstance(record, dict):
        return set()
    inner = (value for key, value in record.items() if not key.endswith("by_tier") and key != "machine")
    return set(record) | set().union(*map(keys_of, inner))
