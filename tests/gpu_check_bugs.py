"""Bugs that are planted under the check for cards, by the part that must find each."""

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.vmm import Arena
from kvtier.engine.mover import TierMover
from kvtier.errors import DriverError
from kvtier.kernels import launch_blocks
from kvtier.kernels.launch_device import DeviceLauncher
from kvtier.testing.gpu_check import part_aliases, part_copies, part_decode
from kvtier.testing.gpu_check.paged import Placed
from kvtier.testing.gpu_check.reader import Reader
from kvtier.testing.gpu_check.serving import Serving
from kvtier.tiers.device_copies import DeviceCopies
from kvtier.types import DONE, Outcome, Status
from tests.fakecuda.fake import GRANULE_BYTES


def copies_lose_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    read = DeviceCopies.read
    monkeypatch.setattr(DeviceCopies, "read", lambda self, items: [*read(self, items[:-1]), DONE])


def kernels_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceLauncher, "launch", lambda self, launch, stream_key: None)


def gather_takes_the_wrong_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = launch_blocks.gather
    wrong = lambda pool, slots, fragments, blocks, count: gather(pool, slots, fragments, slots, count)  # noqa: E731
    monkeypatch.setattr(launch_blocks, "gather", wrong)


def batches_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        part_copies.Blocks,
        "_batch",
        lambda self, way: self.card.streams.copy(
            *(ends[:-1] for ends in self._ends(way)), self._lengths[:-1], self.card.stream
        ),
    )


def loops_only_go_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they should bring up, another method has brought there before."""
    loop = part_copies.Blocks._loop
    monkeypatch.setattr(part_copies.Blocks, "_loop", lambda self, way: loop(self, way) if way == "down" else None)


def tables_are_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Placed.run

    def shifted(self: Placed, stream: Any = None) -> None:
        tables = self._question.batch.tables
        self._card.put(self.tables, np.roll(tables, 1, axis=1))
        run(self, stream)

    monkeypatch.setattr(Placed, "run", shifted)


def shrinking_keeps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "shrink", lambda self, granules, is_free: [])


def growing_spoils_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = Arena.map

    def map_and_spoil(self: Arena, granules: Any) -> list[int]:
        stride_bytes = self.geometry.stride_bytes
        ctypes.memset(self.address + stride_bytes, 0xEE, max(0, self.slots_mapped - 1) * stride_bytes)
        return grow(self, granules)

    monkeypatch.setattr(Arena, "map", map_and_spoil)


def releases_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CudaDriver.release
    large = lambda self, handle: release(self, handle) if handle.length_bytes == GRANULE_BYTES else None  # noqa: E731
    monkeypatch.setattr(CudaDriver, "release", large)


def blocks_are_restored_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    write = DeviceCopies.write

    def swapped(self: DeviceCopies, batch: Any) -> Any:
        if len(batch.items) > 1:
            first, second, *rest = batch.items
            exchanged = (replace(first, source=second.source), replace(second, source=first.source))
            batch = replace(batch, items=[*exchanged, *rest])
        return write(self, batch)

    monkeypatch.setattr(DeviceCopies, "write", swapped)


def loads_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = lambda self, batch: [Outcome(Status.DONE, item.place) for item in batch.items]  # noqa: E731
    monkeypatch.setattr(DeviceCopies, "write", done)


def stores_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierMover, "_store", lambda self, move: [Outcome(Status.FAILED) for _ in move.keys])


def loads_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierMover, "_load", lambda self, move: [Outcome(Status.FAILED) for _ in move.keys])


def slots_move(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = Serving.address_now, count()
    monkeypatch.setattr(Serving, "address_now", lambda self: now(self) + next(asked))


def readers_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "is_running", False)


def results_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = Placed.result, count()
    monkeypatch.setattr(Placed, "result", lambda self: result(self) + next(asked))


def demotion_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_decode.Demotion, "running", lambda self: nullcontext())


def demotion_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its thread: afterwards all is well."""
    read = DeviceCopies.read

    def fail_there(self: DeviceCopies, items: Any) -> Any:
        if threading.current_thread().name == "kvtier-demotion":
            raise DriverError("cuMemcpyBatchAsync", 1, "refused")
        return read(self, items)

    monkeypatch.setattr(DeviceCopies, "read", fail_there)


