"""What simulating costs: reading a trace, each policy on one tier, and three tiers.

    python benchmarks/simulate.py [TRACE] [--requests N] [--json]

Without TRACE, conversations are made up (the same ones each time). One tier holds 5 % of the trace's blocks; three
tiers hold 2, 5 and 20 %. Figures are seconds of one core, in one run; how fast `kvtier simulate` is altogether, its
`seconds` say. Units: nanoseconds per block asked for, microseconds per request.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import kvtier
from kvtier.blocks.spec import block_specs
from kvtier.cli.machine import machine, machine_line
from kvtier.policies import POLICIES
from kvtier.sim.flat import BELADY, simulate
from kvtier.sim.reading import read_trace
from kvtier.sim.replay import Replay
from kvtier.sim.setup import Setup
from kvtier.sim.trace import BLOCK_TOKENS, Trace, TracedRequest

T = TypeVar("T")
ONE_TIER, THREE_TIERS = 0.05, {"gpu": 0.02, "host": 0.05, "lmdb": 0.20}
MODEL = {"name": "m", "weights_epoch": "v1", "layers": 1, "kv_heads": 1, "head_dim": 16, "dtype": "bfloat16"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="a trace; none: made up")
    parser.add_argument("--requests", type=int, default=3000, metavar="N", help="only so many of them")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args(arguments)
    trace, reading_s = timed(lambda: read_trace(options.trace) if options.trace else conversations(options.requests))
    trace = Trace(trace.name, trace.block_tokens, trace.block_bytes, trace.requests[: options.requests])
    figures = {"reading, or making up": per(reading_s, trace.accesses, 1e9)} | one_tier(trace) | three_tiers(trace)
    facts = {"trace": trace.name, "requests": len(trace.requests), "accesses": trace.accesses}
    if options.json:
        print(json.dumps({**facts, "figures": figures, "machine": machine()}))
        return 0
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    for name, figure in figures.items():
        print(f"{name:24}{figure:10.0f} {'us/request' if name.startswith('three') else 'ns/block'}")
    print(machine_line(machine()))
    return 0


def one_tier(trace: Trace) -> dict[str, float]:
    """Nanoseconds per block, by policy."""
    blocks = max(1, int(ONE_TIER * trace.unique_blocks))
    figures = {}
    for policy in (*POLICIES, BELADY):
        _, seconds = timed(lambda policy=policy: simulate(trace, policy, blocks, "request"))
        figures[policy] = per(seconds, trace.accesses, 1e9)
    return figures


def three_tiers(trace: Trace) -> dict[str, float]:
    """Microseconds per request, by policy."""
    model = MODEL | {"block_tokens": trace.block_tokens}
    tiers: list[dict[str, Any]] = [{"type": name, "capacity": "1GiB"} for name in THREE_TIERS]
    tiers[-1]["path"] = "nowhere"
    (spec,) = block_specs(kvtier.load_config({"model": model, "tiers": tiers}).model)
    longest = max(len(request.blocks) for request in trace.requests)
    for tier in tiers:
        blocks = max(int(THREE_TIERS[tier["type"]] * trace.unique_blocks), 2 * longest)
        tier["capacity"] = f"{(blocks + 2) * spec.stride_bytes + (4 << 20)}B"
    config = kvtier.load_config({"model": model, "tiers": tiers})
    figures = {}
    for policy in ("lru", "hit_density"):
        _, seconds = timed(lambda policy=policy: Replay(trace, Setup(config, trace.block_tokens, policy)).run())
        figures[f"three tiers, {policy}"] = per(seconds, len(trace.requests), 1e6)
    return figures


def conversations(requests: int) -> Trace:
    """Talks that grow by some blocks each time, are left, and come back."""
    rng = random.Random(1)
    talks: list[list[int]] = [[] for _ in range(max(1, requests // 10))]
    rows, blocks = [], 0
    for number in range(requests):
        talk = rng.choice(talks)
        more = rng.randint(1, 20)
        talk += range(blocks, blocks + more)
        blocks += more
        rows.append(TracedRequest(number * 0.5, len(talk) * BLOCK_TOKENS, 0, [*talk]))
    return Trace("made up", BLOCK_TOKENS, None, rows)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    since = time.process_time()
    return work(), time.process_time() - since


def per(seconds: float, count: int, units: float) -> float:
    return seconds / max(1, count) * units


if __name__ == "__main__":
    sys.exit(main())
