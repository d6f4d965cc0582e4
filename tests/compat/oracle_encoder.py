"""Let vLLM's own encoder caches, its scheduler's way of using them and its budget answer random calls.

    python tests/compat/oracle_encoder.py [SEED] > encoder.jsonl       (in an environment with vllm 0.32)
    xz -9 encoder.jsonl; mv encoder.jsonl.xz tests/data/vllm/

Each line is a JSON object. A line with `scenario` begins a new cache; the lines after it are calls with their answer
and the state left. Only what the contract allows is asked: vLLM's encoder-decoder cache gives room back as often as
it is told to, and its scheduler tells it after every step, so here it is told once per item.
`tests/unit/test_encoder.py` replays the lines.
"""

import json
import os
import random
import sys
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    compute_mm_encoder_budget,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


def random_items(rng, sizes, count, *, mismatch):
    """[identifier, offset, length, embeddings, spans or None] of one request, in order."""
    items, offset = [], rng.choice([0, 0, 3, 9])
    for _ in range(count):
        name = rng.choice(sorted(sizes))
        embeddings, gap = sizes[name], 0
        if rng.random() < mismatch:
            embeddings += 1
        spans = None
        if name.startswith("masked") and embeddings > 1:
            lead, gap, tail = rng.randrange(4), rng.randrange(1, 4), rng.randrange(3)
            cut = rng.randrange(1, embeddings)
            spans = [[lead, lead + cut], [lead + cut + gap, lead + gap + embeddings]]
            length = lead + gap + embeddings + tail
        else:
            length = embeddings
        items.append([name, offset, length, embeddings, spans])
        offset += length + rng.choice([0, 0, 1, 2, 7])
    return items


def make_request(request_id, items, tokens_total):
    features = []
    for identifier, offset, length, _, spans in items:
        mask = None
        if spans is not None:
            mask = torch.zeros(length, dtype=torch.bool)
            for start, end in spans:
                mask[start:end] = True
        place = PlaceholderRange(offset=offset, length=length, is_embed=mask)
        features.append(MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place))
    return Request(request_id, [1] * tokens_total, SamplingParams(max_tokens=8), None, mm_features=features)


class Oracle:
    """One cache of vLLM's and a scheduler that has nothing but that; prints what it is asked and what it answers."""

    def __init__(self, kind, capacity, lookahead, split):
        self.shared = kind == "shared"
        self.manager = (EncoderCacheManager if self.shared else EncoderDecoderCacheManager)(cache_size=capacity)
        self.scheduler = object.__new__(Scheduler)
        self.scheduler.is_encoder_decoder = not self.shared
        self.scheduler.scheduler_config = SimpleNamespace(disable_chunked_mm_input=not split)
        self.scheduler.encoder_cache_manager = self.manager
        self.scheduler.ec_connector = None
        self.scheduler.encoder_cache_mismatch_reqs = set()
        self.scheduler.num_prefill_lookahead = lookahead
        self.lookahead = lookahead
        self.requests = {}
        self.held_apart = {}  # encoder-decoder only: vLLM does not know which items have room
        print(json.dumps({"scenario": kind, "capacity": capacity, "lookahead": lookahead, "split": split}))

    def held(self, request_id):
        if self.shared:
            return list(self.manager.request_cached_ids.get(request_id, ()))
        return sorted(self.held_apart.get(request_id, ()))

    def say(self, op, answer=None, **fields):
        manager = self.manager
        state = {"free": manager.num_free_slots, "held": {r: self.held(r) for r in self.requests if self.held(r)}}
        if self.shared:
            state["idle"] = list(manager.freeable)
            state["reclaimable"] = manager.num_freeable_slots
            state["users"] = {name: sorted(users) for name, users in manager.cached.items()}
        print(json.dumps({"op": op, **fields, "answer": answer, **state}))

    def new(self, request_id, items, tokens_total):
        self.requests[request_id] = make_request(request_id, items, tokens_total)
        self.say("new", request=request_id, items=items)

    def lookup(self, request_id, index):
        answer = self.manager.check_and_update_cache(self.requests[request_id], index)
        self.say("lookup", answer, request=request_id, index=index)

    def make_room(self, request_id, index, compute_left, planned):
        answer = self.manager.can_allocate(self.requests[request_id], index, compute_left, planned)
        self.say("make_room", answer, request=request_id, index=index, compute_left=compute_left, planned=planned)
        return answer

    def allocate(self, request_id, index):
        self.manager.allocate(self.requests[request_id], index)
        if not self.shared:
            self.held_apart.setdefault(request_id, set()).add(index)
        self.say("allocate", request=request_id, index=index)

    def free_item(self, request_id, index):
        self.manager.free_encoder_input(self.requests[request_id], index)
        if not self.shared:
            self.held_apart[request_id].discard(index)
        self.say("free_item", request=request_id, index=index)

    def free(self, request_id):
        if self.held(request_id):
            self.manager.free(self.requests[request_id])
            self.held_apart.pop(request_id, None)
            self.say("free", request=request_id)

    def reset(self):
        self.manager.reset()
        self.held_apart.clear()
        self.say("reset")

    def take_evicted(self):
        self.say("take_evicted", list(dict.fromkeys(self.manager.get_freed_mm_hashes())))

    def plan(self, request_id, computed, new, compute_left):
        request = self.requests[request_id]
        answer = self.scheduler._try_schedule_encoder_inputs(request, computed, new, compute_left, self.lookahead)
        encode, new_tokens, left, _, repeats = answer
        refused = request_id in self.scheduler.encoder_cache_mismatch_reqs
        self.scheduler.encoder_cache_mismatch_reqs.clear()
        told = {"encode": encode, "new_tokens": new_tokens, "left": left, "repeats": repeats, "refused": refused}
        self.say("plan", told, request=request_id, computed=computed, new=new, compute_left=compute_left)
        return told

    def carry_out(self, request_id, plan):
        if plan["encode"]:
            self.scheduler._allocate_encoder_inputs(self.requests[request_id], plan["encode"], plan["repeats"])
            if not self.shared:
                self.held_apart.setdefault(request_id, set()).update(plan["encode"])
        self.say("carry_out", request=request_id, encode=plan["encode"], repeats=plan["repeats"])

    def free_passed(self, request_id, computed, unsure):
        request = self.requests[request_id]
        request.num_computed_tokens, request.num_output_placeholders = computed, unsure
        if self.held(request_id):
            self.scheduler._free_encoder_inputs(request)
            if not self.shared and computed > 0:
                self.held_apart.pop(request_id, None)
        self.say("free_passed", request=request_id, computed=computed, unsure=unsure)


