"""Time to first token, measured directly: from the prompt's ids to the logits of the token after it.

Owns no state. Cold, restored and floor run the same forward; they differ in the KV it starts from. Units: seconds,
CPU (all threads of the process) and wall.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from kvtier.cli.demo.job import Seconds


class Stopwatch:
    """`seconds` holds what the block took, once it is left."""

    def __enter__(self) -> "Stopwatch":
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = Seconds(time.process_time() - self._cpu_s, time.perf_counter() - self._wall_s)


@torch.inference_mode()
def first_token(model: Any, input_ids: torch.Tensor, past: Any = None) -> int:
    """The forward that a user waits for. input_ids: [1, tokens], those that `past` does not cover."""
    output = model(input_ids, cache=past, use_cache=True, logits_to_keep=1)
    return int(output.logits[0, -1].argmax())


def cold(model: Any, input_ids: torch.Tensor) -> Seconds:
    """Without kvtier and without any earlier KV."""
    with Stopwatch() as watch:
        first_token(model, input_ids)
    return watch.seconds


def floor(model: Any, input_ids: torch.Tensor, past: Any) -> Seconds:
    """With the prefix's KV in RAM, filled and ready: what no store can beat. Appends to `past`."""
    with Stopwatch() as watch:
        first_token(model, input_ids[:, past.get_seq_length() :], past)
    return watch.seconds


def device_bytes_read() -> int:
    """Bytes that the kernel has read from storage devices for this process; the page cache counts as none."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"])
