"""`benchmarks/nvme_peers.py` at a tiny size, against the real vLLM: it measures both, and leaves nothing behind.

Needs vLLM 0.32: `make test-vllm` brings it.
"""

import dataclasses
import importlib
import importlib.util
import warnings
from pathlib import Path

import pytest

from kvtier.cli.bench.nvme.plan import MIB, Plan, Shape, quick

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = dataclasses.replace(
    quick(Plan()),
    large=Shape(2 * MIB, 1),
    middle=Shape(360 * 1024, 2),
    small=Shape(65_536, 4),
    ring_bytes=4 * MIB,
    image_bytes=192 * MIB,
)


pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run `make test-vllm`"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn of each other
        importlib.import_module("nvme_peers_vllm")
    return importlib.import_module("nvme_peers")


def test_both_move_every_size(peers, tmp_path):
    """A size would be missing, or the disk would stay full of files."""
    report, figures = peers.measure(tmp_path, TINY)
    assert figures.keys() == peers.WANTED.keys()
    assert all(found["speed"] > 0 < found["cpu"] for found in figures.values())
    assert all(race.timed.keys() == {"kvtier", peers.VLLM} for race in report.races)
    assert not list(tmp_path.iterdir())
    peers.show(report, figures)


def test_vllm_gives_back_what_it_was_given(peers, tmp_path):
    """Its speed would be that of something that fails."""
    ring = importlib.import_module("nvme_peers_vllm").VllmRing(tmp_path, TINY.small)
    try:
        ring.put()()
        assert len(list(tmp_path.rglob("*.bin"))) == TINY.small.blocks
        get = ring.get()
        ring._bytes[:] = 0
        get()
        (file, *_) = tmp_path.rglob("*.bin")
        file.unlink()
        with pytest.raises(OSError, match="did not move a batch"):
            ring.get()()
    finally:
        ring.close()
