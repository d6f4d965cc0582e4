"""Whole vLLM engines over kvtier, on the CPU, each in a process of its own. Needs vLLM 0.32 (`make test-vllm`)."""

import importlib.util
import json
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


def run(scenario, folder, *, processes="0"):
    """What a scenario of `offload_engine` tells, run in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = processes
    command = [sys.executable, "-m", "tests.compat.offload_engine", scenario, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def expect_same_again(told, cached=480):
    """15 of the 16 blocks of a prompt of 500 tokens lie before its last token."""
    cold, warm, reset = told["cold"], told["warm"], told["reset"]
    assert warm[0] == reset[0] == cold[0]
    assert [cold[1], warm[1], reset[1]] == [0, cached, 0]


NOTHING_HELD = {"leases": 0, "matches": 0, "asked": 0, "jobs": 0, "findings": [], "errors": 0}


def test_an_engine_in_this_process(folder):
    """vLLM says something else over kvtier than alone, or kvtier keeps slots for requests that are gone.

    The second half is a GPU of 28 blocks under 24 requests with four prefixes, which preempts and evicts all the time.
    """
    told = run("pressure", folder)
    expect_same_again(told["again"])
    assert told["pressed"] == told["alone"]
    assert told["loaded_bytes"] > 0
    assert told["held"] == NOTHING_HELD


def test_an_engine_in_another_process(folder):
    """Only an engine in the caller's own process can use kvtier."""
    expect_same_again(run("again", folder, processes="1"))


def test_two_ranks_with_several_blocks_a_chunk(folder):
    """Ranks cannot share the slab, or get each other's heads; 448 tokens are 7 chunks of 64."""
    expect_same_again(run("ranks", folder, processes="1"), cached=448)


def test_a_restart_and_a_damaged_store(folder):
    """A second process begins cold, or a store that lies makes wrong tokens, a crash or a request without end."""
    first, second = run("first", folder), run("second", folder)
    assert first["cold"][1] == 0
    assert second["warm"] == [first["cold"][0], 480]
    assert second["damaged"][0] == second["again"][0] == first["cold"][0]
    assert second["damaged"][1] == 32 * second["sound_blocks"] < 480
    assert second["again"][1] == 480
    assert second["corrupt"] > 0
    assert second["held"] == NOTHING_HELD