def single_calls(rng, kind, capacity, steps):
    """The cache's own verbs, in any order that makes sense."""
    oracle = Oracle(kind, capacity, 0, True)
    sizes = {f"image{i}": rng.randrange(1, max(2, capacity // 2)) for i in range(14)}
    for number in range(6):
        items = random_items(rng, sizes, rng.choice([2, 5, 12, 40]), mismatch=0)
        oracle.new(f"r{number}", items, 4000)
    names = sorted(oracle.requests)
    for _ in range(steps):
        request_id, chance = rng.choice(names), rng.random()
        features = oracle.requests[request_id].mm_features
        index = rng.randrange(len(features))
        held = oracle.held(request_id)
        if chance < 0.25 and oracle.shared:
            oracle.lookup(request_id, index)
        elif chance < 0.65:
            chosen, planned = {}, 0
            for other in [index, *rng.sample(range(len(features)), rng.randrange(2))]:
                name = features[other].identifier
                kept = name in oracle.manager.cached if oracle.shared else other in held
                if kept or other in chosen.values() or (oracle.shared and name in chosen):
                    continue
                if oracle.make_room(request_id, other, rng.choice([capacity, capacity // 4]), planned):
                    chosen[name if oracle.shared else (name, other)] = other
                    planned += oracle.requests[request_id].get_num_encoder_embeds(other)
            if rng.random() < 0.9:
                for other in chosen.values():
                    oracle.allocate(request_id, other)
        elif chance < 0.85 and held:
            oracle.free_item(request_id, rng.choice(held))
        elif chance < 0.9 and held and (oracle.shared or len(held) == len(features)):
            oracle.free(request_id)
        elif chance < 0.985:
            oracle.take_evicted()
        elif chance > 0.995:
            oracle.reset()


class Serving:
    """A small scheduler around an oracle: chunked prompts, prefix hits, refused KV, preemption, ends."""

    def __init__(self, rng, kind, capacity, lookahead, split):
        self.rng, self.capacity = rng, capacity
        self.oracle = Oracle(kind, capacity, lookahead, split)
        self.sizes = {f"{'masked' if i % 3 == 0 else 'image'}{i}": rng.randrange(1, capacity // 2) for i in range(12)}
        self.computed, self.total, self.number = {}, {}, 0

    def arrive(self):
        rng, request_id = self.rng, f"r{self.number}"
        self.number += 1
        if self.oracle.shared:
            items = random_items(rng, self.sizes, rng.choice([1, 2, 3, 6, 14]), mismatch=0.02)
            self.total[request_id] = items[-1][1] + items[-1][2] + rng.randrange(12)
        else:
            names = rng.sample(sorted(self.sizes), rng.choice([1, 1, 2]))
            items = [[name, 0, self.sizes[name], self.sizes[name], None] for name in names]
            self.total[request_id] = rng.randrange(2, 12)
        hit = self.oracle.shared and rng.random() < 0.3
        self.computed[request_id] = rng.randrange(self.total[request_id]) if hit else 0
        self.oracle.new(request_id, items, self.total[request_id])

    def leave(self, request_id):
        self.oracle.free(request_id)
        del self.computed[request_id], self.total[request_id], self.oracle.requests[request_id]

    def serve(self, request_id, compute_left):
        """One request in one step: what the step may compute after it, and whether it was scheduled."""
        rng, computed = self.rng, self.computed[request_id]
        new = min(self.total[request_id] - computed, rng.choice([1, 4, 16, 48]))
        plan = self.oracle.plan(request_id, computed, new, compute_left)
        if plan["refused"]:
            self.leave(request_id)
        elif plan["new_tokens"] == 0:
            return compute_left, False
        elif rng.random() < 0.08:
            self.oracle.free(request_id)  # no KV blocks
        else:
            self.oracle.carry_out(request_id, plan)
            self.computed[request_id] += plan["new_tokens"]
            return plan["left"], True
        return compute_left, False

    def step(self):
        rng, compute_left, scheduled = self.rng, self.rng.choice([self.capacity, self.capacity // 2]), []
        while len(self.computed) < 4:
            self.arrive()
        for request_id in list(self.computed):
            compute_left, went = self.serve(request_id, compute_left)
            if went:
                scheduled.append(request_id)
        if scheduled and rng.random() < 0.06:
            victim = scheduled.pop(rng.randrange(len(scheduled)))
            self.oracle.free(victim)
            self.computed[victim] = 0
        self.oracle.take_evicted()
        for request_id in scheduled:
            self.oracle.free_passed(request_id, self.computed[request_id], rng.choice([0, 0, 1]))
            if self.computed[request_id] >= self.total[request_id]:
                self.leave(request_id)
        if rng.random() < 0.01:
            self.oracle.reset()
        if rng.random() < 0.05:
            self.leave(rng.choice(sorted(self.computed) or self.arrive() or sorted(self.computed)))


def budgets(rng, count):
    """Limits and what becomes of them."""
    for _ in range(count):
        sizes = {name: rng.choice([0, 1, 7, 64, 576, 4096]) for name in rng.sample(["image", "video", "audio"], 2)}
        sizes = dict(list(sizes.items())[: rng.choice([0, 1, 2, 2, 2])])
        counts = {name: rng.choice([0, 1, 3, 999]) for name in sizes}
        limits = {
            "encode_embeddings_max": rng.choice([1, 512, 8192]),
            "cache_embeddings_max": rng.choice([1, 512, 8192]),
            "step_tokens_max": rng.choice([16, 512, 8192]),
            "prompt_tokens_max": rng.choice([32, 2048, 131072]),
            "requests_max": rng.choice([1, 8, 256]),
            "split_items": rng.random() < 0.7,
            "chunked_prefill": rng.random() < 0.7,
        }
        modalities = {name: [sizes[name], counts[name]] for name in sizes}
        print(
            json.dumps({"scenario": "budget", "modalities": modalities, "limits": limits, **budget(modalities, limits)})
        )


def budget(modalities, limits):
    config = SimpleNamespace(
        max_num_encoder_input_tokens=limits["encode_embeddings_max"],
        encoder_cache_size=limits["cache_embeddings_max"],
        max_num_batched_tokens=limits["step_tokens_max"],
        disable_chunked_mm_input=not limits["split_items"],
        enable_chunked_prefill=limits["chunked_prefill"],
    )
    sizes = {name: size for name, (size, _) in modalities.items()}
    try:
        compute, cache = compute_mm_encoder_budget(config, sizes)
    except ValueError:
        return {"refused": True}
    whole = object.__new__(MultiModalBudget)
    whole.scheduler_config, whole.max_model_len = config, limits["prompt_tokens_max"]
    whole.max_num_reqs = limits["requests_max"]
    whole.mm_limits = {name: count for name, (_, count) in modalities.items()}
    whole.encoder_compute_budget, whole.encoder_cache_size = compute, cache
    items = {name: whole._get_max_items(name, sizes[name]) for name, (_, count) in modalities.items() if count > 0}
    return {"refused": False, "compute": compute, "cache": cache, "items": items}


def main(seed):
    rng = random.Random(seed)
    for kind in ("shared", "encoder_decoder"):
        for capacity in (8, 40, 200):
            single_calls(rng, kind, capacity, 300)
    for lookahead, split, capacity in [(0, True, 24), (0, True, 60), (0, False, 40), (2, True, 40), (3, False, 60)]:
        serving = Serving(rng, "shared", capacity, lookahead, split)
        for _ in range(80):
            serving.step()
    for lookahead, capacity in [(0, 30), (1, 60)]:
        serving = Serving(rng, "encoder_decoder", capacity, lookahead, True)
        for _ in range(60):
            serving.step()
    budgets(rng, 120)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
