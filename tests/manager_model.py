"""An engine for random requests: it computes in batches, and looks at what the manager gave it.

Owns: the manager, the requests, and through `Content` and `Known` what stands in blocks and what can be found. Shares
no helper with the package but the hashes of requests, as opaque names. Units: tokens, blocks.
"""

from collections import Counter
from types import SimpleNamespace

from kvtier.cache.specs import CrossAttention, Mamba, SlidingWindow
from tests.compat.oracle_chunks import Chunking
from tests.manager_content import Content, Row, Step, first_read
from tests.manager_known import Known
from tests.manager_state import manager_of, remembered

TOKENS_MAX = 48
BASE = [(7 * i * i + i) % 5 for i in range(TOKENS_MAX)]


class World:
    """A manager and its requests by id: `waiting`, or `held`, which have blocks. `met`: what has happened how often."""

    def __init__(self, setting, blocks_total):
        self.setting, self.specs = setting, setting.specs
        more = setting.more | ({"hash_tokens": setting.hash_tokens} if setting.caching else {})
        self.manager = manager_of(
            *setting.groups, blocks_total=blocks_total, tokens_max=TOKENS_MAX, events=True, **more
        )
        self.pool = self.manager.pool
        self.content, self.known = Content(self.specs), Known(setting)
        self.earlier, self.waiting, self.held = [], {}, {}
        self.loading = {}  # by id: the tokens [start, end) that are under way
        self.batch, self.fresh = {}, set()  # steps by id; who was admitted since the last batch
        self.copying = []
        self.met = Counter()
        aligned = [spec.block_tokens for spec in self.specs if isinstance(spec, Mamba) and spec.mode == "align"]
        self.chunking = Chunking(
            max(aligned, default=None), setting.hash_tokens, setting.step, setting.inside, setting.eagle
        )

    # ---------------------------------------------------------------- requests arrive and are admitted

    def arrive(self, tokens, reads_cache=True):
        request = self.manager.request(f"r{len(self.earlier)}", tokens, reads_cache=reads_cache)
        self.earlier.append(request)
        self.waiting[request.request_id] = request
        self.known.learn(request)

    def admit(self, request_id, budget, load_steps=0, delayed=False, **limits):
        """As a scheduler does: what is there, what comes from elsewhere, and a first step."""
        request = self.waiting[request_id]
        hit = self.manager.get_computed_blocks(request)
        self.expect_longest(request, hit)
        request.shared_prefix_tokens = hit.boundary_tokens
        room = len(request.tokens) - 1 - hit.tokens
        load = min(load_steps, room // self.setting.step) * self.setting.step if self.setting.loads else 0
        start = hit.tokens + load
        delayed = load > 0 and delayed
        compute = 0 if delayed else self.cut(request, start, budget)
        if any(isinstance(spec, CrossAttention) for spec in self.specs):
            limits["encoder_tokens"] = 1 + len(request.tokens) % 8
        if not self.allocate(request, compute, hit=hit, external_tokens=load, delay_naming=delayed, **limits):
            return
        self.held[request_id] = self.waiting.pop(request_id)
        self.fresh.add(request_id)
        self.met.update(hits=hit.tokens > 0, resumed=request.preemptions > 0, loads=load > 0)
        if delayed:
            self.loading[request_id] = (hit.tokens, start)
            return
        request.computed_tokens, request.running = start + compute, True
        self.batch[request_id] = Step(start, start + compute, [], loaded_from=hit.tokens)

    def finish_load(self, request_id):
        request = self.held[request_id]
        start, end = self.loading.pop(request_id)
        self.content.load(request.tokens, self.manager.block_ids(request), start, end)
        self.manager.cache_blocks(request, end)
        request.computed_tokens, request.running = end, True

    # ---------------------------------------------------------------- requests that run

    def idle(self):
        """Those that may be scheduled, preempted or freed: not in the batch, and nothing under way into them."""
        return [name for name in self.held if name not in self.batch and name not in self.loading]

    def proceed(self, request_id, budget, drafts=0, lookahead=0, accepted=0, sampled=0, **limits):
        """The next step: more of the prompt, or one token more and drafts to be verified."""
        request = self.held[request_id]
        start = request.computed_tokens
        if start == TOKENS_MAX:
            return
        if start == len(request.tokens):
            request.append([sampled])
            self.known.learn(request)
        compute = self.cut(request, start, budget)
        most = self.setting.drafts if start + compute == len(request.tokens) else 0
        drafts = min(drafts, most, TOKENS_MAX - start - compute)
        proposed = [(sampled + i) % 2 for i in range(drafts)]
        lookahead = min(lookahead, most, TOKENS_MAX - start - compute - drafts)
        if self.allocate(request, compute + drafts, lookahead_tokens=lookahead, **limits):
            end = request.computed_tokens = start + compute + drafts
            self.batch[request_id] = Step(start, end, proposed, lookahead, min(accepted, drafts))

    def preempt(self, request_id):
        request = self.waiting[request_id] = self.held.pop(request_id)
        self.manager.preempt(request)
        self.met["preempted"] += 1

    def free(self, request_id):
        self.manager.free(self.held.pop(request_id))
        self.met["freed"] += 1

    def cut(self, request, start, budget):
        """Steps end where aligned states want them to."""
        counts = SimpleNamespace(
            num_prompt_tokens=request.prompt_tokens,
            num_tokens=len(request.tokens),
            shared_prefix_boundary=request.shared_prefix_tokens,
        )
        rest = len(request.tokens) - start
        return self.chunking.cut(counts, start, min(budget, rest)) or self.chunking.cut(counts, start, rest)

    def allocate(self, request, new_tokens, **more):
        """Whether there was room. A refusal lets go of what the request does not read again, and changes no more."""
        before, tables = self.seen(), self.manager.block_ids(request)
        new = self.manager.allocate_slots(request, new_tokens, **more)
        self.met["granted" if new is not None else "refused"] += 1
        if new is not None:
            free = set(self.pool.free_blocks())
            uncounted = more.get("external_tokens", 0) and any(isinstance(spec, Mamba) for spec in self.specs)
            assert uncounted or len(free) >= more.get("reserved_blocks", 0) + self.watermark(request)
            for blocks, table in zip(new, self.manager.block_ids(request), strict=True):
                assert set(blocks) <= set(table)
                assert not set(blocks) & free
            return True
        for was, now in zip(tables, self.manager.block_ids(request), strict=True):
            assert [block if kept else 0 for block, kept in zip(was, now, strict=True)] == now
        if tables == self.manager.block_ids(request):
            assert self.seen() == before
        assert self.pool.names.first == before[0]
        after = remembered(self.manager)
        assert self.manager.allocate_slots(request, new_tokens, **more) is None
        assert remembered(self.manager) == after
        self.expect_no_room(request, new_tokens, **more)
        return False

    def seen(self):
        tables = {name: self.manager.block_ids(request) for name, request in self.held.items()}
        return list(self.pool.names.first), list(self.pool.refs), self.pool.free_blocks(), tables

    # ---------------------------------------------------------------- a batch computes

    def run(self):
        """Copies first, as the manager asks; acknowledged later."""
        copies = self.manager.take_copies()
        self.copying += copies
        self.met["copies"] += len(copies)
        self.content.copy(copies)
        rows = []
        for name, step in self.batch.items():
            request = self.held[name]
            tokens, tables = request.tokens[: step.end - len(step.drafts)], self.manager.block_ids(request)
            if step.loaded_from is not None and step.loaded_from < step.start:
                self.content.load(tokens, tables, step.loaded_from, step.start)
            rows.append(Row(name, tokens + step.drafts, tables, step))
        holders, writers = self.who_holds(), {}

        def expect_own(name, group, block):
            """Those who found a block in this batch may wait for what is written; nobody else has it."""
            others = {other for other, _ in holders[block] - {(name, group)}}
            assert others <= self.fresh, f"{name} writes to block {block} of {others - self.fresh}"
            assert writers.setdefault(block, name) == name, f"{name} and {writers[block]} write to block {block}"

        self.content.compute(rows, expect_own)
        for row in rows:
            request, step = self.held[row.name], row.step
            request.computed_tokens = step.end - len(step.drafts) + step.accepted
            request.append(step.drafts[: step.accepted])
            self.known.learn(request)
        self.batch, self.fresh = {}, set()
        self.manager.begin_step()

    def acknowledge(self):
        copies, self.copying = self.copying, []
        self.manager.copied(copies)

    # ---------------------------------------------------------------- blocks are forgotten

    def evict(self, blocks):
        """Those that are free are damaged; found again they would be a wrong byte."""
        self.manager.evict_blocks(blocks)
        self.content.damage(set(blocks) & set(self.pool.free_blocks()))

    def reset(self):
        tables = [table for request in self.held.values() for table in self.manager.block_ids(request)]
        used = any(map(any, tables)) or bool(self.copying)  # between two chunks, a request may hold null blocks only
        done = self.manager.reset()
        assert done == (not used)
        if done:
            self.content.damage(range(1, self.pool.blocks_total))
        self.met["resets"] += done

    # ---------------------------------------------------------------- what is expected

    def who_holds(self):
        holders = {}
        for name, request in self.held.items():
            for group, table in enumerate(self.manager.block_ids(request)):
                for block in table:
                    holders.setdefault(block, set()).add((name, group))
        return holders

    def expect_longest(self, request, hit):
        """No longer prefix can be served. With EAGLE, which gives some of it up, no shorter one is taken for longer."""
        self.known.hear(self.manager.take_events())
        served = self.known.longest(request.tokens) if self.setting.caching and request.reads_cache else 0
        assert hit.tokens <= served if self.setting.eagle else hit.tokens == served

    def expect_no_room(self, request, new_tokens, hit=None, reserved_blocks=0, whole_must_fit=False, **more):
        """For full attention the sum is simple enough to do it again."""
        if len(self.specs) > 1 or self.specs[0].kind not in ("full", "mla"):
            return
        found, table = hit.groups[0] if hit else [], self.manager.block_ids(request)[0]
        tokens = request.computed_tokens + (hit.tokens if hit else 0) + more.get("external_tokens", 0) + new_tokens
        tokens = min(tokens + more.get("lookahead_tokens", 0), TOKENS_MAX)
        idle = sum(not self.pool.refs[block] for block in found)
        room = self.pool.blocks_free - self.watermark(request) - idle
        whole, step = (max(0, -(-count // 4) - len(found) - len(table)) for count in (len(request.tokens), tokens))
        assert step > room - reserved_blocks or (whole_must_fit and whole > room), "refused what fits"

    def watermark(self, request):
        share = self.setting.more.get("watermark", 0)
        return 0 if request.running else int(share * self.pool.blocks_total)

    def check(self):
        """Each block is free, or held for one group; nothing is kept that is out of reach."""
        assert self.manager.check() == []
        self.known.hear(self.manager.take_events())
        pending = [copy for group in self.manager._coordinator.managers for copy in group.copies]
        held = {block for copy in self.copying + pending for block in copy}
        groups = {}
        for block, holders in self.who_holds().items():
            if block:
                groups[block] = {group for _, group in holders}
        assert all(len(group) == 1 for group in groups.values()), "a block of two groups"
        for name, step in self.batch.items():
            for spec, table in zip(self.specs, self.manager.block_ids(self.held[name]), strict=True):
                if isinstance(spec, SlidingWindow):
                    behind = first_read(spec, step.start) - spec.retained_tokens
                    assert not any(table[: max(0, behind) // spec.block_tokens]), f"{name} keeps what it cannot read"
        held |= set(groups)
        free = self.pool.free_blocks()
        assert not held & set(free)
        assert len(held) + len(free) == self.pool.blocks_total - 1
        assert self.manager.usage == 1 - len(free) / (self.pool.blocks_total - 1)
