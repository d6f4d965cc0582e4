"""What a policy costs per access, beside cachetools and libCacheSim, in one process, interleaved: median CPU times.

python benchmarks/policies.py [--trace FILE ...] [--shares 2,5,10] [--split 1] [--requests 1500] [--rounds 5]
                              [--policies lru,arc,hit_density] [--json]

An access is one block of one request, after somebody has found out whether it is there. A hit costs its touch; a miss
costs the choice of a victim, its eviction, and the touch that fills, once the cache is full. Tiers hold so many percent
of the trace's distinct blocks. The calls are written down first, and only they are timed. Columns:
    by request   a request's hits, and its misses, in one call each, deepest first, as an engine makes them.
    one by one   each block alone: a reuse, or a choice, an eviction and a fill.
    hit, miss    what the calls of the hits cost for each hit, and those of the misses for each miss.
Others can only be asked one by one; their loop and their own looking up count, as they are what a hit is there.
Traces: the shipped one (`tests/data/README.md`), or any that `kvtier simulate` reads. Published blocks are of 512
tokens; --split 32 makes 32 blocks of 16 tokens of each, which is how long the calls of an engine are.
cachetools and libCacheSim are left out where they are not installed.
"""

import argparse
import json
import lzma
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvtier.policies import POLICIES
from kvtier.policies.base import Access, Policy
from kvtier.sim.reading import read_trace

SHIPPED = pathlib.Path(__file__).parents[1] / "tests/data/mooncake_synthetic.txt.xz"
FILL, REUSE = Access.FILL, Access.REUSE

Requests = list[list[int]]
Make = Callable[[int], Policy]
Run = Callable[[], float]  # -> seconds of CPU
Find = Callable[[Requests, int], int]  # requests, blocks of the cache -> hits


class Calls(NamedTuple):
    """What a policy was told, for hits and for misses apart: (verb, arguments), and how many hits there were."""

    made: list[tuple[str, tuple[Any, ...]]]
    hits: int


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description="what a policy costs per access")
    parser.add_argument("--trace", action="append", default=[], type=pathlib.Path)
    parser.add_argument("--shares", default="2,5,10")
    parser.add_argument("--split", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policies", default="lru,arc,hit_density")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for path in options.trace or [SHIPPED]:
        requests = split(read(path)[: options.requests], options.split)
        for share in map(float, options.shares.split(",")):
            new = measure(path.name.partition(".")[0], requests, share, options.policies.split(","), options.rounds)
            rows += new
            if not options.json:
                show(new)
    if options.json:
        print(json.dumps(rows, indent=1))


def read(path: pathlib.Path) -> Requests:
    """Each request's blocks, deepest first."""
    if path != SHIPPED:
        return [list(request.blocks)[::-1] for request in read_trace(path).requests]
    requests = []
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        runs = (tuple(map(int, run.split("+"))) for run in line.split()[1:])
        requests.append([block for first, count in runs for block in range(first, first + count)][::-1])
    return requests


def split(requests: Requests, parts: int) -> Requests:
    """Each block becomes so many."""
    return [[parts * block + part for block in blocks for part in reversed(range(parts))] for blocks in requests]


def measure(trace: str, requests: Requests, share: float, policies: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """All take turns, so that they see the same machine."""
    accesses = sum(map(len, requests))
    blocks = int(share / 100 * len({block for request in requests for block in request}))
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Run]] = []
    for name in policies:
        for way, record in (("by request", by_request), ("one by one", one_by_one)):
            make = POLICIES.get(name)
            calls = record(make(blocks), requests, blocks)
            rows.append({"name": name, "way": way, "hits": calls.hits})
            runs.append({"ns": replay(make, blocks, calls, "hit miss")})
            if way == "by request":
                runs[-1] |= {f"{kind}_ns": replay(make, blocks, calls, kind) for kind in ("hit", "miss")}
    for name, find in others().items():
        rows.append({"name": name, "way": "one by one", "hits": find(requests, blocks)})
        runs.append({"ns": partial(timed, find, requests, blocks)})
    took: list[dict[str, list[float]]] = [{column: [] for column in columns} for columns in runs]
    for _ in range(rounds):
        for columns, times in zip(runs, took, strict=True):
            for column, run in columns.items():
                times[column].append(run())
    for row, times in zip(rows, took, strict=True):
        row |= {"trace": trace, "share": share, "blocks": blocks, "accesses": accesses}
        counts = {"ns": accesses, "hit_ns": row["hits"], "miss_ns": accesses - row["hits"]}
        for column, seconds in times.items():
            row[column] = statistics.median(seconds) / max(1, counts[column]) * 1e9
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """One cell of a trace and a size, as a table."""
    first = rows[0]
    print(f"\n{first['trace']}: {first['accesses']:,} accesses, {first['share']:g} % = {first['blocks']:,} blocks")
    print(f"{'ns per':32}{'access':>8}{'hit':>8}{'miss':>8}{'hits, %':>10}")
    for row in rows:
        parts = "".join(f"{row[part]:8.0f}" if part in row else " " * 8 for part in ("ns", "hit_ns", "miss_ns"))
        print(f"{row['name']:20}{row['way']:12}{parts}{100 * row['hits'] / row['accesses']:10.1f}")


