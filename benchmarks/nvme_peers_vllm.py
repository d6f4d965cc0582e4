"""vLLM's filesystem tier, as its scheduler would drive it: one job per batch, submitted and waited for.

Needs vLLM 0.32. Blocks become files, written and read with O_DIRECT; nothing is synced, verified or ever evicted.
Units: slots of the tier's memory, bytes.
"""

import mmap
import os
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvtier.cli.bench.nvme.plan import Shape

MEMORY_BATCHES = 4
KEPT_BATCHES = 8  # get reads one of so many
TOKENS = 16

Move = Callable[[], object]


class VllmRing:
    """Batches of one shape as files; nothing ever leaves, for the tier has no cap."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self._blocks = shape.blocks
        self._random = random.Random(0)
        self._slots = MEMORY_BATCHES * shape.blocks
        self._bytes = np.frombuffer(mmap.mmap(-1, self._slots * shape.block_bytes), np.uint8)
        self._bytes = self._bytes.reshape(self._slots, shape.block_bytes)
        self._bytes[:] = np.random.default_rng(0).integers(0, 256, self._bytes.shape, np.uint8)
        spec = SimpleNamespace(
            config=_config(shape.block_bytes),
            blocks_per_chunk=1,
            kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
        )
        self._tier = FileSystemTierManager(spec, memoryview(self._bytes), "fs", root_dir=str(folder))
        self._jobs = count(1)
        self._kept: list[tuple[list[OffloadKey], np.ndarray]] = []

    def put(self) -> Move:
        """One batch with keys of its own."""
        keys = [make_offload_key(os.urandom(32), 0) for _ in range(self._blocks)]
        job = self._job(keys, self._pick(), is_promotion=False)

        def move() -> None:
            self._tier.submit_store(job)
            self._finish(job)
            self._kept.append((keys, self._bytes[job.chunk_ids, 0].copy()))

        return move

    def get(self) -> Move:
        """A batch that was put lately, cold: O_DIRECT leaves nothing in the page cache."""
        keys, firsts = self._random.choice(self._kept[-KEPT_BATCHES:])
        job = self._job(keys, self._pick(), is_promotion=True)

        def move() -> None:
            self._tier.submit_load(job)
            self._finish(job)
            assert (self._bytes[job.chunk_ids, 0] == firsts).all(), "other bytes came back"

        return move

    def close(self) -> None:
        self._tier.shutdown()

    def _job(self, keys: list[OffloadKey], slots: np.ndarray, *, is_promotion: bool) -> TransferJob:
        return TransferJob(next(self._jobs), keys, slots, is_promotion, ReqContext(req_id="bench"))

    def _finish(self, job: TransferJob) -> None:
        self._tier.drain_jobs()
        (result,) = self._tier.get_finished_jobs()
        if not result.success or result.job_id != job.job_id:
            raise OSError(f"vLLM's tier did not move a batch: {result}")

    def _pick(self) -> np.ndarray:
        return np.array(self._random.sample(range(self._slots), self._blocks))


def _config(block_bytes: int) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig("bench", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=parallel,
    )
