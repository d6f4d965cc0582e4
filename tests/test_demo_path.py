"""The demo as its users run it, with a short prefix: real model, two processes, one store between them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvtier
from kvtier.cli import cmd_demo
from kvtier.cli.demo import text, weights
from kvtier.cli.demo.job import Filled, Job, Restored
from kvtier.cli.demo.summary import summary_of

PREFIX_TOKENS = 64

# The first run on a machine converts the model, once: whoever needs it runs in one process, in the order of the files.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(400), pytest.mark.xdist_group("the demo's model")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    if commands := weights.missing_installs(weights.model_folder(os.environ)):
        pytest.skip(f"the demo's model is not installed: {'; '.join(commands)}")
    out = tmp_path_factory.mktemp("demo")
    return out, cmd_demo.demo(None, PREFIX_TOKENS, 1, out, keep=True, json_output=True)


def results_of(out: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((out / cmd_demo.RESULTS_FILE).read_text())
    return results


def test_a_new_process_answers_from_the_store(run: tuple[Path, int]) -> None:
    """The one thing kvtier is for would not work from end to end."""
    out, code = run
    results = results_of(out)
    assert code == 0
    assert results["tokens_identical"] is True
    assert len(results["requests"]) == len(text.QUESTIONS)
    first, newcomer = results["requests"][0], results["requests"][-1]
    assert first["hit_tokens_by_tier"]["lmdb"] >= PREFIX_TOKENS
    assert newcomer["tokens_restored"] == PREFIX_TOKENS
    assert results["written_blocks_by_tier"]["host"] > 0  # before the flush
    assert all(results[name] > 0 for name in ("ttft_cold_s", "ttft_restored_s", "restored_over_floor", "speedup"))


def test_what_was_flushed_survives_the_kill(run: tuple[Path, int]) -> None:
    """The promise that nothing flushed is lost would be broken, or the proof of it."""
    restart = results_of(run[0])["restart"]
    flushed, unflushed = restart["flushed"], restart["unflushed"]
    assert flushed["tokens_from_store"] == (flushed["prompt_tokens"] - 1) // 16 * 16
    assert 0 <= unflushed["tokens_from_store"] < unflushed["prompt_tokens"]
    assert flushed["tokens_identical"] is unflushed["tokens_identical"] is True
    assert restart["killed_after_flush_s"] > 0
    assert "Traceback" not in (run[0] / "fill.log").read_text()


def test_the_curve_is_restored_from_the_store(run: tuple[Path, int]) -> None:
    """The plot would show what a tier in memory can do."""
    lengths = results_of(run[0])["lengths"]
    assert [length["prefix_tokens"] for length in lengths] == [16, 32, 64]
    for length in lengths:
        assert length["tokens_identical"] is True
        expected = [(tokens - 1) // 16 * 16 for tokens in length["prompt_tokens"]]
        assert length["tokens_restored"] == expected


def test_planted_wrong_blocks_fail_the_demo(run: tuple[Path, int], tmp_path: Path) -> None:
    """The demo would call any tokens identical, or not use what it restored."""
    out, _ = run
    job = Job.read(out / "restore-job.json")
    config = tmp_path / "kvtier.yaml"
    config.write_text((out / "kvtier.yaml").read_text().replace(str(out / "store"), str(tmp_path / "store")))
    plant_zeroes(str(config), job.prompts[0])
    replace(job, config=str(config), prompts=job.prompts[:1], sweep=[]).write(tmp_path / "job")
    command = [sys.executable, "-m", "kvtier.cli.demo.worker", str(tmp_path / "job"), str(tmp_path / "found")]
    subprocess.run(command, check=True, capture_output=True)
    book = text.Book(Path(job.model))
    filled, good = Filled.read(out / "fill.json"), Restored.read(out / "restore.json")
    found = Restored.read(tmp_path / "found")
    restored = replace(good, prompts=[*found.prompts, *good.prompts[1:]])
    assert found.prompts[0].tokens_by_tier["lmdb"] > 0
    summary = summary_of(book.asks(PREFIX_TOKENS, 16), book, filled, restored, 0.0, 1, "lmdb")
    assert summary.record()["tokens_identical"] is False
    assert summary.verdict is not None
    assert "differ from stock generate()" in summary.verdict


def plant_zeroes(config: str, prompt: list[int]) -> None:
    """Keep blocks of nothing under the keys of the prompt."""
    with kvtier.open_sync(config) as cache:
        keys = kvtier.hash_blocks(prompt, cache.config.model)
        blocks = len(keys.groups[0])
        lease = cache.reserve(cache.match(keys, owner="vandal"), blocks_total=blocks)
        assert isinstance(lease, kvtier.Lease)
        for layer in range(weights.SHAPE.layers):
            for view in cache.kv(group=0, layer=layer).values():
                view[list(lease.slots(0))] = 0
        cache.commit(lease, list(zip(lease.slots(0), keys.groups[0], strict=True)))
        cache.release(lease)
        cache.flush()
