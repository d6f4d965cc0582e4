"""What a policy costs per access, beside cachetools and libCacheSim, in one process, interleaved: median CPU times.

python benchmarks/policies.py [--rounds 5] [--blocks 4392] [--requests 1500] [--policies lru,arc,...] [--json]

The trace is the shipped one (`tests/data/README.md`), each request's blocks touched deepest first. Columns:
    one by one   each block alone: a reuse, or a choice, an eviction and a fill. The others can do nothing else.
    by request   all of a request in one call each: choice and eviction for what is missing, reuse, fill.
The loop around the calls, which finds out what is resident, is counted, too.
cachetools and libCacheSim are left out where they are not installed.
"""

import argparse
import json
import lzma
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.policies import POLICIES
from kvtier.policies.base import Access, Policy

TRACE = pathlib.Path(__file__).parents[1] / "tests/data/mooncake_synthetic.txt.xz"
FILL, REUSE = Access.FILL, Access.REUSE

Requests = list[list[int]]
Run = Callable[[Requests, int], int]  # requests, blocks of the cache -> hits


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description="what a policy costs per access")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=4392)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    requests = read_trace()[: options.requests]
    runs: dict[tuple[str, str], Run] = {}
    for name in options.policies.split(","):
        runs[name, "one by one"] = one_by_one(POLICIES.get(name))
        runs[name, "by request"] = by_request(POLICIES.get(name))
    runs |= {(name, "one by one"): run for name, run in others().items()}
    rows = measure(runs, requests, options.blocks, options.rounds)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'':28}{'ns/access':>12}{'hits':>10}")
    for row in rows:
        print(f"{row['name']:16}{row['way']:12}{row['ns']:12.0f}{row['hits']:10}")


def measure(runs: dict[tuple[str, str], Run], requests: Requests, blocks: int, rounds: int) -> list[dict[str, Any]]:
    """All take turns, so that they see the same machine."""
    accesses = sum(map(len, requests))
    took: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    hits: dict[tuple[str, str], int] = {}
    for _ in range(rounds):
        for key, run in runs.items():
            begin = time.process_time()
            hits[key] = run(requests, blocks)
            took[key].append((time.process_time() - begin) / accesses * 1e9)
    return [
        {
            "name": key[0],
            "way": key[1],
            "ns": statistics.median(took[key]),
            "ns_least": min(took[key]),
            "hits": hits[key],
        }
        for key in runs
    ]


def read_trace() -> Requests:
    """Each request's blocks, deepest first."""
    requests = []
    for line in lzma.decompress(TRACE.read_bytes()).decode().splitlines():
        runs = (tuple(map(int, run.split("+"))) for run in line.split()[1:])
        requests.append([block for first, count in runs for block in range(first, first + count)][::-1])
    return requests


def one_by_one(make: Callable[[int], Policy]) -> Run:
    """Every access a call, as a simulator makes them."""

    def run(requests: Requests, blocks: int) -> int:
        policy = make(blocks)
        touch, candidates, evict = policy.touch, policy.candidates, policy.evict
        resident: set[int] = set()
        hits, room = 0, blocks
        for request in requests:
            for block in request:
                if block in resident:
                    hits += 1
                    touch((block,), REUSE)
                    continue
                if room:
                    room -= 1
                else:
                    victims = candidates(1, incoming=block)
                    evict(victims, block)
                    resident.discard(victims[0])
                touch((block,), FILL)
                resident.add(block)
            policy.forgotten()
        return hits

    return run


def by_request(make: Callable[[int], Policy]) -> Run:
    """A few calls for each request, as the engine makes them."""

    def run(requests: Requests, blocks: int) -> int:
        policy = make(blocks)
        resident: set[int] = set()
        hits = 0
        for request in requests:
            found = [block for block in request if block in resident]
            new = [block for block in request if block not in resident]
            hits += len(found)
            short = len(resident) + len(new) - blocks
            if short > 0:
                victims: Sequence[int] = policy.candidates(short, set(found))
                policy.evict(victims)
                resident.difference_update(victims)
            policy.touch(new, FILL)
            policy.touch(found, REUSE)
            resident.update(new)
            policy.forgotten()
        return hits

    return run


def others() -> dict[str, Run]:
    """What is installed of the others."""
    found: dict[str, Run] = {}
    try:
        import cachetools
    except ImportError:
        pass
    else:
        found |= {f"cachetools {name}": cachetools_run(getattr(cachetools, name)) for name in ("LRUCache", "LFUCache")}
    try:
        import libcachesim
    except ImportError:
        pass
    else:
        names = ("LRU", "ARC", "TwoQ", "S3FIFO", "Sieve")
        found |= {f"lcs {name}": libcachesim_run(getattr(libcachesim, name), libcachesim.Request) for name in names}
    return found


def cachetools_run(make: Any) -> Run:
    """A dict that drops its items."""

    def run(requests: Requests, blocks: int) -> int:
        cache, hits = make(blocks), 0
        for request in requests:
            for block in request:
                if cache.get(block) is None:
                    cache[block] = True
                else:
                    hits += 1
        return hits

    return run


def libcachesim_run(make: Any, request_of: Any) -> Run:
    """Its Python binding; one request object is used again and again."""

    def run(requests: Requests, blocks: int) -> int:
        cache, access, hits = make(cache_size=blocks), request_of(obj_id=1, obj_size=1), 0
        for request in requests:
            for block in request:
                access.obj_id = block + 1
                hits += cache.get(access)
        return hits

    return run


if __name__ == "__main__":
    main()
