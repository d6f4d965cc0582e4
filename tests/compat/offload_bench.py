"""kvtier's manager and workers as vLLM drives them, without an engine: a scheduler's calls, one by one.

Its GPU is int8 memory, filled with what a key's blocks hold on each rank.
"""

import hashlib
import time

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier.integrations.vllm import KvtierOffloadingSpec
from kvtier.types import page_aligned

LAYERS = 3
PAGE_BYTES = 2048  # of a layer: K and V of 4 tokens, 4 heads of 16 in float32
GPU_BLOCKS = 64
STEPS_MAX = 20_000  # of a scheduler that waits for a disk; 1 ms each


def offloading_config(tiers, *, ranks=1, chunk=1, rank=0, kvtier=None, **changes):
    parallel = {
        "rank": rank,
        "world_size": ranks,
        "tp_size": ranks,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    } | changes.pop("parallel", {})
    settings = {
        "groups": (OffloadingGroupConfig(4, tuple(f"layer.{i}" for i in range(LAYERS)), 0),),
        "worker_kv_bytes_per_block": LAYERS * PAGE_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {"kvtier": {"model": {"weights_epoch": "1"}} | (kvtier or {}) | {"tiers": tiers}},
        "engine_id": "bench",
        "model": OffloadingModelConfig("tiny", "float32"),
        "cache": OffloadingCacheConfig(4, chunk),
        "parallel": OffloadingParallelConfig(**parallel),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**settings | changes)


def caches(page_bytes=PAGE_BYTES, padded_bytes=PAGE_BYTES):
    tensors = [torch.zeros(GPU_BLOCKS, padded_bytes, dtype=torch.int8) for _ in range(LAYERS)]
    refs = [CanonicalKVCacheRef(index, page_bytes) for index in range(LAYERS)]
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, padded_bytes) for tensor in tensors], [refs])


def host(slots, chunk=1, ranks=1):
    return {"type": "host", "capacity": slots * page_aligned(LAYERS * PAGE_BYTES * chunk * ranks), "hugepages": "off"}


def keys_of(seed, count):
    return [make_offload_key(hashlib.sha256(f"{seed}/{i}".encode()).digest(), 0) for i in range(count)]


class Bench:
    """A manager, a worker per rank, and what vLLM's scheduler would ask of them."""

    def __init__(self, tiers, *, ranks=1, chunk=1, kvtier=None):
        self._configs = [
            offloading_config(tiers, ranks=ranks, chunk=chunk, rank=rank, kvtier=kvtier) for rank in range(ranks)
        ]
        self.chunk = chunk
        self.caches = [caches() for _ in self._configs]
        self.workers = self.new_workers()
        self.manager = KvtierOffloadingSpec(self._configs[0]).get_manager()
        self.jobs = 0

    def new_workers(self):
        return [
            KvtierOffloadingSpec(config).get_worker(memory)
            for config, memory in zip(self._configs, self.caches, strict=True)
        ]

    def page(self, key, part, rank, layer):
        """What a block of a key's chunk holds."""
        digest = hashlib.sha256(key + bytes([part, rank, layer])).digest()
        return torch.frombuffer(bytearray(digest * (PAGE_BYTES // 32)), dtype=torch.int8)

    def fill(self, keys, first=0):
        """The blocks of these keys in the GPU, from block `first` on; returns their ids."""
        ids = list(range(first, first + len(keys) * self.chunk))
        for rank, memory in enumerate(self.caches):
            for layer, tensor in enumerate(memory.tensors):
                for at, block in enumerate(ids):
                    tensor.tensor[block] = self.page(keys[at // self.chunk], at % self.chunk, rank, layer)
        return ids

    def wipe(self):
        for memory in self.caches:
            for tensor in memory.tensors:
                tensor.tensor.zero_()

    def wrong(self, keys, ids, skip=0):
        """Blocks that do not hold what the keys' chunks hold, without the first `skip` blocks."""
        return [
            block
            for at, block in enumerate(ids, start=skip)
            for rank, memory in enumerate(self.caches)
            for layer, tensor in enumerate(memory.tensors)
            if not torch.equal(tensor.tensor[block], self.page(keys[at // self.chunk], at % self.chunk, rank, layer))
        ]

    # ------------------------------------------------------------ the scheduler's side

    def begin_store(self, request, keys):
        """Returns the job's end: a function of whether it went well. None if there is nothing to do."""
        self.fill(keys)
        output = self.manager.prepare_store(keys, request)
        if output is None or not output.keys_to_store:
            return None
        ids = [
            block
            for key in output.keys_to_store
            for block in range(keys.index(key) * self.chunk, (keys.index(key) + 1) * self.chunk)
        ]
        source = GPULoadStoreSpec(ids, [len(ids)], [ids[0]])

        def end(success=True):
            if success:
                self.run("submit_store", source, output.store_spec)
            self.manager.complete_store(set(output.keys_to_store), request, success)

        def late():
            self.run("submit_store", source, output.store_spec)

        end.late = late
        return end

    def store(self, keys, name="store"):
        request = ReqContext(name)
        if end := self.begin_store(request, keys):
            end()
        self.manager.on_request_finished(request)

    def run(self, verb, source, target):
        self.jobs += 1
        for worker in self.workers:
            assert getattr(worker, verb)(self.jobs, source, target)
            (done,) = worker.get_finished()
            assert (done.job_id, done.success) == (self.jobs, True)

    def look(self, request, keys):
        """One scan of vLLM's: how many chunks, or None if it is to ask again."""
        hits, deferred = 0, False
        for key in keys:
            result = self.manager.lookup(key, request)
            if result is LookupResult.MISS:
                break
            deferred |= result is not LookupResult.HIT
            hits += 1
        return None if deferred else hits

    def step(self, new=(), preempted=()):
        self.manager.on_schedule_end(ScheduleEndContext(new, preempted))

    def settle(self):
        """Step until the manager has nothing more to wait for."""
        for _ in range(STEPS_MAX):
            if not self.manager.has_pending_work():
                return
            self.step()
            time.sleep(0.001)
        raise AssertionError("work without end")

    def found(self, request, keys, *, steps=True):
        """Ask until there is an answer, once in each step."""
        for _ in range(STEPS_MAX):
            hits = self.look(request, keys)
            if hits is not None:
                return hits
            if steps:
                self.step()
            time.sleep(0.001)  # as vLLM's idle loop does; nothing depends on how long
        raise AssertionError("asked again for ever")

    def load(self, request, keys, skip=0):
        """Load these chunks without the first `skip` blocks, whole, to blocks that were empty; returns their ids."""
        self.wipe()
        ids = list(range(7, 7 + len(keys) * self.chunk - skip))
        spec = self.manager.prepare_load(keys, request)
        self.run("submit_load", spec, GPULoadStoreSpec(ids, [len(ids)], [skip]))
        self.manager.complete_load(set(keys), request)
        return ids

    def held(self):
        """What is still held, or found wrong: empty in the end."""
        manager, stats = self.manager, self.manager.cache.stats()
        kept = {
            "leases": stats["leases"],
            "matches": stats["matches"],
            **manager.requests.held(),
            "findings": manager.cache.check(),
        }
        return {name: value for name, value in kept.items() if value}

    def close(self):
        self.manager.shutdown()
