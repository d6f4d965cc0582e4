"""RAM per block of a pool whose blocks are all named, each pool in a process of its own.

    resident   growth of the process's resident bytes, so the allocator's own losses are counted
    traced     the sizes of all objects that are alive, by tracemalloc

Both divided by the number of blocks: links, counts, names with their hash objects, the index. Requests are gone by
then, as are their prompts. `python benchmarks/manager_memory.py SIDE BLOCKS` is the child; it prints one JSON object.
Units: bytes.
"""

import gc
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from manager_rounds import prompt
from manager_sides import PLAIN, Side, side_of

from kvtier.allocator import host_memory
from kvtier.cli.bench.memory import resident
from kvtier.errors import KvtierError

TARGET_BYTES = 220.0
PROMPT_BLOCKS = 1000


def measure(sides: Sequence[str], pools: Sequence[int]) -> list[dict[str, Any]]:
    """Raises KvtierError if a child fails."""
    return [
        {"blocks": blocks, "side": side, "target": TARGET_BYTES, **_child(side, blocks)}
        for blocks in pools
        for side in sides
    ]


def _child(side: str, blocks: int) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, side, str(blocks)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise KvtierError(f"measuring the RAM of {blocks} blocks failed: {last}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---------------------------------------------------------------- in the child


def grown(kind: type[Side], blocks: int) -> dict[str, float]:
    """Bytes per block, resident and traced. The traced pool is a second one: tracing takes RAM itself."""
    kept = [filled(kind, min(blocks, PROMPT_BLOCKS))]  # whatever is loaded or cached when first used
    bytes_resident = _growth(lambda: resident()[0], kept, kind, blocks)
    kept.clear()
    tracemalloc.start()
    bytes_traced = _growth(lambda: tracemalloc.get_traced_memory()[0], kept, kind, blocks)
    return {"bytes_resident": bytes_resident / blocks, "bytes_traced": bytes_traced / blocks}


def _growth(reading: Callable[[], int], kept: list[Side], kind: type[Side], blocks: int) -> int:
    gc.collect()
    host_memory.trim_heap()
    before = reading()
    kept.append(filled(kind, blocks))
    gc.collect()
    host_memory.trim_heap()
    return reading() - before


def filled(kind: type[Side], blocks: int) -> Side:
    """A manager of so many blocks beside the null block, all named and free."""
    side = kind(PLAIN, blocks + 1)
    for first in range(0, blocks, PROMPT_BLOCKS):
        tokens = prompt(f"{first}", min(PROMPT_BLOCKS, blocks - first))[:-1]
        request = side.request("r", tokens)
        assert side.allocate(request, len(tokens), side.get(request)) is not None
        side.free(request)
    return side


if __name__ == "__main__":
    print(json.dumps(grown(side_of(sys.argv[1]), int(sys.argv[2]))))
