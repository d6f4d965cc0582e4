"""What demotion at a fixed rate costs a model that decodes in the same process.

    python benchmarks/movement_decode.py [--mb-per-s 200] [--steps 48] [--rounds 9] [--path DIR] [--json]

The demo's model decodes token after token on one torch thread, in turns: alone; while a feeder thread commits synthetic
blocks to a cache, paced; and while it commits them at the same pace to one that brings them down from gpu through host
to lmdb. So "with / without" is told twice: by the model alone, and by the same requests without demotion. Each turn
starts from the same prompt, both caches are open in all of them, and the speed of the demotion is measured.
Units: blocks of 737,280 bytes, milliseconds per decode step, MB/s.
"""

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import movement_program
import numpy as np

from kvtier.cli.bench import world
from kvtier.cli.bench.lag import PERCENT, percentile
from kvtier.cli.bench.report import Cost, Report
from kvtier.cli.demo.text import Book
from kvtier.cli.demo.weights import is_converted, model_folder
from kvtier.config import Config, load_config
from kvtier.engine.sync import SyncCache, open_sync
from kvtier.errors import UsageError

NAME = "movement: decoding beside demotion"
TARGET = 1.10  # a step with, by a step without
FED_BLOCKS = 16  # per request of the feeder: at 200 MB/s one in 59 ms, which is about a step
GPU_SLOTS, HOST_SLOTS, STORE_BLOCKS = 128, 256, 1024
EAGER = {"low_watermark": 0.8, "high_watermark": 0.9}  # close: demotion in bursts would spare most steps
NEVER = {"low_watermark": 0.0, "high_watermark": 0.01}
LEAD_S = 0.5  # the feeder runs for so long before a turn is timed
ALONE, FED, DEMOTING = "alone", "beside requests", "beside requests and demotion"


@dataclass(frozen=True, slots=True)
class Sizes:
    mb_per_s: int = field(default=200, metadata={"help": "brought down"})
    steps: int = field(default=48, metadata={"help": "decoded per turn"})
    rounds: int = field(default=9, metadata={"help": "of a turn of each kind"})
    prompt_tokens: int = field(default=256, metadata={"help": "before the first step"})


def disk_bytes(sizes: Sizes) -> int:
    return 4 * STORE_BLOCKS * world.LARGE_BYTES


def measure(report: Report, sizes: Sizes, folder: Path) -> None:
    decoder = Decoder(sizes.prompt_tokens)
    steps_ms: dict[str, list[list[float]]] = {ALONE: [], FED: [], DEMOTING: []}
    speeds = []
    with ExitStack() as stack:
        feeders = {}
        for turn, marks in ((FED, NEVER), (DEMOTING, EAGER)):
            cache = stack.enter_context(open_sync(_config(folder / turn.replace(" ", "-"), marks)))
            feeders[turn] = stack.enter_context(Feeder(cache, sizes.mb_per_s * 1e6))
        order = list(steps_ms)
        for round_ in range(-1, sizes.rounds):
            random.Random(round_).shuffle(order)
            for turn in order:
                with feeders[turn].feeding() if turn in feeders else nullcontext():
                    before = feeders[DEMOTING].written_bytes(), time.perf_counter()
                    steps = decoder.steps_ms(sizes.steps)
                    after = feeders[DEMOTING].written_bytes(), time.perf_counter()
                if round_ >= 0:
                    steps_ms[turn].append(steps)
                if round_ >= 0 and turn is DEMOTING:
                    speeds.append((after[0] - before[0]) / (after[1] - before[1]) / 1e6)
    _tell(report, steps_ms)
    report.costs.append(Cost("demoted to the disk meanwhile", "MB/s", speeds))
    report.notes.append(
        f"{sizes.rounds} rounds of {sizes.steps} steps after {sizes.prompt_tokens} tokens, torch: 1 thread"
    )


