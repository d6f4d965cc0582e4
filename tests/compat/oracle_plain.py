"""The two kinds of log that came first: whole prompts, one token a decode, no preemption."""

import json
import random

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from tests.compat.oracle_pool import cached, ids, request_of, snapshot

KINDS = {"full": "full", "fullswa": "full+swa"}
BASE_TOKENS = 64
VOCABULARY = 1000


def run(kind, seed, steps, blocks, block_tokens):
    """The lines of the log. The order of the draws is part of the format: it decides what the log says."""
    draw = random.Random(seed)
    manager = _manager(kind, blocks, block_tokens)
    plain = _Plain(draw, manager, block_tokens, loads=kind == "full")
    first = {"init": KINDS[kind], "null_block": manager.block_pool.null_block.block_id}
    yield json.dumps(first | snapshot(manager, plain.running, _event_text))
    for _ in range(steps):
        manager.new_step_starts()
        row = plain.step()
        yield json.dumps(row | snapshot(manager, plain.running, _event_text))
    stats = manager.make_prefix_cache_stats()
    yield json.dumps({"stats": {"requests": stats.requests, "queries": stats.queries, "hits": stats.hits}})


def _manager(kind, blocks, block_tokens):
    shape = {"block_size": block_tokens, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["l0"], FullAttentionSpec(**shape))]
    if kind == "fullswa":
        groups.append(KVCacheGroupSpec(["l1"], SlidingWindowSpec(**shape, sliding_window=2 * block_tokens)))
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config,
        max_model_len=1024,
        scheduler_block_size=block_tokens,
        hash_block_size=block_tokens,
        log_stats=True,
        enable_kv_cache_events=True,
    )


def _event_text(event):
    return type(event).__name__ + ":" + ",".join(map(str, getattr(event, "block_hashes", None) or []))


class _Plain:
    """One random operation after the other."""

    def __init__(self, draw, manager, block_tokens, loads):
        self.draw, self.manager, self.block_tokens, self.loads = draw, manager, block_tokens, loads
        self.running = {}
        self.base = [draw.randrange(VOCABULARY) for _ in range(BASE_TOKENS)]
        self.requests_total = 0

    def step(self):
        chance = self.draw.random()
        if chance < 0.45 or not self.running:
            return self.new()
        if chance < 0.75:
            return self.decode()
        if chance < 0.97:
            id = self.draw.choice(sorted(self.running))
            self.manager.free(self.running.pop(id))
            return {"op": "free", "id": id}
        return {"op": "reset", "ok": self.manager.reset_prefix_cache()}

    def new(self):
        tokens, salt = self._prompt()
        id = f"r{self.requests_total}"
        self.requests_total += 1
        request = request_of(id, tokens, self.block_tokens, cache_salt=salt)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        self.manager.record_prefix_cache_stats(request, hit)
        ext = self._loaded_tokens(request.num_tokens - 1 - hit)
        row = {"op": "new", "id": id, "tokens": tokens, "salt": salt, "ext": ext, "hit": hit, "hit_blocks": ids(blocks)}
        if ext:
            got = self._load(row, request, blocks, hit, ext)
        else:
            got = self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
        if got is not None:
            request.num_computed_tokens = request.num_tokens
            self.running[id] = request
        return row | {"new": ids(got)}

    def _prompt(self):
        length = self.draw.randrange(1, 40)
        common = self.draw.randrange(0, length + 1)
        tokens = self.base[:common] + [self.draw.randrange(VOCABULARY) for _ in range(length - common)]
        return tokens, self.draw.choice([None, None, None, "s"])

    def _loaded_tokens(self, room):
        if self.draw.random() < 0.3 and self.loads:
            return self.draw.randrange(0, room // self.block_tokens + 1) * self.block_tokens
        return 0

    def _load(self, row, request, blocks, hit, ext):
        """As for an asynchronous connector: blocks now, hashes when the load is done. The events so far are lost."""
        loaded = self.manager.allocate_slots(
            request, 0, hit, blocks, num_external_computed_tokens=ext, delay_cache_blocks=True
        )
        row |= {"load_blocks": ids(loaded), "after_load_alloc": cached(self.manager)}
        self.manager.take_events()
        if loaded is None:
            return None
        self.manager.cache_blocks(request, hit + ext)
        request.num_computed_tokens = hit + ext
        got = self.manager.allocate_slots(request, request.num_tokens - hit - ext)
        if got is None:
            self.manager.free(request)
            row["freed"] = True
        return got

    def decode(self):
        id = self.draw.choice(sorted(self.running))
        request, token = self.running[id], self.draw.randrange(VOCABULARY)
        request.append_output_token_ids(token)
        got = self.manager.allocate_slots(request, 1)
        row = {"op": "decode", "id": id, "token": token, "new": ids(got)}
        if got is None:
            self.manager.free(self.running.pop(id))
            return row | {"freed": True}
        request.num_computed_tokens = request.num_tokens
        return row
