"""Time to first token over the speed of the disk: computing, loading whatever is there, and what the governor chooses.

    python benchmarks/governor_sweep.py [--prefix-tokens 2000] [--rounds 3] [--plot docs/images/governor.png] [--json]

The demo's model (one torch thread). A prompt lies on disk only; the disk is slowed down in the program, from 64 KiB/s
to as fast as it is. For each speed a new cache is opened; it is told how long the prompt took to compute, as sessions
tell it, and asked for a short prompt first, from which it learns the disk. Then the long one is asked for. All ways
take turns; figures are medians of wall seconds until generate() hands out the first token.
Target: never slower than computing + 2 % (printed, not enforced).
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from governor_plot import draw
from transformers import AutoModelForCausalLM

import kvtier
from kvtier.cache.leases import Decision, Lease
from kvtier.cli.bench.folder import scratch
from kvtier.cli.demo import tiers, ttft, weights
from kvtier.cli.demo.convert import convert
from kvtier.cli.demo.text import Book
from kvtier.cli.machine import machine, machine_line
from kvtier.integrations.transformers import PrefixSession
from kvtier.testing.throttled import Throttle
from kvtier.tiers.lmdb.store import LmdbTier

SPEEDS = (64 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20, 256 << 20, None)
WAYS = ("always", "governed")
DEADLINE_S = 0.5  # the default
SHORT_TOKENS = 80
SETTLED_S = 3.0  # how long the short prompt's loads may go on before the long one is asked for
STORE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt that was answered: wall seconds to its first token, what was restored, and why."""

    seconds: float
    tokens_ready: int
    decision: Decision | None
    circuit: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", type=Path, help="a folder on the disk to be used (default: the current one)")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with scratch(options.path, STORE_BYTES) as folder:
        record = sweep(folder, options.prefix_tokens, options.rounds)
    record |= {"command": shlex.join(["python", *sys.argv]), "machine": machine()}
    print(json.dumps(record)) if options.json else show(record)
    if options.plot:
        print(draw(record, options.plot))
    return 0