def _tell(report: Report, steps_ms: dict[str, list[list[float]]]) -> None:
    """Steps of each kind, and ratios round by round."""
    figures: dict[str, Callable[[list[float]], float]] = {
        "median": statistics.median,
        "mean": statistics.fmean,
        "p99": lambda steps: percentile(steps, PERCENT),
    }
    for name, figure in figures.items():
        found = {turn: [figure(steps) for steps in turns] for turn, turns in steps_ms.items()}
        report.costs += [Cost(f"decode step {turn}: {name}", "ms", values) for turn, values in found.items()]
        for upper, lower in ((DEMOTING, FED), (DEMOTING, ALONE), (FED, ALONE)):
            ratios = [above / below for above, below in zip(found[upper], found[lower], strict=True)]
            target = TARGET if name == "median" and upper is DEMOTING else None
            report.costs.append(Cost(f"  {upper} / {lower}", "x", ratios, target))


class Decoder:
    """The demo's model, with a prompt computed once."""

    def __init__(self, prompt_tokens: int) -> None:
        folder = model_folder(os.environ)
        if not is_converted(folder):
            raise UsageError("the demo's model is not there yet; run `kvtier demo` once")
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.cache_utils import DynamicCache
        from transformers.utils.logging import disable_progress_bar

        torch.set_num_threads(1)
        disable_progress_bar()
        self._torch, self._cache_class = torch, DynamicCache
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._prompt = torch.tensor([Book(folder).asks(prompt_tokens, world.BLOCK_TOKENS).prompts[0].tokens])

    def steps_ms(self, steps: int) -> list[float]:
        """What each of so many steps takes; the prompt is computed before them, and not counted."""
        took_ms = []
        with self._torch.no_grad():
            past = self._cache_class()
            found = self._model(self._prompt, cache=past, use_cache=True, logits_to_keep=1)
            for _ in range(steps):
                token = found.logits[:, -1:].argmax(-1)
                begun_s = time.perf_counter()
                found = self._model(token, cache=past, use_cache=True)
                took_ms.append((time.perf_counter() - begun_s) * 1e3)
        return took_ms


class Feeder:
    """A thread that commits blocks nobody has met, at a fixed rate, while it is asked to."""

    def __init__(self, cache: SyncCache, bytes_per_s: float) -> None:
        self._cache = cache
        self._period_s = FED_BLOCKS * world.LARGE_BYTES / bytes_per_s
        self._wanted = threading.Event()
        self._committing = threading.Lock()
        self._ending = False
        self._numbers = count()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def __enter__(self) -> "Feeder":
        usable = GPU_SLOTS - 1
        lease = world.reserved(self._cache, world.prompt(self._cache.config, next(self._numbers), usable), usable)
        world.fill(self._cache, lease, np.random.default_rng(0))  # once: slots keep the bytes that they had
        self._cache.release(lease)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._wanted.set()
        self._thread.join()

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Committing within, and nothing moves afterwards."""
        self._wanted.set()
        time.sleep(LEAD_S)
        try:
            yield
        finally:
            self._wanted.clear()
            with self._committing:
                self._cache.flush()

    def written_bytes(self) -> int:
        """To the disk, so far."""
        written: int = self._cache.stats()["tiers"]["lmdb"]["written_bytes"]
        return written

    def _run(self) -> None:
        due_s = time.perf_counter()
        while self._wanted.wait() and not self._ending:
            with self._committing:
                if self._wanted.is_set():
                    self._commit(next(self._numbers))
            now_s = time.perf_counter()
            due_s = max(due_s + self._period_s, now_s - self._period_s)  # a pause is not made up for
            time.sleep(max(0.0, due_s - now_s))

    def _commit(self, number: int) -> None:
        keys = world.prompt(self._cache.config, number, FED_BLOCKS)
        lease = world.reserved(self._cache, keys, FED_BLOCKS)
        world.commit_all(self._cache, lease, keys)
        self._cache.release(lease)


def _config(store: Path, marks: dict[str, float]) -> Config:
    shape = {"block_tokens": world.BLOCK_TOKENS, **world.LARGE}
    tree = {
        "model": {"name": "bench", "weights_epoch": "v1", "dtype": "float32", **shape},
        "tiers": [
            {"type": "gpu", "capacity": GPU_SLOTS * world.LARGE_BYTES, "device": "host", **marks},
            {"type": "host", "capacity": HOST_SLOTS * world.LARGE_BYTES, "pin": "off", "hugepages": "off", **marks},
            {"type": "lmdb", "capacity": STORE_BLOCKS * world.LARGE_BYTES, "path": str(store.absolute())},
        ],
    }
    return load_config(tree, environ={})


if __name__ == "__main__":
    movement_program.main(__name__)
