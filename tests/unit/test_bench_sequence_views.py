"""`benchmarks/sequence_views.py` at a tiny size: all ways read the same tokens, and every cost has its line."""

import dataclasses
import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.bench.report import Report
from kvtier.errors import KvtierError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {"tokens": 64, "queries": 3, "rounds": 2, "layers": 2, "kv_heads": 2, "head_dim": 16, "query_heads": 4}
pytestmark = pytest.mark.torch


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("sequence_views")


def found_by(bench: Any, **sizes: int) -> dict[str, list[float]]:
    chosen = bench.Sizes(**TINY | sizes)
    report = Report(bench.NAME, dataclasses.asdict(chosen))
    bench.measure(report, chosen, Path())
    return {cost.what: cost.values for cost in report.costs}


def test_every_way_and_every_cost_has_its_line(bench: Any) -> None:
    """A figure of the documentation cannot be had again, or is of another number of rounds."""
    costs = found_by(bench)
    for queries in ("one query", "3 queries"):
        for way in (bench.VIEW, bench.GATHER, bench.GATHER_SAME, bench.CONTIGUOUS):
            assert len(costs.pop(f"{queries}: {way}")) == 2
            if way != bench.VIEW:
                assert len(costs.pop(f"{queries}: {way} / view, round by round")) == 2
    assert len(costs.pop("one query, one layer: block table, numpy's reference")) == 2
    for what in ("making it", "first sum over K of a layer", "closing it"):
        assert min(costs.pop(f"view of 4 blocks: {what}")) > 0
    assert not costs


def test_other_tokens_are_told(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way is fast because it reads something else."""
    fill = bench._fill

    def differing(sizes: Any, *places: Any) -> None:
        fill(sizes, *places)
        cache, lease = places[1]
        cache.kv(0, 0)["v"][lease.slots()[1]] += 1

    monkeypatch.setattr(bench, "_fill", differing)
    with pytest.raises(KvtierError, match="same results"):
        found_by(bench)


def test_slots_lie_in_no_order(bench: Any) -> None:
    """Gathering from slots one behind the other is a plain copy, as nobody's cache allows."""
    sizes = bench.Sizes(**TINY | {"tokens": 256})
    with bench.open_sync(bench._config(sizes, "token_major")) as cache:
        slots = bench._scattered(cache, sizes).slots()
        assert len(set(slots)) == 16
        assert sum(after == before + 1 for before, after in pairwise(slots)) < 8


def test_parts_of_blocks_are_refused(bench: Any) -> None:
    """Ways would read different numbers of tokens."""
    with pytest.raises(KvtierError, match="whole blocks"):
        found_by(bench, tokens=60)
