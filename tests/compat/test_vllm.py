"""kvtier's manager decides as vLLM's does, on fresh random logs. Needs vLLM 0.32: `make test-vllm` brings it.

The kept logs of `tests/data/vllm` are replayed without vLLM by `tests/unit/test_replay_goldens.py`.
"""

import importlib.util
import lzma
import os
import pathlib
import random
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "data" / "vllm"
LOG_NAME = re.compile(r"([a-z]+\d?)_(\d+)_(\d+)_(\d+)_(\d+)")
LOGS_PER_KIND = 3
STEPS = 150

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run `make test-vllm`"),
    pytest.mark.timeout(1200),
]


def golden_names():
    """Of the kept logs, without what `xz` and others add."""
    names = (path.name.removesuffix(".jsonl.xz") for path in sorted(GOLDENS.glob("*.jsonl.xz")))
    return [name for name in names if LOG_NAME.fullmatch(name)]


def write_logs(folder, names):
    """Let vLLM write the logs; one process for all, for its import takes longer than a log."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-m", "tests.compat.oracle_manager", "--write", str(folder), *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [folder / f"{name}.jsonl.xz" for name in names]


def fresh_names(draw):
    """Every kind with new seeds, with pools about as small and other blocks."""
    for name in golden_names():
        kind, _, _, blocks, _ = LOG_NAME.fullmatch(name).groups()
        for _ in range(LOGS_PER_KIND):
            blocks_total = draw.randrange(int(blocks) * 3 // 4, int(blocks) * 3 // 2)
            yield f"{kind}_{draw.randrange(10**6)}_{STEPS}_{blocks_total}_{draw.choice([1, 2, 3, 4, 8, 16])}"


def test_the_kept_logs_are_what_vllm_decides(tmp_path):
    """The logs that kvtier is held to without vLLM are not vLLM's answers, or its answers have changed."""
    names = golden_names()
    assert names
    for path in write_logs(tmp_path, names):
        kept = GOLDENS / path.name
        assert lzma.decompress(path.read_bytes()) == lzma.decompress(kept.read_bytes()), path.name


def test_fresh_logs_replay_without_a_difference(tmp_path):
    """kvtier's manager decides otherwise than vLLM's somewhere off the kept logs."""
    from kvtier.testing.replay import replay

    seed = int(os.environ.get("KVTIER_SEED", random.randrange(10**6)))
    print(f"again: KVTIER_SEED={seed} make test-vllm")
    differences = {}
    for path in write_logs(tmp_path, list(fresh_names(random.Random(seed)))):
        if found := replay(path):
            differences[path.name] = found[:3]
    assert not differences
