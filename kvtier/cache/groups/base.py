"""GroupManager: the block tables of one group, and what the kinds of attention have in common.

Owns: the table of every request, in blocks of this group, and how many of its blocks have been considered for a name.
Owns no reference counts: each entry of a table but the null block is one reference in the pool.
Always:  entry i of a table is for tokens [i * block_tokens, (i + 1) * block_tokens); the null block stands where
         nothing is kept; tables only grow, but entries become null when their tokens are out of reach.
Units:   tokens, blocks.

A manager for a new kind of attention says which prefix it can serve (`longest_hit`) and which tokens a request needs no
more (`tokens_skipped`); docs/extending.md shows one.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.allocator.block_pool import NULL_BLOCK, BlockPool
from kvtier.cache.groups.finding import Find, Hits
from kvtier.cache.groups.rules import Rules
from kvtier.cache.request import Request
from kvtier.cache.specs import Spec, blocks_for
from kvtier.errors import InvariantError
from kvtier.events import BlocksStored
from kvtier.types import BlockHash


class GroupManager:
    """One group. Verbs follow a request: `blocks_needed`, `adopt`, `allocate`, `name`, `drop_skipped`, `free`.

    eagle: the last block of a hit is not used, so that it is computed again.
    """

    shareable = True  # whether one request's blocks are of use to another
    serves_shorter = False  # whether what serves a prefix serves any shorter one as well
    drops_last = True  # whether `longest_hit` heeds `drop_last`
    finds_inside_blocks = False  # whether hits may end inside a block, if other groups' do
    names_inside_blocks = False  # whether it keeps what a hit inside a block needs

    def __init__(self, index: int, spec: Spec, pool: BlockPool, rules: Rules, eagle: bool) -> None:
        self.index = index
        self.spec = spec
        self.block_tokens = spec.block_tokens
        self.pool = pool
        self.rules = rules
        self.eagle = eagle
        self.blocks_cap: int | None = None  # what a request holds at most, for kinds that let go while it runs
        self.tables: dict[str, list[int]] = {}
        self.named: dict[str, int] = {}  # by request that has begun: its leading blocks that need no name any more
        self.shared_tails: dict[str, tuple[int, int]] = {}  # position and block of a hit's last, partly used block
        self.copies: list[tuple[int, int]] = []  # (from, to): blocks whose bytes the engine has still to copy
        self._stride = max(self.block_tokens // rules.hash_tokens, 1)

    # ------------------------------------------------------------ hits

    def longest_hit(self, hashes: Sequence[BlockHash], tokens_max: int, drop_last: bool, finds: Sequence[Find]) -> Hits:
        """The longest prefix within `tokens_max` tokens that all groups of `finds`, which share this spec, can serve.

        drop_last: the last block found is not used, so that it is computed again (EAGLE). Changes nothing.
        """
        raise NotImplementedError

    def tokens_skipped(self, computed_tokens: int) -> int:
        """How many leading tokens are out of reach once so many are computed."""
        return 0

    def block_hashes(self, hashes: Sequence[BlockHash], first: int, end: int) -> Sequence[BlockHash]:
        """The names of blocks [first, end): a hash at a block's end covers the whole block."""
        stride = self._stride
        return hashes[first:end] if stride == 1 else hashes[(first + 1) * stride - 1 : end * stride : stride]

    def leading_hashes(self, hashes: Sequence[BlockHash], end: int) -> Iterable[BlockHash]:
        """The names of blocks [0, end), one after the other: where a search often ends early, this costs less."""
        return islice(hashes, self._stride - 1, end * self._stride, self._stride)

    # ------------------------------------------------------------ a request grows

    def blocks_needed(
        self,
        request_id: str,
        tokens: int,
        hit: Sequence[int],
        computed_tokens: int,
        hit_end: int,
        main_tokens: int,
        capped: bool = False,
    ) -> int:
        """How many free blocks the request takes to hold `tokens` tokens, hits that are free at present included.

        computed_tokens: of the prefix, external ones included. hit_end: where the local prefix ends.
        main_tokens: `tokens` without those of drafts. capped: count what it holds at any one time, not in sum.
        """
        required = blocks_for(tokens, self.block_tokens)
        if capped and self.blocks_cap is not None:
            required = min(required, self.blocks_cap)
        table = self.tables.get(request_id, ())
        if request_id in self.named:  # it has begun, so there are no new hits; rejected drafts may have left more
            return max(required - len(table), 0)
        skipped = self.tokens_skipped(computed_tokens) // self.block_tokens
        new = max(required - max(skipped, len(hit) + len(table)), 0)
        if hit:
            if self.waits_for_step(hit, hit_end):
                return self.pool.blocks_total + 1  # more than there are
            new += self._idle(hit[max(skipped - len(table), 0) :]) + self._ends_inside(hit, hit_end)
        return new

    def waits_for_step(self, hit: Sequence[int], hit_end: int) -> bool:
        """Whether the hit needs bytes that this step still computes, so that its request begins in the next one."""
        return False

    def blocks_uncounted(self, hit: Sequence[int], hit_end: int, external_tokens: int, main_tokens: int) -> int:
        """What `blocks_needed` leaves out for a request that begins with external tokens. (vLLM's count does.)"""
        return 0

    def adopt(self, request_id: str, hit: Sequence[int], hit_end: int, external_tokens: int) -> None:
        """A request begins with the blocks of its hit, which get a reference each."""
        skipped = max(self.tokens_skipped(hit_end + external_tokens) // self.block_tokens, 0)
        hit = hit[skipped:]
        self.pool.touch(hit)
        table = [*[NULL_BLOCK] * skipped, *hit]
        self.tables[request_id] = table
        self.named[request_id] = len(table)
        if self._ends_inside(hit, hit_end):
            position = hit_end // self.block_tokens
            self.shared_tails[request_id] = (position, hit[-1])
            self.named[request_id] = position

    def allocate_external(self, request_id: str, hit_end: int, external_tokens: int) -> None:
        """Blocks for tokens whose KV comes from elsewhere. Only after all groups have adopted their hits."""
        end = hit_end + external_tokens
        if min(end - self.tokens_skipped(end), external_tokens) > 0:
            table = self.tables.setdefault(request_id, [])
            table += self.pool.take(max(blocks_for(end, self.block_tokens) - len(table), 0))

    def allocate(self, request_id: str, tokens: int, main_tokens: int) -> list[int]:
        """Blocks until the request holds `tokens` tokens. Returns the new ones."""
        table = self.tables.setdefault(request_id, [])
        private: list[int] = []
        if request_id in self.shared_tails:
            position, source = self.shared_tails.pop(request_id)
            private = self.pool.take(1)
            self._copy_on_write(table, position, source, private[0])
        new = blocks_for(tokens, self.block_tokens) - len(table)
        if new <= 0:
            return private
        blocks = self.pool.take(new)
        table += blocks
        return private + blocks if private else blocks

    # ------------------------------------------------------------ a request computes

    def name(self, request: Request, tokens: int) -> None:
        """Name the blocks within the first `tokens` tokens, which are computed, that are of use to others."""
        first, end = self.named.get(request.request_id, 0), tokens // self.block_tokens
        if first < end:
            self.name_blocks(request, first, end)

    def name_blocks(self, request: Request, first: int, end: int) -> None:
        """Name what is wanted of the blocks [first, end), which are full."""
        request_id = request.request_id
        blocks: Sequence[int] = self.tables[request_id][first:end]
        hashes = self.block_hashes(request.hashes, first, end)
        wanted = self.wanted(first, end, request)
        positions: Sequence[int] = range(first, end)
        if wanted is not None or NULL_BLOCK in blocks:
            kept = [i for i, block in enumerate(blocks) if block and (wanted is None or wanted[i])]
            blocks, hashes = [blocks[i] for i in kept], [hashes[i] for i in kept]
            positions = [first + i for i in kept]
        self.pool.names.add(self.index, blocks, hashes)
        self.named[request_id] = end
        if self.pool.names.events is not None:
            parent = self.block_hashes(request.hashes, first - 1, first)[0] if first else None
            self._tell(request, hashes, parent, (first, end), positions, self.block_tokens)

    def name_inside(self, request: Request, block: int, tokens: int) -> BlockHash | None:
        """Name the block by the prefix of `tokens` tokens, which ends inside it; None for the null block."""
        if block == NULL_BLOCK:
            return None
        count = tokens // self.rules.hash_tokens
        block_hash = request.hashes[count - 1]
        added = self.pool.names.add_inner(self.index, block, block_hash, tokens)
        if added and self.pool.names.events is not None:
            parent = request.hashes[count - 2] if count > 1 else None
            self._tell(request, (block_hash,), parent, (count - 1, count), (count - 1,), self.rules.hash_tokens)
        return block_hash

    def wanted(self, first: int, end: int, request: Request) -> list[bool] | None:
        """Which of the blocks [first, end) another request could use; None: all."""
        return None

    def drop_skipped(self, request_id: str, computed_tokens: int) -> None:
        """Let go of the blocks that are out of reach once so many tokens are computed."""
        skipped = self.tokens_skipped(computed_tokens)
        if skipped > 0 and request_id in self.tables:
            self.drop_blocks(request_id, 0, skipped // self.block_tokens)

    def drop_blocks(self, request_id: str, first: int, end: int) -> None:
        """Let go of the entries [first, end) of a table, the last one first, down to one that was dropped before."""
        table = self.tables[request_id]
        dropped = []
        for position in range(min(end, len(table)) - 1, first - 1, -1):
            block = table[position]
            if block == NULL_BLOCK:
                break
            dropped.append(block)
            table[position] = NULL_BLOCK
        if dropped:
            self.pool.free(dropped)

    # ------------------------------------------------------------ a request ends

    def free(self, request_id: str) -> None:
        """The last block first: a block deep in a prompt is the least likely to be hit."""
        self.named.pop(request_id, None)
        self.shared_tails.pop(request_id, None)
        table = self.tables.pop(request_id, [])
        if table and table[0] == NULL_BLOCK:  # behind a window, a long table has few blocks left, at its end
            nulls = table.count(NULL_BLOCK)
            if not any(table[:nulls]):
                self.pool.free_null(nulls)
                table = table[nulls:]
        self.pool.free(table[::-1])

    def begin_step(self) -> None:
        """A new step of the engine: what the last one computed can be read now."""

    # ------------------------------------------------------------ parts

    def _idle(self, blocks: Sequence[int]) -> int:
        """How many of them are free, so that using them takes from the free ones."""
        refs = self.pool.refs
        idle = [refs[block] for block in blocks].count(0)
        return idle - blocks.count(NULL_BLOCK) if refs[NULL_BLOCK] == 0 else idle

    def _ends_inside(self, hit: Sequence[int], hit_end: int) -> bool:
        return bool(hit) and hit_end % self.block_tokens != 0

    def _copy_on_write(self, table: list[int], position: int, source: int, private: int) -> None:
        """The request gets a block of its own instead of the one whose first part it shares.

        Both keep a reference until the bytes have been copied.
        """
        if table[position] != source:
            raise InvariantError(f"group {self.index}: block {source} is not at {position} of a table")
        table[position] = private
        self.copies.append((source, private))
        self.pool.hold(private)

    def _tell(
        self,
        request: Request,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        span: tuple[int, int],
        positions: Sequence[int],
        size: int,
    ) -> None:
        """An event for blocks of `size` tokens within [span); those at `positions` have the hashes."""
        events, extra = self.pool.names.events, request.extra
        assert events is not None  # the callers look
        keys = [None if extra is None else extra.of_block(i * size, (i + 1) * size) for i in positions]
        tokens = tuple(request.tokens[span[0] * size : span[1] * size])
        events.append(BlocksStored(self.index, tuple(hashes), parent, tokens, size, tuple(keys)))
