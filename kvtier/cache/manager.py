"""KVCacheManager: which blocks each request of an engine has, and which it need not compute.

Owns: the pool of blocks, the block tables of all requests, and the counters of hits. Owns no bytes and does no I/O: the
engine keeps an arena of pages and gives its kernels the tables.
Always:  a block is free, or referred to by as many tables as its count says; what a request could not get changes
         nothing for anybody; decisions are those of vLLM 0.32, bit for bit (docs/manager.md says which and how it is
         tested).
Units:   tokens, blocks (index into the arena; 0 is the null block, whose content nobody reads).

One caller at a time. A request's life: `request`, `get_computed_blocks`, `allocate_slots` before each step,
`free`; or `preempt`, and from the start again.
"""

from collections.abc import Iterable, Sequence

from kvtier.allocator.block_metrics import BlockMetrics
from kvtier.allocator.block_pool import BlockPool
from kvtier.allocator.tiered_pool import TieredPool
from kvtier.blocks.chain import HashChain
from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.cache.coordinator import Coordinator, Hit
from kvtier.cache.counts import expect_count, expect_flag, expect_list
from kvtier.cache.group_rules import rules_for
from kvtier.cache.manager_input import check_growth, check_settings, expect_holder, expect_request
from kvtier.cache.prefix_stats import PrefixStats
from kvtier.cache.request import Request
from kvtier.cache.specs import Group
from kvtier.errors import UsageError
from kvtier.events import BlockEvent