def sweep(folder: Path, prefix_tokens: int, rounds: int, speeds: tuple[int | None, ...] = SPEEDS) -> dict[str, Any]:
    model_folder = weights.model_folder(os.environ)
    if not weights.is_converted(model_folder):
        gguf = weights.gguf_file()
        if gguf is None:
            raise SystemExit("the demo's model is missing: run `make demo` once")
        convert(gguf, model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    world = World(model, model_folder, folder / "store", prefix_tokens)
    world.fill()
    computed: dict[int | None, list[float]] = {speed: [] for speed in speeds}
    asked: dict[int | None, dict[str, list[Asked]]] = {speed: {way: [] for way in WAYS} for speed in speeds}
    latest_s = world.compute()
    for number in range(rounds):
        for speed in speeds if number % 2 == 0 else speeds[::-1]:
            for way in WAYS if number % 2 else WAYS[::-1]:
                if way == "governed":  # beside it: the machine has slow minutes
                    latest_s = world.compute()
                    computed[speed].append(latest_s)
                asked[speed][way].append(world.ask(speed, way, latest_s))
    return {
        "prefix_tokens": prefix_tokens,
        "rounds": rounds,
        "computed_s": statistics.median(chain.from_iterable(computed.values())),
        "points": [point(speed, computed[speed], asked[speed]) for speed in speeds],
    }


def point(speed: int | None, computed: list[float], asked: dict[str, list[Asked]]) -> dict[str, Any]:
    """One speed: medians, the median of the ratios within a round, and the governor's latest decision."""
    last = asked["governed"][-1]
    why = "breaker open" if last.circuit != "closed" else last.decision.why if last.decision else "not asked"
    return {
        "bytes_per_s": speed,
        "always_s": statistics.median(one.seconds for one in asked["always"]),
        "governed_s": statistics.median(one.seconds for one in asked["governed"]),
        "ratio": statistics.median(one.seconds / s for one, s in zip(asked["governed"], computed, strict=True)),
        "rounds": [
            {"computed_s": s, "governed_s": one.seconds} for one, s in zip(asked["governed"], computed, strict=True)
        ],
        "always_tokens": statistics.median(one.tokens_ready for one in asked["always"]),
        "governed_tokens": statistics.median(one.tokens_ready for one in asked["governed"]),
        "why": why,
    }


class World:
    """A model, a prompt, and a store that has it."""

    def __init__(self, model: Any, model_folder: Path, store: Path, prefix_tokens: int) -> None:
        book = Book(model_folder)
        self._model = model
        self._long = torch.tensor([book.asks(prefix_tokens, tiers.BLOCK_TOKENS).prompts[0].tokens])
        self._short = torch.tensor([book.asks(prefix_tokens, tiers.BLOCK_TOKENS).late.tokens[:SHORT_TOKENS]])
        small = tiers.small_tiers(model_folder, prefix_tokens, store)
        self._config = replace(small, limits=small.limits.model_copy(update={"load_deadline_s": DEADLINE_S}))

    def fill(self) -> None:
        with kvtier.open_sync(self._config) as cache:
            for prompt in (self._short, self._long):
                with PrefixSession(cache, self._model, prompt) as session:
                    ttft.ask(self._model, prompt, 1, **session.generate_kwargs)
            assert cache.flush().failed == 0

    def compute(self) -> float:
        """Seconds of the prompt without kvtier."""
        return ttft.ask(self._model, self._long, 1).first.wall_s

    def ask(self, speed: int | None, way: str, computed_s: float) -> Asked:
        """The prompt over a new cache, which has seen a short one at this speed."""
        limits = self._config.limits.model_copy(update={"governor": way == "governed"})
        with kvtier.open_sync(replace(self._config, limits=limits)) as cache, slowed(cache, speed):
            cache.prefilled(self._long.shape[1], computed_s)
            self._ask(cache, self._short)
            until_s = time.monotonic() + SETTLED_S
            while cache.stats()["tiers"]["lmdb"]["reading_bytes"] and time.monotonic() < until_s:
                time.sleep(0.01)
            circuit = cache.stats()["tiers"]["lmdb"]["circuit"]
            return replace(self._ask(cache, self._long), circuit=circuit)

    def _ask(self, cache: Any, prompt: torch.Tensor) -> Asked:
        leases: list[Lease] = []
        reserve = cache.reserve

        def noted(*arguments: Any, **options: Any) -> Any:
            answer = reserve(*arguments, **options)
            leases.extend([answer] if isinstance(answer, Lease) else [])
            return answer

        cache.reserve = noted
        begun_s = time.perf_counter()
        with PrefixSession(cache, self._model, prompt) as session:
            restored_s = time.perf_counter() - begun_s
            seconds = restored_s + ttft.ask(self._model, prompt, 1, **session.generate_kwargs).first.wall_s
            ready = session.tokens_restored
        cache.reserve = reserve
        return Asked(seconds, ready, leases[0].decision if leases else None)


@contextmanager
def slowed(cache: Any, speed: int | None) -> Iterator[None]:
    """Its disk has this speed meanwhile; None: its own."""
    if speed is None:
        yield
        return
    (disk,) = (tier for tier in cache._engine._tiers if isinstance(tier, LmdbTier))
    throttle = Throttle(disk, speed)
    try:
        yield
    finally:
        throttle.lift()


def speed_name(speed: int | None) -> str:
    if speed is None:
        return "own"
    return f"{speed >> 20} MiB/s" if speed >= 1 << 20 else f"{speed >> 10} KiB/s"


def show(record: dict[str, Any]) -> None:
    computed_s = record["computed_s"]
    print(f"{record['prefix_tokens']} prefix tokens; computed: {computed_s:.2f} s, medians of {record['rounds']}")
    print(f"{'disk':>10} {'always':>8} {'governed':>9} {'ratio':>6}  restored  why")
    for one in record["points"]:
        print(
            f"{speed_name(one['bytes_per_s']):>10} {one['always_s']:8.2f} {one['governed_s']:9.2f} {one['ratio']:6.3f}"
            f"  {one['governed_tokens']:8.0f}  {one['why']}"
        )
    worst = max(one["ratio"] for one in record["points"])
    print(f"worst governed / computed: {worst:.3f} (target <= 1.02)")
    print(machine_line(record["machine"]))
    print(f"$ {record['command']}")


if __name__ == "__main__":
    sys.exit(main())