# ---------------------------------------------------------------- ours


def by_request(policy: Policy, requests: Requests, blocks: int) -> Calls:
    """A few calls for each request."""
    calls, here, hits = Calls([], 0), set[int](), 0
    for request in requests:
        found = [block for block in request if block in here]
        new = [block for block in request if block not in here]
        hits += len(found)
        if (short := len(here) + len(new) - blocks) > 0:
            victims = tell(policy, calls, "choose", short, set(found))
            tell(policy, calls, "evict", victims)
            here.difference_update(victims)
        if new:
            tell(policy, calls, "fill", new)
        if found:
            tell(policy, calls, "hit", found)
        here.update(new)
        tell(policy, calls, "forgotten")
    return calls._replace(hits=hits)


def one_by_one(policy: Policy, requests: Requests, blocks: int) -> Calls:
    """Some calls for each block."""
    calls, here, hits = Calls([], 0), set[int](), 0
    for block in (block for request in requests for block in request):
        if block in here:
            hits += 1
            tell(policy, calls, "hit", (block,))
            continue
        if len(here) == blocks:
            victims = tell(policy, calls, "choose", 1, (), None, block)
            tell(policy, calls, "evict", victims, block)
            here.difference_update(victims)
            tell(policy, calls, "forgotten")
        tell(policy, calls, "fill", (block,))
        here.add(block)
    return calls._replace(hits=hits)


def tell(policy: Policy, calls: Calls, verb: str, *arguments: Any) -> Any:
    """Make a call and write it down."""
    call = verbs_of(policy)[verb]
    if verb in ("fill", "hit"):
        arguments = (*arguments, FILL if verb == "fill" else REUSE)
    calls.made.append((verb, arguments))
    return call(*arguments)


def verbs_of(policy: Policy) -> dict[str, Callable[..., Any]]:
    """By what the calls are called here."""
    return {
        "choose": policy.candidates,
        "evict": policy.evict,
        "fill": policy.touch,
        "hit": policy.touch,
        "forgotten": policy.forgotten,
    }


def replay(make: Make, blocks: int, calls: Calls, kinds: str) -> Run:
    """All calls again, to a new policy. kinds: of which the time counts."""

    def run() -> float:
        verbs = verbs_of(make(blocks))
        made = [(verbs[verb], arguments) for verb, arguments in calls.made]
        if kinds == "hit miss":
            begin = time.process_time()
            for call, arguments in made:
                call(*arguments)
            return time.process_time() - begin
        total = 0.0
        for (verb, _), (call, arguments) in zip(calls.made, made, strict=True):
            if ("hit" if verb == "hit" else "miss") == kinds:
                begin = time.process_time()
                call(*arguments)
                total += time.process_time() - begin - CLOCK_S
            else:
                call(*arguments)
        return total

    return run


def clock_s() -> float:
    """What it costs to look at the clock: it would count as part of each call."""
    looks = 20_000
    begin = time.process_time()
    for _ in range(looks):
        time.process_time()
    return (time.process_time() - begin) / looks


CLOCK_S = clock_s()


# ---------------------------------------------------------------- others


def others() -> dict[str, Find]:
    """What is installed of the others."""
    found: dict[str, Find] = {}
    try:
        import cachetools
    except ImportError:
        pass
    else:
        found["cachetools LRUCache"] = partial(in_a_dict, cachetools.LRUCache)
    try:
        import libcachesim
    except ImportError:
        pass
    else:
        for name in ("LRU", "ARC"):
            found[f"libCacheSim {name}"] = partial(in_libcachesim, getattr(libcachesim, name), libcachesim.Request)
    return found


def in_a_dict(make: Any, requests: Requests, blocks: int) -> int:
    """A dict that drops its items."""
    cache, hits = make(blocks), 0
    for request in requests:
        for block in request:
            if cache.get(block) is None:
                cache[block] = True
            else:
                hits += 1
    return hits


def in_libcachesim(make: Any, request_of: Any, requests: Requests, blocks: int) -> int:
    """Its Python binding; one request object is used again and again."""
    cache, access, hits = make(cache_size=blocks), request_of(obj_id=1, obj_size=1), 0
    for request in requests:
        for block in request:
            access.obj_id = block + 1
            hits += cache.get(access)
    return hits


def timed(find: Find, requests: Requests, blocks: int) -> float:
    """Seconds of CPU."""
    begin = time.process_time()
    find(requests, blocks)
    return time.process_time() - begin


if __name__ == "__main__":
    main()
