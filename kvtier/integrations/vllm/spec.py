"""What vLLM loads: its settings as a kvtier configuration, and a maker for each role. Only the scheduler's opens tiers.

Always: blocks that are not understood byte for byte are refused at the start. A slot holds the parts of all ranks; the
store describes it as one head per rank, as wide as the rank's K of a token.
"""

from dataclasses import replace

import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.blocks.spec import DTYPES
from kvtier.config import Config, load_config
from kvtier.errors import ConfigError
from kvtier.integrations.vllm.manager import KvtierManager
from kvtier.integrations.vllm.worker import KvtierWorker
from kvtier.types import page_aligned

LAYOUT = "LBHNC"  # layer by layer, in each a block's heads, tokens, K and V


def configuration(config: OffloadingConfig) -> Config:
    """The tiers under vLLM's GPU. Raises ConfigError for what cannot work, or is not known."""
    group, ranks, row, dtype = config.groups[0], config.parallel, config.worker_kv_bytes_per_block, config.model.dtype
    values = len(group.layer_names) * 2 * group.tokens_per_block * DTYPES.get(dtype, (1, ""))[0]
    by_tensors = ranks.world_size == ranks.tp_size and ranks.pcp_size == ranks.dcp_size == 1
    expect(
        (len(config.groups) == 1 and group.group_id == 0, "several groups"),
        (config.kv_cache_layout == LAYOUT, f"layout {config.kv_cache_layout}"),
        (dtype in DTYPES, f"dtype {dtype}"),
        (by_tensors and not config.canonical_layout and not config.replicated_layout, "ranks that share blocks"),
        (row > 0 and row % values == 0, f"{row} bytes for {len(group.layer_names)} layers"),
    )
    wanted = config.extra_config.get("kvtier")
    wanted = wanted if isinstance(wanted, dict) else {}
    version = ".".join(vllm.__version__.split(".")[:2])
    name = f"{config.model.name} (vLLM {version}, {current_platform.device_type}, {LAYOUT})"
    shape = {"layers": len(group.layer_names), "kv_heads": ranks.world_size, "head_dim": row // values, "dtype": dtype}
    shape["block_tokens"] = group.tokens_per_block * config.cache.blocks_per_chunk
    shape |= {"name": name, "layout": "layer_head_major", "tensor_parallel": ranks.tp_size}
    tiers = given if isinstance(given := wanted.get("tiers"), list) else []
    epoch = {} if len(tiers) > 1 else {"weights_epoch": "v1"}  # memory ends with the process, as the weights do
    slot_bytes = page_aligned(row * ranks.world_size * config.cache.blocks_per_chunk)
    gpu = {"type": "gpu", "capacity": 2 * slot_bytes}  # stands for vLLM's; nobody opens it
    loaded = load_config({**wanted, "model": epoch | wanted.get("model", {}) | shape, "tiers": [gpu, *tiers]})
    if len(loaded.tiers) < 2 or loaded.tiers[1].type != "host":
        raise ConfigError("kvtier.tiers", f"{tiers} do not begin with host", "Add {'type': 'host', 'capacity': '4GiB'}")
    return replace(loaded, tiers=loaded.tiers[1:], notes=())


def expect(*facts: tuple[bool, str]) -> None:
    for known, what in facts:
        if not known:
            raise ConfigError("kvtier", f"it is not known how vLLM's blocks lie in memory: {what}", "Leave kvtier out")


class KvtierOffloadingSpec(OffloadingSpec):
    """Made once for the scheduler and once for each worker."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._configuration = configuration(config)
        self._manager: KvtierManager | None = None
        engine, model = get_current_vllm_config_or_none(), self._configuration.model
        if engine is not None:  # in the workers, which are as good as the scheduler for refusing to start
            algorithm = engine.cache_config.prefix_caching_hash_algo
            expect((not engine.model_config.use_mla, "a latent in place of K and V"))
            if len(self._configuration.tiers) > 1 and algorithm != model.hash:
                raise ConfigError("model.hash", f"{model.hash}, and vLLM has {algorithm}", "Set both alike")

    def get_manager(self) -> KvtierManager:
        self._manager = self._manager or KvtierManager(self._configuration)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KvtierWorker:
        block_bytes = self.config.worker_kv_bytes_per_block
        return KvtierWorker(kv_caches, self.config.parallel.rank, block_bytes, self.blocks_per_chunk)