def trespasses_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_aliases, "_trespass", lambda device, way: {"refused": way == "copy", "error": None})


def parts_have_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_decode, "_steps", lambda card, placed, steps: [][0])


def results_are_a_percent_off(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Placed.result
    monkeypatch.setattr(Placed, "result", lambda self: result(self) * np.float32(1.01))


def aliases_are_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    open_to = CudaDriver.set_access
    monkeypatch.setattr(CudaDriver, "set_access", lambda self, *place, write: open_to(self, *place, write=True))
    monkeypatch.setattr(CudaDriver, "has_read_only", True)


PLANTED: list[tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = [
    ("copies", batches_are_short, "batch, blocks of 4096 bytes: other bytes came back"),
    ("copies", loops_only_go_down, "loop, blocks of 65536 bytes: other bytes came back"),
    ("copies", gather_takes_the_wrong_blocks, "kernel, blocks of 4096 bytes: other bytes came back"),
    ("copies", kernels_do_nothing, "kernel, blocks of 65536 bytes: other bytes came back"),
    ("copies", kernels_do_nothing, "fragments of 128 bytes: load by staged is left out: it gives other bytes"),
    ("copies", gather_takes_the_wrong_blocks, "fragments of 128 bytes: store by direct is left out"),
    ("attention", tables_are_off_by_one, "float16, head dim 64, decode: relative error"),
    ("attention", kernels_do_nothing, "bfloat16, head dim 64, sliding window: relative error inf"),
    ("attention", results_are_a_percent_off, "bfloat16, head dim 64, decode: relative error 1.0e-02, at most 8e-03"),
    ("aliases", aliases_are_writable, "aliases asked for as read-only grant the access"),
    ("roundtrip", copies_lose_the_last, "blocks have other bytes"),
    ("roundtrip", blocks_are_restored_elsewhere, "from host: [1-3] blocks have other bytes"),
    ("engine", blocks_are_restored_elsewhere, "restored from host: .* answers differ"),
    ("engine", tables_are_off_by_one, "request 0: relative error"),
    ("managed", copies_lose_the_last, "blocks have other bytes"),
    ("managed", blocks_are_restored_elsewhere, "from host, prompt 0: [1-3] blocks have other bytes"),
    ("managed", loads_write_nothing, "from lmdb, prompt 0: 3 blocks have other bytes"),
    ("managed", stores_fail, "not all pages could be copied to the store"),
    ("managed", loads_fail, "from host, prompt 0: 0 of 48 tokens"),
    ("decode", copies_lose_the_last, "blocks came down with other bytes"),
    ("resize", shrinking_keeps_memory, "shrinking gave back 0% of 524288 bytes"),
    ("resize", growing_spoils_slots, "steps read wrong bytes"),
    ("aliases", kernels_do_nothing, "a kernel reads other bytes"),
    ("roundtrip", loads_write_nothing, "from lmdb: 3 blocks have other bytes"),
    ("resize", slots_move, "the slots' address changed"),
    ("resize", readers_stop, "the reader stopped while the tier was resized"),
    ("vmm", readers_stop, "the reader stopped while memory was mapped"),
    ("decode", results_vary, "decode results change while blocks are demoted"),
    ("decode", demotion_rests, "nothing was demoted while the loop ran"),
    ("decode", demotion_fails, "DriverError: cuMemcpyBatchAsync: refused"),
    ("decode", parts_have_bugs, "IndexError: list index out of range"),
    ("aliases", trespasses_go_through, "a kernel wrote through a mapping that is read-only"),
    ("vmm", releases_are_forgotten, "memory that was released is still taken"),
    ("vmm", kernels_do_nothing, "steps read wrong bytes"),
]
