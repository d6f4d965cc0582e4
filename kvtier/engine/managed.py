"""ManagedTop: a block manager whose pages are the top tier, over kvtier's tiers.

Owns: the loads and stores under way between the manager's blocks and our fastest tier, and what they hold. Owns no
bytes: a `Mover` copies. Always: a block that a move reads or writes is not reused before the move has ended, whatever
becomes of its request; a block is found by others only after its bytes are there.
Units: tokens, blocks, seconds.

The manager decides as it does alone. Beside that, blocks that are soon to be reused are copied below ahead of need, the
pool reuses the first clean block and counts what it had to drop (`TieredPool`), and a prefix that lies below comes as
external tokens: `get_computed_blocks` says how many, `allocate_slots` takes the blocks, and `step` returns the request
when they are filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier.allocator.tiered_pool import TieredPool
from kvtier.blocks.hashing import Keys
from kvtier.cache.coordinator import Hit
from kvtier.cache.counts import expect_share
from kvtier.cache.leases import Found, Match
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.request import Request
from kvtier.config.schema import Config
from kvtier.engine.moves import Move, Mover
from kvtier.engine.page_loads import Loading, PageLoads
from kvtier.engine.page_stores import PageStores, Storing
from kvtier.engine.polled import Job, Load, Store
from kvtier.errors import UsageError
from kvtier.types import BatchDone, block_key


class TiersBelow(Protocol):
    """What of a cache is used: `SyncCache` and `TieredCache` have it."""

    @property
    def config(self) -> Config: ...
    def peek(self, keys: Keys, *, tokens_max: int | None = None) -> Found: ...
    def match(self, keys: Keys, owner: str, *, tokens_max: int | None = None) -> Match: ...
    def release(self, held: Match) -> None: ...
    def submit(self, request: Load | Store) -> int: ...
    def poll(self) -> Sequence[tuple[int, object]]: ...
    def apply(self, done: BatchDone) -> None: ...


@dataclass(frozen=True, slots=True)
class Lookup:
    """What need not be computed: `hit` is in the pages, `external_tokens` behind it lie in tiers below."""

    hit: Hit
    external_tokens: int

    @property
    def tokens(self) -> int:
        return self.hit.tokens + self.external_tokens


@dataclass(slots=True)
class MoveCounters:
    """Blocks since the start. known: offered, and below already. refused: there was no room below."""

    stored: int = 0
    known: int = 0
    refused: int = 0
    loaded: int = 0
    failed: int = 0

    @property
    def lost(self) -> int:
        """Blocks that did not come where they should."""
        return self.refused + self.failed


class ManagedTop:
    """The manager's verbs, with tiers below. One caller at a time, the manager's own."""

    def __init__(
        self,
        manager: KVCacheManager,
        tiers: TiersBelow,
        mover: Mover,
        *,
        ahead: float = 0.1,
        load_deadline_s: float = 0.5,
    ) -> None:
        """ahead: the share of all blocks, next to be reused, that is copied below before it is needed.

        Raises UsageError for a manager that was not made for this, or with other groups than the tiers' model.
        """
        expect_share("ahead", ahead)
        if not isinstance(manager.pool, TieredPool) or not manager.caching:
            raise UsageError("the manager knows of no tiers; make it with tiers_below=True, and caching")
        ours = [(group.spec.kind, group.spec.block_tokens) for group in manager.groups]
        theirs = [(group.kind, group.block_tokens) for group in tiers.config.model.groups]
        if ours != theirs:
            raise UsageError(f"the manager has groups {ours}, the tiers' model {theirs}; they must be the same")
        self.manager = manager
        self.pool: TieredPool = manager.pool
        self.counters = MoveCounters()
        self._tiers, self._mover = tiers, mover
        self._deadline_s = load_deadline_s
        self._sizes = tuple(group.spec.block_tokens for group in manager.groups)
        self._loads = PageLoads(manager, manager.pool, self._sizes)
        self._stores = PageStores(manager.pool, self._sizes, max(1, int(ahead * manager.pool.blocks_total)))
        self._asked: dict[int, Loading | Storing] = {}  # by ticket
        self._moving: dict[int, Loading | Storing] = {}  # by move

    # ------------------------------------------------------------ a request

    def get_computed_blocks(self, request: Request) -> Lookup:
        """The longest prefix in the pages, and how much further it goes in tiers below. Holds nothing."""
        hit = self.manager.get_computed_blocks(request)
        limit = len(request.tokens) - 1 - hit.tokens
        if not request.reads_cache or limit < min(self._sizes):
            return Lookup(hit, 0)
        below = self._tiers.peek(self._keys(request, hit.tokens), tokens_max=limit).tokens
        if self.manager.rules.drafts:  # the last block is computed again, wherever it lies
            below = max(below - self.manager.rules.step_tokens, 0)
        return Lookup(hit, below)

    def allocate_slots(
        self, request: Request, new_tokens: int, lookup: Lookup | None = None, **more: Any
    ) -> tuple[list[int], ...] | None:
        """As the manager's. What lies below gets its blocks now and nothing is computed yet: `is_loading` is true.

        `step` returns the request when the load has ended; then ask for its first tokens.
        """
        if self.is_loading(request):
            raise UsageError(f"request {request.request_id!r} is loading; wait until `step` returns it")
        if lookup is None or not lookup.external_tokens:
            return self.manager.allocate_slots(request, new_tokens, None if lookup is None else lookup.hit, **more)
        hit = lookup.hit
        keys = self._keys(request, hit.tokens)
        match = self._tiers.match(keys, request.request_id, tokens_max=lookup.external_tokens)
        if not match.tokens:  # gone since
            self._tiers.release(match)
            return self.manager.allocate_slots(request, new_tokens, hit, **more)
        new = None
        try:
            new = self.manager.allocate_slots(request, 0, hit, external_tokens=match.tokens, delay_naming=True, **more)
        finally:  # it may also be refused with an error
            if new is None:
                self._tiers.release(match)
        if new is None:
            return None
        loading = self._loads.begin(request, match, hit.tokens)
        self._asked[self._tiers.submit(Load(match, self._deadline_s))] = loading
        return loading.blocks

    def is_loading(self, request: Request) -> bool:
        """Whether the request waits for what comes from below."""
        return self._loads.of(request) is not None

    def free(self, request: Request) -> None:
        """As the manager's, at any time: blocks that a move still writes are not reused before it has ended."""
        self.manager.free(request)
        self._loads.let_go(request)

    def preempt(self, request: Request) -> None:
        """As the manager's, at any time."""
        self.manager.preempt(request)
        self._loads.let_go(request)

    # ------------------------------------------------------------ a step

    def step(self) -> list[Request]:
        """Before each step of the engine: take in what ended, start what is due. Returns requests that were loading.

        Their `computed_tokens` say how far they came; what did not come is computed.
        """
        self.manager.begin_step()
        ready = []
        for done in self._mover.finished():
            ready += self._ended(done)
        for ticket, answer in self._tiers.poll():
            ready += self._answered(ticket, answer)
        following = self._stores.next()
        if following is not None:
            storing, keys = following
            self._asked[self._tiers.submit(Store(keys, "pages"))] = storing
        return ready

    def flush(self) -> None:
        """From now on all that nobody uses is copied below: step until `is_idle`, for instance before the end."""
        self._stores.flush()

    @property
    def is_idle(self) -> bool:
        """Whether no move is under way, and none is due or worth to be tried at present."""
        return not (self._loads.active or self._stores.active or self._stores.is_due)

    def check(self) -> list[str]:
        """Recount, with what moves hold."""
        return self.manager.check(self._loads.held)

    # ------------------------------------------------------------ parts

    def _keys(self, request: Request, start: int) -> Keys:
        """The names of a request's blocks from token `start` on."""
        hashes, step = request.hashes, self.manager.rules.hash_tokens
        rows = tuple(
            tuple(block_key(h, group) for h in hashes[(start + size) // step - 1 :: size // step])
            for group, size in enumerate(self._sizes)
        )
        return Keys(rows, self._sizes)

    def _answered(self, ticket: int, answer: object) -> list[Request]:
        """The tiers say which slots to copy to or from; or that they have no room, or nothing any more."""
        asked = self._asked.pop(ticket)
        if not isinstance(answer, Job):
            if isinstance(asked, Loading):
                self._tiers.release(asked.match)  # without room it stays valid
                return self._loads.end(asked, ())
            self.counters.refused += len(asked.lent)
            self._stores.refused(asked)
            return []
        blocks = asked.place(answer.keys)
        if isinstance(asked, Storing):
            self.counters.known += len(asked.blocks) - len(answer.keys)
        self._moving[answer.job_id] = asked
        self._mover.start(Move(answer.job_id, answer.kind, answer.keys, tuple(blocks), answer.slots))
        return []

    def _ended(self, done: BatchDone) -> list[Request]:
        """A move has ended: the tiers hear of it, and its blocks are let go. A second answer is ignored."""
        move = self._moving.get(done.batch_id)
        if move is None:
            return []
        if len(done.outcomes) != move.count:
            raise UsageError(f"move {done.batch_id} has {move.count} blocks, {len(done.outcomes)} outcomes were given")
        del self._moving[done.batch_id]
        if isinstance(move, Storing):
            done = BatchDone(done.batch_id, self._stores.judged(move, done.outcomes))
        self._tiers.apply(done)
        ended = sum(outcome.done for outcome in done.outcomes)
        self.counters.failed += len(done.outcomes) - ended
        if isinstance(move, Loading):
            self.counters.loaded += ended
            return self._loads.end(move, done.outcomes)
        self.counters.stored += ended
        self._stores.end(move, done.outcomes)
        return []
