"""Time to first token, measured directly: from asking generate() until it gives the first token of its answer.

Owns no state. Cold, restored and floor are the same call; they differ in the KV it starts from. Units: seconds,
CPU (all threads of the process) and wall.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from kvtier.cli.demo.job import Asked, Seconds


class Stopwatch:
    """`seconds` holds what the block took, once it is left."""

    def __enter__(self) -> "Stopwatch":
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self.seconds = Seconds(time.process_time() - self._cpu_s, time.perf_counter() - self._wall_s)


class FirstToken(BaseStreamer):
    """Stops the watch at the first token that generate() hands out; what it hands out before is the prompt."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self._watch.stop()

    def end(self) -> None:
        """Nothing is left to stream."""


def ask(model: Any, prompt: torch.Tensor, new_tokens: int, **restored: Any) -> Asked:
    """generate(), greedy. prompt: [1, tokens]; restored: the KV to start from, as a session's `generate_kwargs`."""
    watch = Stopwatch().__enter__()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        streamer=FirstToken(watch),
        **restored,
    )
    return Asked(output[0, prompt.shape[1] :].tolist(), watch.seconds)


def device_bytes_read() -> int:
    """Bytes that the kernel has read from storage devices for this process; the page cache counts as none."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"])
