"""Runs a real vLLM on the CPU over kvtier: `python -m tests.compat.offload_engine SCENARIO FOLDER`.

The model is a random Llama of four layers, its weights so wide that other KV gives other tokens. What came of it is one
JSON object on the last line.
"""

import json
import os
import random
import sys
from pathlib import Path

from kvtier import hash_blocks
from kvtier.tiers.lmdb.layout import SLAB_NAME
from kvtier.types import PAGE_BYTES, store_key

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

PROMPT_TOKENS = 500
BLOCK_TOKENS = 32
HOST = {"type": "host", "capacity": "32MiB", "hugepages": "off"}


def model_folder(folder):
    """The model, written once."""
    path = folder / "model"
    if not path.exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            initializer_range=0.3,
        )
        config.architectures = ["LlamaForCausalLM"]
        LlamaForCausalLM(config).float().save_pretrained(path)
    return str(path)


def store(folder, **changes):
    """A disk below the host tier, to which all is copied as soon as it comes."""
    host = HOST | {"low_watermark": 0.95, "high_watermark": 0.98} | changes
    return [host, {"type": "lmdb", "path": str(folder / "store"), "capacity": "64MiB", "durability": "none"}]


def engine(folder, tiers, *, blocks_per_chunk=1, prompt_only=True, **options):
    """A vLLM over kvtier with these tiers; without any, vLLM alone."""
    from vllm import LLM

    kvtier = {"tiers": tiers, "model": {"weights_epoch": "1"}}
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KvtierOffloadingSpec",
            "spec_module_path": "kvtier.integrations.vllm",
            "blocks_per_chunk": blocks_per_chunk,
            "offload_prompt_only": prompt_only,
            "kvtier": kvtier,
        },
    }
    settings = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 1024,
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_cache_memory_bytes": 16 << 20,
        "disable_log_stats": False,
        "kv_transfer_config": transfer if tiers else None,
    }
    return LLM(model=model_folder(folder), **settings | options)


def prompt(seed, tokens=PROMPT_TOKENS):
    draw = random.Random(seed)
    return [draw.randrange(3, 1000) for _ in range(tokens)]


def generate(llm, prompts, tokens=10):
    """Per prompt the greedy tokens and how many of its own came from a cache."""
    from vllm import SamplingParams, TokensPrompt

    greedy = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], greedy, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs]


def settle(llm):
    """Some steps more, in which what was put off is done."""
    generate(llm, [[5, 6, 7]], tokens=4)


def manager_of(llm):
    """The manager of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager


def held(llm):
    """What is still held when all requests are gone, and what kvtier's own recount finds."""
    settle(llm)
    while llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
        llm.llm_engine.step()
    manager = manager_of(llm)
    stats = manager.cache.stats()
    return {
        "leases": stats["leases"],
        "matches": stats["matches"],
        **manager.requests.held(),
        "findings": manager.cache.check(),
        "errors": manager.requests.errors,
    }


def page_of(llm, block):
    """Where a block of the first prompt lies on disk. kvtier gives it the same name as vLLM does."""
    cache = manager_of(llm).cache
    key = hash_blocks(prompt(1), cache.config.model).groups[0][block]
    directory = cache._engine._core.residency.directory
    return directory.place(directory.find(store_key(0, key)), 1)


def damage(folder, page):
    """Change one bit."""
    with open(folder / "store" / SLAB_NAME, "r+b") as slab:
        slab.seek(page * PAGE_BYTES + 1000)
        (byte,) = slab.read(1)
        slab.seek(-1, os.SEEK_CUR)
        slab.write(bytes([byte ^ 1]))


def close(llm):
    llm.llm_engine.engine_core.shutdown()


def again(llm):
    """Cold, from the tiers, and after the tiers were reset as well."""
    told = {"cold": generate(llm, [prompt(1)])[0]}
    settle(llm)
    llm.reset_prefix_cache()
    told["warm"] = generate(llm, [prompt(1)])[0]
    settle(llm)
    llm.reset_prefix_cache(reset_connector=True)
    told["reset"] = generate(llm, [prompt(1)])[0]
    settle(llm)
    return told


# ---------------------------------------------------------------- scenarios


def scenario_again(folder):
    return again(engine(folder, [HOST]))


def scenario_ranks(folder):
    return again(engine(folder, [HOST], tensor_parallel_size=2, blocks_per_chunk=2))


def scenario_pressure(folder):
    draw = random.Random(1)
    shared = [prompt(seed, 160) for seed in range(4)]
    prompts = [draw.choice(shared) + prompt(100 + n, draw.randrange(20, 120)) for n in range(24)]
    small = {"num_gpu_blocks_override": 28, "max_model_len": 512 + BLOCK_TOKENS}
    alone = engine(folder, None, **small)
    told = {"alone": [tokens for tokens, _ in generate(alone, prompts, tokens=24)]}
    close(alone)
    pressed = engine(folder, [HOST | {"capacity": "2MiB"}], prompt_only=False, **small)
    told["again"] = again(pressed)
    told["pressed"] = [tokens for tokens, _ in generate(pressed, prompts, tokens=24)]
    values = {metric.name: getattr(metric, "value", None) for metric in pressed.get_metrics()}
    told |= {"loaded_bytes": values["vllm:kv_offload_load_bytes"], "preemptions": values["vllm:num_preemptions"]}
    told["held"] = held(pressed)
    close(pressed)
    return told


def scenario_first(folder):
    llm = engine(folder, store(folder))
    told = {"cold": generate(llm, [prompt(1)])[0]}
    settle(llm)
    close(llm)
    return told


def scenario_second(folder):
    llm = engine(folder, store(folder))
    told = {"warm": generate(llm, [prompt(1)])[0], "sound_blocks": 4}
    place = page_of(llm, block=4)
    close(llm)
    damage(folder, place)
    llm = engine(folder, store(folder))
    told["damaged"] = generate(llm, [prompt(1)])[0]
    settle(llm)
    llm.reset_prefix_cache()
    told["again"] = generate(llm, [prompt(1)])[0]
    told["held"] = held(llm)
    told["corrupt"] = manager_of(llm).cache.stats()["tiers"]["lmdb"]["corrupt"]
    close(llm)
    return told


if __name__ == "__main__":
    print(json.dumps(globals()[f"scenario_{sys.argv[1]}"](Path(sys.argv[2]))))
