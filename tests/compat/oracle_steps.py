"""The logs of all kinds but the plain ones: chunked prefill, drafts, preemption, loads, everything the kind allows.

Owns the requests that run or wait; the manager owns the blocks. Always: a request that waits holds none.
"""

import json
import random

from vllm.v1.request import RequestStatus

from tests.compat.oracle_chunks import Chunking
from tests.compat.oracle_kinds import config_of, kinds, manager_of, scheduler_tokens
from tests.compat.oracle_pool import cached, event_text, ids, snapshot
from tests.compat.oracle_requests import VOCABULARY, Prompts, request_from

UNFINISHED_MAX = 9
STATS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")


def run(name, seed, steps, blocks, block_tokens):
    """The lines of the log."""
    kind = kinds(block_tokens)[name]
    config = config_of(kind, blocks, block_tokens)
    world = World(random.Random(seed), kind, config, block_tokens)
    manager = world.manager
    first = {"init": name, "config": config, "null_block": manager.block_pool.null_block.block_id}
    yield json.dumps(first | snapshot(manager, world.running, event_text))
    for _ in range(steps):
        row = world.step()
        copies, held = manager.take_kv_cache_block_copies()
        if copies:
            row["copies"] = [[copy.src_block_id, copy.dst_block_id] for copy in copies]
            manager.block_pool.free_blocks(held)
        yield json.dumps(row | snapshot(manager, world.running, event_text))
    stats = manager.make_prefix_cache_stats()
    yield json.dumps({"stats": {name: getattr(stats, name) for name in STATS}})