class KVCacheManager:
    """Block tables and prefix caching for the requests of one engine."""

    def __init__(
        self,
        groups: Sequence[Group],
        blocks_total: int,
        *,
        tokens_max: int,
        tokens_in_flight: int | None = None,
        caching: bool = True,
        eagle: bool = False,
        hash_name: str = "sha256_cbor",
        hash_seed: str | None = None,
        hash_tokens: int | None = None,
        retention_tokens: int | None = None,
        watermark: float = 0.0,
        events: bool = False,
        metrics: BlockMetrics | None = None,
        nameless_first: bool = True,
        tiers_below: bool = False,
    ) -> None:
        """A manager of `blocks_total` blocks, the null block included; `cache.sizing` says how many fit a memory.

        tokens_max: the longest request. tokens_in_flight: of one request, scheduled and not ended (default: all).
        caching: find and name prefixes. eagle: a draft model reads the target's hidden states. hash_tokens: per hash,
        if groups differ in block size (default: what divides all). retention_tokens: see `Rules`. watermark: the share
        of blocks kept free when a waiting request is admitted. events: keep what `take_events` gives.
        metrics: of this manager alone, told of its blocks' lives; of nothing without caching, for nothing is evicted.
        nameless_first: vLLM 0.32's order of reuse; else the older one. tiers_below: blocks that are copied below are
        reused before those that are not (`engine.managed` says which are).
        Raises UsageError for what cannot work, with the remedy.
        """
        flags: dict[str, object] = {
            "caching": caching,
            "eagle": eagle,
            "events": events,
            "nameless_first": nameless_first,
            "tiers_below": tiers_below,
        }
        check_settings(groups, tokens_max, tokens_in_flight, watermark, flags)
        self.rules = rules_for(
            groups,
            tokens_max=tokens_max,
            tokens_in_flight=tokens_in_flight,
            hash_tokens=hash_tokens,
            retention_tokens=retention_tokens,
            caching=caching,
            eagle=eagle,
        )
        self.groups = tuple(groups)
        pool = TieredPool if tiers_below else BlockPool
        self.pool = pool(blocks_total, len(groups), events, metrics if caching else None, nameless_first)
        self.caching = caching
        self._coordinator = Coordinator(groups, self.pool, self.rules, caching)
        self._watermark_blocks = int(watermark * blocks_total)
        self._hash_name, self._hash_seed = hash_name, hash_seed
        self._stats = PrefixStats()
        self._requests: dict[str, Request] = {}  # those that hold blocks
        self._copying: list[tuple[int, int]] = []  # copies the engine was told of: their blocks keep a reference
        HashChain(self.rules.hash_tokens, hash_name, hash_seed)  # an unknown hash is an error here, not at a request

    # ------------------------------------------------------------ a request's life

    def request(
        self, request_id: str, tokens: Sequence[int], *, extra: ExtraKeys | None = None, reads_cache: bool = True
    ) -> Request:
        """A request for this manager. Nothing is allocated.

        tokens: the prompt, ids from 0 to 2**32-1. extra: what else makes its KV. reads_cache: it may begin with blocks
        that others computed. Raises UsageError for a prompt that is empty or has no such ids.
        """
        expect_flag("reads_cache", reads_cache)
        chain = HashChain(self.rules.hash_tokens, self._hash_name, self._hash_seed, extra)  # which looks at `extra`
        request = Request(request_id, tokens, chain if self.caching else None, extra, reads_cache, home=self)
        if len(request.tokens) > self.rules.tokens_max:
            text = f"request {request_id!r} has {len(request.tokens)} tokens, more than tokens_max"
            raise UsageError(f"{text}, {self.rules.tokens_max}; cut its prompt, or make the manager for longer ones")
        return request

    def get_computed_blocks(self, request: Request) -> Hit:
        """The longest prefix that is there. Its last token is always computed again, for its logits.

        Holds nothing: pass the hit to `allocate_slots` before any other verb that changes something.
        """
        if getattr(request, "home", None) is not self:
            expect_request(request, self)
        if not (self.caching and request.reads_cache):
            return Hit(tuple([] for _ in self.groups), 0, request)
        return self._coordinator.longest_hit(request, len(request.tokens) - 1)

    def allocate_slots(
        self,
        request: Request,
        new_tokens: int,
        hit: Hit | None = None,
        *,
        lookahead_tokens: int = 0,
        external_tokens: int = 0,
        delay_naming: bool = False,
        encoder_tokens: int = 0,
        whole_must_fit: bool = False,
        reserved_blocks: int = 0,
        others_scheduled: bool = True,
    ) -> tuple[list[int], ...] | None:
        """Blocks for the next step of a request; the new ones by group, or None if there are too few.

            | computed | hit | external | new | lookahead |
                       | get blocks                       |     named: up to the end of new, less what may be rejected

        new_tokens: computed by this step, drafts to be verified included. hit: of `get_computed_blocks`, for a request
        that begins. lookahead_tokens: slots for drafts of this step. external_tokens: after the hit, with KV from
        elsewhere; delay_naming: it arrives later, call `cache_blocks` then. encoder_tokens: for cross attention, when
        the request begins. whole_must_fit: refuse unless all its tokens fit. reserved_blocks: leave so many free
        (a request that begins with external tokens may need one of them for each group of states, as in vLLM).
        others_scheduled: a request that is not `running` leaves the watermark free, too.

        All or nothing: None changes no table but one: blocks behind a window, which the request never reads again, are
        let go first, as its next attempt would do anyway.
        """
        if getattr(request, "home", None) is not self:
            expect_request(request, self)
        if not (  # just the next step of a request that runs
            hit is None
            and self._requests.get(request.request_id) is request
            and type(new_tokens) is int
            and 0 < new_tokens <= self.rules.tokens_max - request.computed_tokens
            and type(lookahead_tokens) is int
            and lookahead_tokens >= 0
            and external_tokens == encoder_tokens == reserved_blocks == 0
        ):
            expect_count("lookahead_tokens", lookahead_tokens, 0)
            expect_count("reserved_blocks", reserved_blocks, 0)
            expect_count("encoder_tokens", encoder_tokens, 0)
            check_growth(
                request,
                self._requests.get(request.request_id),
                self._coordinator.begun(request.request_id),
                self,
                hit,
                new_tokens,
                external_tokens,
                encoder_tokens,
                delay_naming,
            )
        request_id, coordinator = request.request_id, self._coordinator
        adopted = hit if hit is not None and any(hit.groups) else None
        hit_end = request.computed_tokens + (0 if hit is None else hit.tokens)
        computed = min(hit_end + external_tokens, self.rules.tokens_max)
        watermark = self._watermark_blocks if others_scheduled and not request.running else 0
        if whole_must_fit:
            whole = min(len(request.tokens), self.rules.tokens_max)
            needed = coordinator.blocks_needed(
                request_id, whole, adopted, computed, hit_end, whole, encoder_tokens, capped=True
            )
            if needed + watermark > self.pool.blocks_free:
                return None
        main_tokens = computed + new_tokens
        tokens = min(main_tokens + lookahead_tokens, self.rules.tokens_max)
        coordinator.drop_skipped(request_id, max(0, computed - request.in_flight_tokens))
        needed = coordinator.blocks_needed(request_id, tokens, adopted, computed, hit_end, main_tokens, encoder_tokens)
        if needed + watermark > self.pool.blocks_free - reserved_blocks:
            return None
        begins = external_tokens > 0 and not coordinator.begun(request_id)
        if begins:
            uncounted = coordinator.blocks_uncounted(adopted, hit_end, external_tokens, main_tokens)
            if needed + uncounted > self.pool.blocks_free:
                return None  # vLLM fails here, when it takes them
        if adopted is not None or begins:
            coordinator.adopt(request_id, adopted, hit_end, external_tokens)
        new = coordinator.allocate(request_id, tokens, main_tokens, encoder_tokens)
        self._requests[request_id] = request
        if not delay_naming:
            # what may still be rejected, drafts, is beyond the request's own tokens
            coordinator.name(request, min(main_tokens, len(request.tokens)))
        return new

    def cache_blocks(self, request: Request, computed_tokens: int) -> None:
        """The first `computed_tokens` tokens are there: name their blocks, after `delay_naming`."""
        expect_holder(request, self, self._requests)
        expect_count("computed_tokens", computed_tokens, 0)
        if computed_tokens > len(request.tokens):
            text = f"{computed_tokens!r} computed tokens of the {len(request.tokens)} of request {request.request_id!r}"
            raise UsageError(f"{text}; give a number from 0 to that")
        if not self.caching:
            return
        if computed_tokens > self._coordinator.tokens_held(request.request_id):
            raise UsageError(
                f"request {request.request_id!r} has no blocks for {computed_tokens} tokens; allocate first"
            )
        self._coordinator.name(request, computed_tokens)

    def holds(self, request: Request) -> bool:
        """Whether the request holds blocks, and so has to be freed."""
        expect_request(request, self)
        return self._requests.get(request.request_id) is request

    def free(self, request: Request) -> None:
        """The request has ended. Its blocks keep their names, the last one is reused first.

        Raises UsageError for a request that holds nothing, such as one that was freed before.
        """
        expect_holder(request, self, self._requests)
        del self._requests[request.request_id]
        self._coordinator.free(request.request_id)

    def preempt(self, request: Request) -> None:
        """Free it, to be begun again later; what others have not taken by then it finds as a hit."""
        self.free(request)
        request.computed_tokens = 0  # its tokens in flight are still to arrive, and count until then
        request.preemptions += 1
        request.running = False

    # ------------------------------------------------------------ what an engine asks

    def block_ids(self, request: Request) -> tuple[list[int], ...]:
        """The request's block table, by group; copies. Empty for a request that holds nothing."""
        if not self.holds(request):
            return tuple([] for _ in self.groups)
        return tuple([list(table) for table in self._coordinator.tables(request.request_id)])

    def common_prefix_blocks(self, request: Request) -> list[int]:
        """By group, the leading blocks that all requests share (vLLM 0.32 has given that up and answers 0)."""
        expect_holder(request, self, self._requests)
        return self._coordinator.common_prefix_blocks(request.request_id, len(self._requests))

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return self.pool.usage

    def begin_step(self) -> None:
        """Call it before each step of the engine."""
        self._coordinator.begin_step()

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks to be copied, (from, to), before the next step reads them. Call `copied` when that is done."""
        copies = self._coordinator.take_copies()
        self._copying += copies
        return copies

    def copied(self, copies: Iterable[tuple[int, int]]) -> None:
        """These copies have been made: nobody else may have needed their blocks since."""
        copies = expect_list("copies", copies)
        for copy in copies:
            if copy not in self._copying or copies.count(copy) > 1:
                raise UsageError(f"copy {copy!r} was not given by take_copies, or is done already")
        for copy in copies:
            self._copying.remove(copy)
        self.pool.free([block for copy in copies for block in copy])

    def evict_blocks(self, blocks: Iterable[int]) -> None:
        """What these blocks hold is wrong, or not there: nobody is to hit them. Who has them keeps them.

        Null blocks of a table are passed over.
        """
        blocks = expect_list("blocks", blocks)
        for block in blocks:
            if type(block) is not int or not 0 <= block < self.pool.blocks_total:
                raise UsageError(f"no block {block!r}; there are 1 to {self.pool.blocks_total - 1}")
        self.pool.evict([block for block in blocks if block])

    def reset(self) -> bool:
        """Forget all prefixes, for the weights have changed. False, and nothing is changed, while a block is in use."""
        if not self.pool.reset():
            return False
        self._stats.reset = True
        return True

    def record_lookup(self, request: Request, hit: Hit) -> None:
        """Count a hit that is used; lookups of requests that do not read the cache are no queries."""
        expect_request(request, self)
        if not isinstance(hit, Hit):
            raise UsageError(f"hit is {hit!r}; give what get_computed_blocks returned")
        if self.caching and request.reads_cache:
            self._stats.record(len(request.tokens), hit.tokens, request.preemptions > 0)

    def take_stats(self) -> PrefixStats:
        """The counters since the last call."""
        stats, self._stats = self._stats, PrefixStats()
        return stats

    def take_events(self) -> list[BlockEvent]:
        """What was stored, removed and cleared since the last call, in order; nothing without `events`."""
        return self.pool.names.take_events()

    def check(self, held: Sequence[int] = ()) -> list[str]:
        """Recount: each block's references equal its entries in tables, in copies under way and in `held`."""
        holds = [*held, *(block for copy in self._copying for block in copy)]
        return self.pool.check() + self._coordinator.check(holds, set(self._requests))
