"""The copying between vLLM's blocks and the slots of kvtier's host slab, which is mapped at the first copy.

Who copies is a `BlockCopies`: torch's indexing here; a device's adapter would hand in `kvtier.engine.foreign_pages`.
Always: vLLM takes no failure for an answer, so a copy that cannot be made raises: the engine ends, rather than going on
with wrong bytes. A slot is [rank][block of the chunk][layer].
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvtier.engine.moves import BlockCopies
from kvtier.errors import ConfigError, DeviceLost, KvtierError, UsageError
from kvtier.integrations.vllm.torch_copies import Slab, TorchCopies
from kvtier.types import BatchDone, Status

CopiesFor = Callable[[Sequence[torch.Tensor], Slab], BlockCopies]  # vLLM's layers, [blocks, bytes], and our slots


@dataclass(frozen=True)
class SlotSpec(LoadStoreSpec):
    """Slots of the slab at `path`, one per key of the job."""

    path: str
    stride_bytes: int
    slots: tuple[int, ...]


class KvtierWorker(OffloadingWorker):
    def __init__(
        self,
        caches: CanonicalKVCaches,
        rank: int,
        block_bytes: int,
        blocks_per_chunk: int,
        copies_for: CopiesFor = TorchCopies,
    ) -> None:
        refs = caches.group_data_refs[0]
        self._layers = [caches.tensors[ref.tensor_idx].tensor for ref in refs]
        pages = [ref.page_size_bytes for ref in refs]
        if sum(pages) != block_bytes or [layer.shape[1] for layer in self._layers] != pages:
            raise ConfigError("kvtier", f"blocks of {sum(pages)} bytes, not {block_bytes}, or padded", "Leave it out")
        self._rank, self._block_bytes, self._blocks_per_chunk = rank, block_bytes, blocks_per_chunk
        self._copies_for = copies_for
        self._mapped_path, self._copies = "", list[BlockCopies]()
        self._slabs: list[Slab] = []  # whose memory copies use by address
        self._begun_s: dict[int, float] = {}  # by job

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: SlotSpec) -> bool:
        return self._begin(job_id, "store", src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: SlotSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._begin(job_id, "load", dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        return [self._result(done) for copies in self._copies for done in copies.finished()]

    def wait(self, job_ids: set[int]) -> None:
        for copies in self._copies:
            copies.join(job_ids)

    def shutdown(self) -> None:
        while self._copies:
            self._copies.pop().close()
        self._slabs.clear()

    def _begin(self, job_id: int, kind: str, blocks: GPULoadStoreSpec, slots: SlotSpec) -> bool:
        size, first, ids = self._blocks_per_chunk, int(blocks.block_indices[0]), blocks.block_ids.tolist()
        numbers = np.arange(first, first + len(ids))  # of the request's blocks
        chunks = numbers // size - first // size
        if slots.slots != () and chunks[-1] + 1 != len(slots.slots):
            raise UsageError(f"{len(slots.slots)} slots for blocks from {first} to {numbers[-1]} of a request")
        places = np.array(slots.slots, np.int64)[chunks] * size + numbers % size
        self._begun_s[job_id] = time.perf_counter()
        self._map(slots).begin(job_id, kind, ids, places.tolist())
        return True

    def _result(self, done: BatchDone) -> TransferResult:
        for outcome in done.outcomes:
            if not outcome.done:
                error = DeviceLost if outcome.status is Status.DEVICE_LOST else KvtierError
                raise error(f"job {done.batch_id}: {outcome.detail}")
        took_s = time.perf_counter() - self._begun_s.pop(done.batch_id)
        return TransferResult(done.batch_id, True, len(done.outcomes) * self._block_bytes, took_s)

    def _map(self, slots: SlotSpec) -> BlockCopies:
        """Who copies to and from the slab of these slots."""
        if self._mapped_path != slots.path:
            with open(slots.path, "r+b", buffering=0) as file:
                mapped = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
            size, part_bytes = self._blocks_per_chunk, self._block_bytes
            memory = torch.frombuffer(mapped, dtype=torch.int8)
            slab = Slab(memory, slots.stride_bytes, self._rank * size * part_bytes, part_bytes, size)
            self._slabs.append(slab)
            self._copies.append(self._copies_for(self._layers, slab))
            self._mapped_path = slots.path
        return self._copies[-1]