class World:
    """Requests at their different stages, and one random operation after the other."""

    def __init__(self, draw, kind, config, block_tokens):
        self.draw, self.kind, self.config = draw, kind, config
        self.manager = manager_of(config)
        self.prompts = Prompts(draw, block_tokens, config["tokens_max"], kind.identities)
        self.chunking = self._chunking()
        self.encoder_max = max(group.get("encoder_tokens_max", 0) for group in config["groups"])
        self.encoder_tokens = {}
        self.running, self.waiting = {}, {}
        self.requests_total = 0
        self.emptying = False

    def _chunking(self):
        aligned = [group["block_tokens"] for group in self.config["groups"] if group.get("mode") == "align"]
        return Chunking(
            max(aligned, default=None),
            self.config["hash_tokens"],
            scheduler_tokens(self.config),
            self.manager.coordinator.enable_partial_hash_hits,
            self.config["eagle"],
        )

    def step(self):
        """One operation with its results."""
        operation = self._operation()
        admits = operation in (self.new, self.resume)
        same_step = self.kind.crowded and admits and self.draw.random() < 0.5
        if same_step:
            return operation() | {"same_step": True}
        self.manager.new_step_starts()
        return operation()

    def _operation(self):
        prefilling, decoding = self._prefilling(), self._decoding()
        if self.emptying:
            return self.free if self.running else self.reset
        weights = {
            self.new: 30 * (len(self.running) + len(self.waiting) < UNFINISHED_MAX),
            self.resume: 14 * bool(self.waiting),
            self.chunk: 25 * bool(prefilling),
            self.decode: 30 * bool(decoding),
            self.preempt: 4 * bool(self.running),
            self.free: 12 * bool(self.running or self.waiting),
            self.evict: 2 * bool(cached(self.manager)),
            self.reset: 1,
            self.empty: 1 * bool(self.running),
        }
        return self.draw.choices(list(weights), list(weights.values()))[0]

    def _prefilling(self):
        return [id for id, request in self.running.items() if request.num_computed_tokens < request.num_tokens]

    def _decoding(self):
        """Requests that have computed all they have, and may grow."""
        limit = self.config["tokens_max"]
        return [id for id, r in self.running.items() if r.num_computed_tokens == r.num_tokens < limit]

    # ---------------------------------------------------------------- admissions

    def new(self):
        id = f"r{self.requests_total}"
        self.requests_total += 1
        prompt = self.prompts.next()
        self.encoder_tokens[id] = self.draw.randrange(1, self.encoder_max + 1) if self.encoder_max else 0
        request = request_from(id, prompt, self.config["hash_tokens"])
        self.waiting[id] = request
        return {"op": "new", "id": id} | prompt | self._admit(request)

    def resume(self):
        id = self.draw.choice(list(self.waiting))
        return {"op": "resume", "id": id} | self._admit(self.waiting[id])

    def _admit(self, request):
        """What the scheduler does for a waiting request. The amounts are drawn once the hit is known."""
        manager = self.manager
        blocks, hit, boundary = manager.get_computed_blocks(request)
        manager.record_prefix_cache_stats(request, hit)
        request.shared_prefix_boundary = boundary
        ext = self._loaded_tokens(request.num_tokens - 1 - hit)
        asked = {
            "ext": ext,
            "drafts": self._drafts(),
            "compute": self._compute(request, hit + ext),
            "encoder_tokens": self.encoder_tokens[request.request_id],
            "must_fit": self.draw.random() < 0.3,
            "reserved": self.draw.choice([0, 0, 0, 2, 5]),
        }
        row = asked | {"hit": hit, "hit_blocks": ids(blocks), "boundary": boundary}
        if ext:
            return row | self._load(request, blocks, hit, asked)
        got = manager.allocate_slots(
            request,
            asked["compute"],
            hit,
            blocks,
            num_lookahead_tokens=asked["drafts"],
            num_encoder_tokens=asked["encoder_tokens"],
            full_sequence_must_fit=asked["must_fit"],
            reserved_blocks=asked["reserved"],
        )
        if got is not None:
            self._run(request, hit + asked["compute"])
        return row | {"new": ids(got)}

    def _load(self, request, blocks, hit, asked):
        """As for an asynchronous connector: blocks now, hashes when the load is done, then the first tokens."""
        manager, ext = self.manager, asked["ext"]
        loaded = manager.allocate_slots(
            request,
            0,
            hit,
            blocks,
            num_external_computed_tokens=ext,
            delay_cache_blocks=True,
            full_sequence_must_fit=asked["must_fit"],
            reserved_blocks=asked["reserved"],
        )
        row = {"load_blocks": ids(loaded), "after_load_alloc": cached(manager), "new": None}
        if loaded is None:
            return row
        manager.cache_blocks(request, hit + ext)
        request.num_computed_tokens = hit + ext
        got = manager.allocate_slots(request, asked["compute"], num_lookahead_tokens=asked["drafts"])
        if got is None:
            manager.free(self.waiting.pop(request.request_id))
            return row | {"freed": True}
        self._run(request, hit + ext + asked["compute"])
        return row | {"new": ids(got)}

    def _run(self, request, computed_tokens):
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = computed_tokens
        self.running[request.request_id] = self.waiting.pop(request.request_id)

    def _loaded_tokens(self, room):
        if not self.kind.loads or self.draw.random() >= 0.2:
            return 0
        size = self.chunking.scheduler_tokens
        return self.draw.randrange(room // size + 1) * size

    def _drafts(self):
        return self.draw.choice([0, 0, self.kind.drafts_max, self.draw.randrange(self.kind.drafts_max + 1)])

    def _compute(self, request, start):
        """How many tokens from `start` on this step computes: the budget's, or fewer if others used it up."""
        budget = min(request.num_tokens - start, self.config["tokens_in_flight"])
        tokens = budget if self.draw.random() < 0.6 else self.draw.randrange(1, budget + 1)
        return self.chunking.cut(request, start, tokens) or self.chunking.cut(request, start, budget)

    # ---------------------------------------------------------------- running requests

    def chunk(self):
        request = self.running[self.draw.choice(self._prefilling())]
        compute = self._compute(request, request.num_computed_tokens)
        got = self.manager.allocate_slots(request, compute)
        row = {"op": "chunk", "id": request.request_id, "compute": compute, "new": ids(got)}
        if got is None:
            self._preempt(request)
            return row | {"freed": True}
        request.num_computed_tokens += compute
        return row

    def decode(self):
        id = self.draw.choice(self._decoding())
        request, drafts = self.running[id], self._drafts()
        tokens = [self.draw.randrange(VOCABULARY) for _ in range(self._accepted(request))]
        request.append_output_token_ids(tokens)
        got = self.manager.allocate_slots(request, len(tokens), num_lookahead_tokens=drafts)
        row = {"op": "decode", "id": id, "tokens": tokens, "drafts": drafts, "new": ids(got)}
        if got is None:
            self.manager.free(self.running.pop(id))
            return row | {"freed": True}
        request.num_computed_tokens = request.num_tokens
        return row

    def _accepted(self, request):
        """Tokens that a step appends: the sampled one and accepted drafts. Aligned states grow one by one."""
        most = 1 if self.chunking.block_tokens else 1 + self.kind.drafts_max
        return min(self.draw.randrange(1, most + 1), self.config["tokens_max"] - request.num_tokens)

    def preempt(self):
        id = self.draw.choice(list(self.running))
        self._preempt(self.running[id])
        return {"op": "preempt", "id": id}

    def _preempt(self, request):
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting[request.request_id] = self.running.pop(request.request_id)

    # ---------------------------------------------------------------- ends

    def free(self):
        some = self.running if self.running and (not self.waiting or self.draw.random() < 0.8) else self.waiting
        id = self.draw.choice(list(some))
        self.manager.free(some.pop(id))
        return {"op": "free", "id": id}

    def evict(self):
        known = list(cached(self.manager))
        blocks = set(self.draw.sample(known, min(len(known), self.draw.randrange(1, 4))))
        self.manager.evict_blocks(blocks)
        return {"op": "evict", "blocks": list(blocks)}

    def empty(self):
        """Free all that runs, operation by operation, so that the reset behind it can succeed."""
        self.emptying = True
        return self.free()

    def reset(self):
        self.emptying = False
        return {"op": "reset", "ok": self.manager.reset_prefix_cache()}
