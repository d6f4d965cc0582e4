"""The kept logs are worth replaying: each meets what its kind can meet. Needs no vLLM."""

import json
import lzma
import pathlib

import pytest

from tests.compat.oracle_coverage import counts, rows_of

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "vllm"
LOGS = [path for path in sorted(GOLDENS.glob("*.jsonl.xz")) if path.name.count("_") == 4]


def expected(first):
    """The branches that requests of this model meet if the pool is small and prompts share prefixes."""
    yield "refusals"
    config = first.get("config")
    if config is None or config["caching"]:
        yield from ("hits", "evictions")
    if config is None:
        return
    yield from ("preemptions", "resumed", "resets")
    if config["caching"]:
        yield "duplicates"
        yield from ["boundaries"] * (len(config["groups"]) > 1)
    if any(
        group.get("mode") == "align" and group["block_tokens"] > config["hash_tokens"] for group in config["groups"]
    ):
        yield "copies"


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_a_log_meets_every_branch_of_its_kind(path):
    """A log replays well because nothing happens in it."""
    text = lzma.decompress(path.read_bytes()).decode()
    met = counts(rows_of(text))
    assert [branch for branch in expected(json.loads(text.splitlines()[0])) if not met[branch]] == []


def test_something_is_deferred_to_the_next_step():
    """No log admits a request in the step that wrote what it would read."""
    texts = [lzma.decompress(path.read_bytes()).decode() for path in LOGS if path.name.startswith("mambastep")]
    assert any(counts(rows_of(text))["same_step_refusals"] for text in texts)
