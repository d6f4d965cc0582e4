"""PageLoads: what lies in tiers below comes into blocks that a request got for it.

Owns: the loads under way, and a reference to each block that they write. Always: the reference ends with the load,
whatever becomes of the request meanwhile; what did not come is not named. Units: tokens, blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.allocator.tiered_pool import TieredPool
from kvtier.cache.leases import Match
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.request import Request
from kvtier.types import BlockKey, Outcome, group_of


@dataclass(slots=True)
class Loading:
    """One load. blocks: by group, behind the first `start` tokens. request: None if it let go meanwhile."""

    request: Request | None
    match: Match  # what it was promised of
    start: int
    blocks: tuple[list[int], ...]
    groups: list[int] = field(default_factory=list)  # of each block of the move

    @property
    def held(self) -> list[int]:
        return [block for row in self.blocks for block in row]

    @property
    def count(self) -> int:
        """Blocks of the move."""
        return len(self.groups)

    def place(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks for the keys that the tiers will give, a run of each group's."""
        rows = [iter(row) for row in self.blocks]
        self.groups = [group_of(key) for key in keys]
        return [next(rows[group]) for group in self.groups]


class PageLoads:
    """Loads by request; `active` counts them."""

    def __init__(self, manager: KVCacheManager, pool: TieredPool, block_tokens: Sequence[int]) -> None:
        self._manager, self._pool, self._sizes = manager, pool, tuple(block_tokens)
        self._active: list[Loading] = []

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def held(self) -> list[int]:
        return [block for loading in self._active for block in loading.held]

    def of(self, request: Request) -> Loading | None:
        return next((loading for loading in self._active if loading.request is request), None)

    def begin(self, request: Request, match: Match, start: int) -> Loading:
        """The request's blocks from token `start` on wait for what was matched."""
        tables = self._manager.block_ids(request)
        pairs = zip(tables, self._sizes, strict=True)
        blocks = tuple(table[start // size : (start + match.tokens) // size] for table, size in pairs)
        loading = Loading(request, match, start, blocks)
        for block in loading.held:
            self._pool.hold(block)
        self._active.append(loading)
        return loading

    def let_go(self, request: Request) -> None:
        """The request ended or begins again: nobody waits for what comes."""
        loading = self.of(request)
        if loading is not None:
            loading.request = None

    def end(self, loading: Loading, outcomes: Sequence[Outcome]) -> list[Request]:
        """Name what came, up to the first block that did not; returns the request if it still waits."""
        counts, broken = [0] * len(self._sizes), set()
        for group, outcome in zip(loading.groups, outcomes, strict=True):
            if not outcome.done:
                broken.add(group)
            elif group not in broken:
                counts[group] += 1
        tokens = min(count * size for count, size in zip(counts, self._sizes, strict=True))
        tokens -= tokens % self._manager.rules.step_tokens
        request = loading.request
        if request is not None:
            if tokens:
                self._manager.cache_blocks(request, loading.start + tokens)
                for row, size in zip(loading.blocks, self._sizes, strict=True):
                    for block in row[: tokens // size]:
                        self._pool.mark_clean(block, self._pool.names.first[block])
            request.computed_tokens = loading.start + tokens
        self._active.remove(loading)
        self._pool.free(loading.held)
        return [] if request is None else [request]
