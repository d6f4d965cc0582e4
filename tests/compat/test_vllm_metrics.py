"""The kept metrics are vLLM's. Needs vLLM 0.32: `make test-vllm` brings it."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run `make test-vllm`"),
    pytest.mark.timeout(600),
]


def test_the_kept_metrics_are_what_vllm_measures(tmp_path):
    """The metrics that kvtier's are held to without vLLM are not vLLM's, or its metrics have changed."""
    fresh = tmp_path / "metrics.json"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-m", "tests.compat.oracle_metrics", str(fresh)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert fresh.read_text() == (ROOT / "tests" / "data" / "vllm" / "metrics.json").read_text()
