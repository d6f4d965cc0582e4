"""The copying between vLLM's blocks and the slots of kvtier's host slab, which it maps at the first copy.

Always: a copy is whole when `submit_...` returns. vLLM takes no failure for an answer, so one that cannot be made
raises: the engine ends, rather than going on with wrong bytes. A slot is [rank][block of the chunk][layer].
"""

import mmap
import os
import time
from dataclasses import dataclass

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvtier.errors import ConfigError, UsageError


@dataclass(frozen=True)
class SlotSpec(LoadStoreSpec):
    """Slots of the slab at `path`, one per key of the job."""

    path: str
    stride_bytes: int
    slots: tuple[int, ...]


class KvtierWorker(OffloadingWorker):
    def __init__(self, caches: CanonicalKVCaches, rank: int, block_bytes: int, blocks_per_chunk: int) -> None:
        refs = caches.group_data_refs[0]
        self._layers = [caches.tensors[ref.tensor_idx].tensor for ref in refs]
        pages = [ref.page_size_bytes for ref in refs]
        if sum(pages) != block_bytes or [layer.shape[1] for layer in self._layers] != pages:
            raise ConfigError("kvtier", f"blocks of {sum(pages)} bytes, not {block_bytes}, or padded", "Leave it out")
        self._rank, self._block_bytes, self._blocks_per_chunk = rank, block_bytes, blocks_per_chunk
        self._mapped_path, self._parts = "", list[torch.Tensor]()
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: SlotSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: SlotSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, slots: SlotSpec, *, store: bool) -> bool:
        begun_s, size, first = time.perf_counter(), self._blocks_per_chunk, blocks.block_indices[0]
        ids, places = torch.from_numpy(blocks.block_ids).long(), torch.arange(first, first + len(blocks.block_ids))
        chunks = places // size - first // size
        if slots.slots != () and int(chunks[-1]) + 1 != len(slots.slots):
            raise UsageError(f"{len(slots.slots)} slots for blocks from {first} to {int(places[-1])} of a request")
        self._map(slots)
        at = torch.tensor(slots.slots)[chunks], places % size
        for layer, part in zip(self._layers, self._parts, strict=True):
            if store:
                part[at] = layer[ids.to(layer.device)].to(part.device)
            else:
                layer[ids.to(layer.device)] = part[at].to(layer.device)
        self._done.append(TransferResult(job_id, True, len(ids) * self._block_bytes, time.perf_counter() - begun_s))
        return True

    def _map(self, slots: SlotSpec) -> None:
        """Per layer this rank's part of every slot, [slots, blocks of a chunk, bytes]."""
        if self._mapped_path != slots.path:
            with open(slots.path, "r+b", buffering=0) as file:
                slab = torch.frombuffer(mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size), dtype=torch.int8)
            offset = self._rank * self._blocks_per_chunk * self._block_bytes
            rows = slab.numel() // slots.stride_bytes
            for layer in self._layers:
                shape = (rows, self._blocks_per_chunk, layer.shape[1])
                self._parts.append(slab.as_strided(shape, (slots.stride_bytes, self._block_bytes, 1), offset))
                offset += layer.shape[1]
            self._mapped_path = slots.path

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Copies are whole already."""
