"""What kvtier takes of RAM beside its configured capacities, each figure in a process of its own.

    keys   a core with three tiers adopts so many names; resident bytes before and after, divided
    idle   a cache over a store is opened, has served one prompt, and is left alone; resident bytes above those after
           the imports, less those of its slots (which are what the capacities pay for)

`python -m kvtier.cli.bench.memory ROLE COUNT FOLDER` is the child; it prints one JSON object.
Units: bytes.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from kvtier.cli.bench.report import Cost
from kvtier.errors import KvtierError
from kvtier.types import StoredBlock

KEY_TARGET_BYTES = 220.0
IDLE_TARGET_MB = 100.0
SERVED_BLOCKS = 64


def key_cost(folder: Path, keys: int) -> Cost:
    """Bytes of RAM per known key."""
    found = _child("keys", keys, folder)
    return Cost(f"RAM per known key, {keys:,} keys", "bytes", [found["bytes"] / keys], KEY_TARGET_BYTES)


def idle_cost(folder: Path, store_blocks: int) -> Cost:
    """MB above imports, capacities and the names of the blocks in the store in `folder`."""
    found = _child("idle", store_blocks, folder)
    beside_bytes = found["bytes"] - found["slot_bytes"] - KEY_TARGET_BYTES * store_blocks
    return Cost("RAM of an idle cache, slots and keys apart", "MB", [beside_bytes / 1e6], IDLE_TARGET_MB)


def _child(role: str, count: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvtier.cli.bench.memory", role, str(count), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own module
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise KvtierError(f"measuring the RAM of {count} keys failed: {last}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------- in the child


def resident() -> tuple[int, int]:
    """Bytes in RAM: all, and of these shared memory, which is where slots lie."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024, int(status["RssShmem"].split()[0]) * 1024


def grown_by_keys(folder: Path, keys: int) -> dict[str, int]:
    """Adopt so many names, as from a store, without one."""
    from kvtier.allocator import host_memory
    from kvtier.cli.bench import world
    from kvtier.cli.bench.opening import core_over

    config = world.config(world.SMALL, world.SMALL_BYTES, 16, 16, folder / f"keys{keys}", keys)
    with core_over(config) as (core, _):
        before, _ = resident()
        core.adopt(len(config.tiers) - 1, names(keys, world.SMALL_BYTES))
        host_memory.trim_heap()  # as whoever opens a cache does
        after, _ = resident()
    return {"bytes": after - before}


def names(keys: int, block_bytes: int) -> Iterator[StoredBlock]:
    """Blocks that nobody wrote: only their names count."""
    from kvtier.types import block_key, store_key

    for place in range(keys):
        yield StoredBlock(store_key(0, block_key(os.urandom(32), 0)), place, place + 1, block_bytes)


def grown_by_cache(folder: Path, store_blocks: int) -> dict[str, int]:
    """Open, serve once, and let go."""
    from kvtier.cli.bench import world
    from kvtier.engine.sync import open_sync

    for module in ("gpu", "host", "lmdb.store"):  # imported when a tier is opened, and no part of its cost
        import_module(f"kvtier.tiers.{module}")

    config = world.config(world.SMALL, world.SMALL_BYTES, SERVED_BLOCKS, SERVED_BLOCKS, folder, store_blocks)
    keys = world.prompt(config, 0, min(SERVED_BLOCKS, store_blocks))
    before, slots_before = resident()
    with open_sync(config) as cache:
        cache.release(world.reserved(cache, keys, len(keys.groups[0])))
        world.flush(cache)
        after, slots_after = resident()
    return {"bytes": after - before, "slot_bytes": slots_after - slots_before}


if __name__ == "__main__":
    role, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps({"keys": grown_by_keys, "idle": grown_by_cache}[role](folder, count)))
