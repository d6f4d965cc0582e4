"""Restarts that forget, write again, or leave behind what nobody uses."""

import signal
import subprocess
import sys
from pathlib import Path

import kvtier
from tests.cache_bench import config_for, prompt, serve

ROOT = Path(__file__).parents[2]
WRITER = """
import sys
sys.path.insert(0, {root!r})
import kvtier
from tests.cache_bench import config_for, prompt, serve
config = config_for({path!r}, lmdb={lmdb!r})
cache = kvtier.open_sync(config)
for number in range(int(sys.argv[1]), int(sys.argv[2])):
    serve(cache, prompt(config, number, 8))
    assert cache.flush().failed == 0
print("flushed", flush=True)
for number in range(1000, 1010):  # as many as leave the others in the store, however late the kill comes
    serve(cache, prompt(config, number, 8))
    cache.flush()
    print(number, flush=True)
sys.stdin.read()
"""


def killed(path, first, last, lmdb="16MiB"):
    """A process flushed these prompts, and was killed in the middle of others."""
    code = WRITER.format(root=str(ROOT), path=str(path), lmdb=lmdb)
    command = [sys.executable, "-c", code, str(first), str(last)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "flushed\n"
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)


def test_after_kill_9_the_same_keys_hit_at_once_and_nothing_is_written_again(tmp_path):
    """The index lives in memory only: after a restart nothing is found, and everything is written a second time
    (LMCache#562, LMCache#1175, LMCache#1788, LMCache PR#4778; Mooncake#1196, Mooncake#2306, Mooncake PR#2077)."""
    config = config_for(tmp_path / "store")
    killed(tmp_path / "store", 0, 6)
    with kvtier.open_sync(config) as cache:
        prompts = [prompt(config, number, 8) for number in range(6)]
        assert [cache.peek(keys).tiers["lmdb"] for keys in prompts] == [32] * 6  # before anything else happens
        blocks = cache.stats()["tiers"]["lmdb"]["blocks"]
        for keys in prompts:
            assert serve(cache, keys).tokens_ready == 32  # compares the bytes
        assert cache.flush().failed == 0
        stats = cache.stats()["tiers"]["lmdb"]
        assert (stats["written_blocks"], stats["blocks"]) == (0, blocks)


def test_what_killed_processes_left_is_used_or_given_back(tmp_path):
    """Left-over files are neither read nor deleted, and each restart adds to them (LMCache#2273)."""
    config = config_for(tmp_path / "store", lmdb="2MiB")
    for first in range(0, 24, 6):
        killed(tmp_path / "store", first, first + 6, "2MiB")
        files = [file for file in (tmp_path / "store").rglob("*") if file.is_file()]
        assert sum(file.stat().st_blocks * 512 for file in files) <= 2 << 20
        with kvtier.open_sync(config) as cache:
            assert serve(cache, prompt(config, first + 5, 8)).tokens_ready == 32
            tier = cache._running._tiers[2]
            assert tier.check() == cache.check() == []
            assert sum(1 for _ in tier.scan()) == cache.stats()["tiers"]["lmdb"]["blocks"]
    assert {file.name for file in files} <= {file.name for file in (tmp_path / "store").rglob("*")}
    assert len(files) <= 6, "a process leaves files of its own"
