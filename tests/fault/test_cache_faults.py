"""What a user may do to a cache from outside: kill it, damage its disk, share its store, misconfigure it."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier.errors import ClosedError, ConfigError, StoreLocked
from kvtier.testing.fork import in_child, refusals
from tests.cache_bench import BLOCK_TOKENS, config_for, prompt, serve

ROOT = str(Path(__file__).parents[2])
WRITER = """
import sys
sys.path.insert(0, {root!r})
import kvtier
from tests.cache_bench import config_for, prompt, serve
config = config_for({path!r}, lmdb="8MiB")
cache = kvtier.open_sync(config)
print("open", flush=True)
number = int(sys.argv[1])
while True:
    serve(cache, prompt(config, number, 8))
    flushed = cache.flush()
    assert flushed.failed == 0
    print("flushed", number, flush=True)
    number += 1
"""


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_loses_nothing_that_was_flushed_and_serves_nothing_wrong(tmp_path, seed):
    """After a crash, blocks that `flush` promised are missing, or torn ones are served (LMCache#562)."""
    rng = random.Random(seed)
    code = WRITER.format(root=ROOT, path=str(tmp_path / "store"))
    config = config_for(tmp_path / "store", lmdb="8MiB")
    number = 0
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(number)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "open\n"
        for _ in range(rng.randint(1, 12)):
            word, said = writer.stdout.readline().split()
            assert word == "flushed"
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().splitlines()
        writer.wait()
        writer.stdout.close()
        number = int(said) if not rest else max(int(said), *(int(line.split()[1]) for line in rest if " " in line))
        with kvtier.open_sync(config) as cache:
            for flushed in range(max(0, number - 20), number + 1):  # far fewer than the store holds
                keys = prompt(config, flushed, 8)
                assert cache.peek(keys).tiers["lmdb"] == 8 * BLOCK_TOKENS, flushed
                assert serve(cache, keys).tokens_ready == 8 * BLOCK_TOKENS
            serve(cache, prompt(config, number + 1, 8))  # perhaps half written: whatever is there is right
            assert cache.check() == []
        number += 2


def test_a_flipped_byte_on_disk_is_a_miss_and_a_counter_and_never_served(tmp_path):
    """A damaged block is served to a model (every file-per-block peer does)."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 6)
    with kvtier.open_sync(config) as cache:
        serve(cache, keys)
    slab = tmp_path / "store" / "slab"
    damaged = bytearray(slab.read_bytes())
    where = next(i for i in range(0, len(damaged), 4096) if any(damaged[i : i + 2048]))
    damaged[where + 77] ^= 0x10
    slab.write_bytes(damaged)
    with kvtier.open_sync(config) as cache:
        lease = serve(cache, keys)  # checks the bytes of what is restored
        assert lease.tokens_ready < 24
        assert cache.stats()["tiers"]["lmdb"]["corrupt"] == 1
        assert cache.stats()["failed_cuts"] == 1
        assert serve(cache, keys).tokens_ready == 24  # computed again
        cache.flush()
        assert cache.check() == []
    with kvtier.open_sync(config) as cache:
        assert serve(cache, keys).tokens_ready == 24
        assert cache.stats()["tiers"]["lmdb"]["corrupt"] == 0


def test_a_second_writer_is_refused(tmp_path):
    """Two processes write to one store and destroy it."""
    config = config_for(tmp_path / "store")
    with kvtier.open_sync(config) as cache:
        with pytest.raises(StoreLocked, match="this process"):
            kvtier.open_sync(config)
        code = "import sys; sys.path.insert(0, sys.argv[1]); import kvtier; from tests.cache_bench import config_for\n"
        code += "kvtier.open_sync(config_for(sys.argv[2]))"
        other = subprocess.run(
            [sys.executable, "-c", code, ROOT, str(tmp_path / "store")], capture_output=True, text=True
        )
        assert "StoreLocked" in other.stderr
        assert str(os.getpid()) in other.stderr
        assert cache.stats()["blocks"] == 0
    with kvtier.open_sync(config):
        pass  # the lock is gone with its holder


def test_another_identity_finds_nothing_and_destroys_nothing(tmp_path):
    """KV of other weights or another layout is served, or thrown away (vllm#42125, LMCache#4463)."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 6)
    with kvtier.open_sync(config) as cache:
        serve(cache, keys)
    for change in ({"weights_epoch": "v2"}, {"layout": "token_major"}, {"name": "other"}, {"tensor_parallel": 2}):
        other = config_for(tmp_path / "store", model=change)
        with kvtier.open_sync(other) as cache:
            assert cache.peek(keys).tokens == 0, change
            assert serve(cache, keys).tokens_ready == 0
    with kvtier.open_sync(config) as cache:
        assert serve(cache, keys).tokens_ready == 24


def test_two_models_of_different_sizes_share_a_store(tmp_path):
    """A second model cannot use the store, or the two read each other's slots."""
    small = config_for(tmp_path / "store")
    large = config_for(tmp_path / "store", gpu="256KiB", host="512KiB", model={"name": "large", "head_dim": 80})
    for _ in range(2):
        for config in (small, large):
            keys = prompt(config, 1, 6)
            with kvtier.open_sync(config) as cache:
                serve(cache, keys)
                assert cache.check() == []
    for config in (small, large):
        with kvtier.open_sync(config) as cache:
            lease = serve(cache, prompt(config, 1, 6))
            assert lease.tiers["lmdb"] == 24


def test_a_full_store_makes_room_for_a_second_model(tmp_path):
    """The first model's blocks fill the store for good, and the second stores nothing."""
    small = config_for(tmp_path / "store", lmdb="4MiB")
    large = config_for(
        tmp_path / "store", gpu="256KiB", host="512KiB", lmdb="4MiB", model={"name": "large", "head_dim": 80}
    )
    with kvtier.open_sync(small) as cache:
        for number in range(150):
            serve(cache, prompt(small, number, 8))
            cache.flush()
        assert cache.stats()["tiers"]["lmdb"]["evicted"] > 0
    keys = prompt(large, 1, 6)
    with kvtier.open_sync(large) as cache:
        serve(cache, keys)
        assert cache.flush().failed == 0
        assert cache.check() == []
    with kvtier.open_sync(large) as cache:
        assert serve(cache, keys).tiers["lmdb"] == 24
    total = sum(f.stat().st_blocks * 512 for f in (tmp_path / "store").rglob("*") if f.is_file())
    assert total <= 4 << 20


def test_reopening_with_the_same_capacity_gives_nothing_up(tmp_path):
    """Flushed blocks leave at a restart because another model reckons with another index, or the index has grown."""
    small = config_for(tmp_path / "store", lmdb="8MiB")
    large = config_for(
        tmp_path / "store", gpu="256KiB", host="512KiB", lmdb="8MiB", model={"name": "large", "head_dim": 80}
    )
    with kvtier.open_sync(large) as cache:
        for number in range(30):
            serve(cache, prompt(large, number, 8))
    blocks = None
    for config in (small, large, small, large):
        with kvtier.open_sync(config) as cache:
            tier = cache.stats()["tiers"]["lmdb"]
            assert blocks is None or tier["blocks"] == blocks
            for number in range(300, 500):
                serve(cache, prompt(config, number, 8))
                cache.flush()
            blocks = cache.stats()["tiers"]["lmdb"]["blocks"]
            assert cache.stats()["tiers"]["lmdb"]["evicted"] > 0 or config is large
    total = sum(f.stat().st_blocks * 512 for f in (tmp_path / "store").rglob("*") if f.is_file())
    assert total <= 8 << 20


def test_weights_that_change_for_ever_do_not_fill_the_store(tmp_path):
    """Every epoch leaves a row behind, until the index of a small store is full of them."""
    config = config_for(tmp_path / "store", lmdb="2MiB")
    with kvtier.open_sync(config) as cache:
        for epoch in range(300):
            cache.set_weights_epoch(f"step-{epoch}")
            serve(cache, prompt(config, epoch, 8))
            assert cache.flush().failed == 0, epoch
        tier = cache._running._tiers[-1]
        blocks = cache.stats()["tiers"]["lmdb"]["blocks"]
        rows = sum(1 for _ in tier._store.index.rows("namespaces"))
        assert rows <= blocks // 8 + 1
        assert tier.check() == cache.check() == []
    latest = config_for(tmp_path / "store", lmdb="2MiB", model={"weights_epoch": "step-299"})
    with kvtier.open_sync(latest) as cache:
        assert serve(cache, prompt(latest, 299, 8)).tiers["lmdb"] == 32


@pytest.mark.parametrize(
    ("tier", "problem"),
    [
        ({"gpu": "4KiB"}, r"tiers\[0\].capacity.*4 ?KiB"),
        ({"host": "8KiB"}, r"tiers\[1\].capacity.*8 ?KiB, less than"),
        ({"lmdb": "64KiB"}, r"tiers\[2\].capacity.*64KiB.*at least"),
        ({"lmdb": "256KiB"}, r"tiers\[2\].*256KiB.*at least"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_numbers(tmp_path, tier, problem):
    """A tier that is too small starts and does nothing, silently (sglang PR#26449)."""
    with pytest.raises(ConfigError, match=problem), kvtier.open_sync(config_for(tmp_path / "store", **tier)):
        pass


def test_a_forked_child_is_refused_and_harms_nobody(tmp_path):
    """A forked worker writes through its parent's store."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 6)
    with kvtier.open_sync(config) as cache:
        serve(cache, keys)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                cache.match(keys, owner="child")
            except ClosedError:
                cache.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert serve(cache, keys).tokens_ready == 24
        cache.flush()
    with kvtier.open_sync(config) as cache:
        assert serve(cache, keys).tokens_ready == 24


def test_a_child_forked_in_the_middle_of_a_verb_is_refused_too(tmp_path):
    """Another thread holds the engine's gate at that moment: the child waits for ever."""
    with kvtier.open_sync(config_for(tmp_path / "store")) as cache:
        with cache._engine._gate:
            refused = in_child(lambda: refusals([cache.stats, cache.check]))
        assert refused == 2


def test_a_store_that_cannot_be_written_says_why(tmp_path):
    """A wrong path ends in a traceback of somebody else's library."""
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(kvtier.KvtierError, match="file"):
        kvtier.open_sync(config_for(tmp_path / "file"))
