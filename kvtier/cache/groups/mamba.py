"""MambaGroup: recurrent states instead of KV, kept at block boundaries.

A prefix can be served if the state after its last token is there; nothing before it is needed. The state of a request
that runs is changed in place, so only states at which a step has ended are worth a name, and one that was computed in
this step cannot be read in it. Units: tokens, blocks.

Mode `all` keeps a state for each block, like KV. Mode `align` keeps what the steps ended with: the table holds null
blocks, the state before (read by this step), the running state, and behind it the blocks for drafts. Where a prompt
ends inside a block, its state is named by that inner boundary; the request that wrote it goes on writing into its
block, and the name moves to a copy.
"""

from collections.abc import Sequence

from kvtier.allocator.block_pool import NULL_BLOCK, BlockPool
from kvtier.cache.groups.base import GroupManager
from kvtier.cache.groups.finding import Find, Hits, find_all
from kvtier.cache.groups.rules import Rules
from kvtier.cache.request import Request
from kvtier.cache.specs import Mamba, Spec, blocks_for
from kvtier.types import BlockHash


class MambaGroup(GroupManager):
    """What both modes have in common, and mode `all`."""

    drops_last = False  # draft models have no such layers
    finds_inside_blocks = True

    def __init__(self, index: int, spec: Spec, pool: BlockPool, rules: Rules, eagle: bool) -> None:
        super().__init__(index, spec, pool, rules, eagle)
        assert isinstance(spec, Mamba)
        self._drafts = spec.speculative_blocks
        self._named_in_step: set[BlockHash | None] = set()

    def tokens_skipped(self, computed_tokens: int) -> int:
        return computed_tokens - 1

    def longest_hit(self, hashes: Sequence[BlockHash], tokens_max: int, drop_last: bool, finds: Sequence[Find]) -> Hits:
        """The last boundary whose state is there."""
        size, align = self.block_tokens, self.rules.align_tokens
        inside = align < size and size % align == 0
        step = align if inside else size
        ends = hashes[: tokens_max // step] if inside else self.block_hashes(hashes, 0, tokens_max // size)
        for index in range(len(ends) - 1, -1, -1):
            row = find_all(ends[index], finds)
            tokens = (index + 1) * step
            if row is not None and tokens % align == 0:
                before = blocks_for(tokens, size) - 1
                return [[*[NULL_BLOCK] * before, block] for block in row], tokens
        return [[] for _ in finds], 0

    def wanted(self, first: int, end: int, request: Request) -> list[bool] | None:
        """All states, or those at each `retention_tokens` and at the boundaries."""
        size, kept = self.block_tokens, self.rules.retention_tokens
        if kept is None or 0 < kept <= size:
            return None
        period = kept // size
        wanted = [bool(period) and (i + 1) % period == 0 for i in range(first, end)]
        for boundary in self.rules.resume_positions(request):
            last = boundary // self.rules.align_tokens * self.rules.align_tokens // size - 1
            if first <= last < end:
                wanted[last - first] = True
        return wanted

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
        tokens += self._drafts * self.block_tokens
        return super().blocks_needed(request_id, tokens, hit, computed_tokens, hit_end, main_tokens, capped)

    def allocate(self, request_id: str, tokens: int, main_tokens: int) -> list[int]:
        return super().allocate(request_id, tokens + self._drafts * self.block_tokens, main_tokens)

    def name_blocks(self, request: Request, first: int, end: int) -> None:
        super().name_blocks(request, first, end)
        names = self.pool.names.first
        self._named_in_step.update(names[block] for block in self.tables[request.request_id][first:end] if block)
        self._named_in_step.discard(None)

    def begin_step(self) -> None:
        self._named_in_step.clear()

    def waits_for_step(self, hit: Sequence[int], hit_end: int) -> bool:
        """The state that the hit ends with is written by this step."""
        return self.pool.names.first[hit[-1]] in self._named_in_step


class AlignedMambaGroup(MambaGroup):
    """Mode `align`. Steps have to end at block boundaries, or where the prompt ends."""

    names_inside_blocks = True

    def __init__(self, index: int, spec: Spec, pool: BlockPool, rules: Rules, eagle: bool) -> None:
        super().__init__(index, spec, pool, rules, eagle)
        self._begun: set[str] = set()  # requests whose table ends with a running state and blocks for drafts
        self._retired: dict[str, int] = {}  # by request: leading positions that are null for good

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
        """One running state, blocks for drafts at the start, and a copy where a shared block is written to."""
        if hit and self.waits_for_step(hit, hit_end):
            return self.pool.blocks_total + 1
        required = blocks_for(main_tokens, self.block_tokens) + self._drafts
        new = required - len(hit) - len(self.tables.get(request_id, ()))
        copied = self._ends_inside(hit, hit_end) or request_id in self.shared_tails
        if copied:
            new = max(new, 0) + 1
        if new > 0:
            new = min(new, 1 + copied + (0 if request_id in self._begun else self._drafts))
        return new + self._idle(hit)

    def blocks_uncounted(self, hit: Sequence[int], hit_end: int, external_tokens: int, main_tokens: int) -> int:
        """A state from elsewhere has a block of its own if it is not the one that this step goes on from."""
        if external_tokens == 0:
            return 0
        end = blocks_for(hit_end + external_tokens, self.block_tokens)
        required = blocks_for(main_tokens, self.block_tokens) + self._drafts
        loaded = end - max(len(hit), (hit_end + external_tokens - 1) // self.block_tokens)
        taken = loaded + max(0, required - max(end, required - self._drafts - 1))
        return max(0, taken - max(0, min(required - len(hit), 1 + self._drafts)))

    def allocate(self, request_id: str, tokens: int, main_tokens: int) -> list[int]:
        """The new running state. `tokens` with drafts do not count: their states have blocks of their own."""
        table = self.tables.setdefault(request_id, [])
        required = blocks_for(main_tokens, self.block_tokens) + self._drafts
        begun, tail = request_id in self._begun, self.shared_tails.pop(request_id, None)
        self._begun.add(request_id)
        length = len(table)
        if required <= length and tail is None:
            return []
        running = required - self._drafts - 1  # the position of the new running state
        table += [NULL_BLOCK] * (running - length)
        if begun:
            for position in range(length - self._drafts, min(length, running)):
                table.append(table[position])  # blocks for drafts move along with the running state
                table[position] = NULL_BLOCK
        new = self.pool.take(max(required - len(table), 0) + (tail is not None))
        added = table[length:]
        if tail is not None:
            private = new.pop(0)
            if begun:
                self._leave_name_behind(tail[1], private)
            else:
                self._copy_on_write(table, tail[0], tail[1], private)
                added.insert(0, private)
        table += new
        return added + new

    def name(self, request: Request, tokens: int) -> None:
        super().name(request, tokens)
        self._name_tail(request, tokens)

    def free(self, request_id: str) -> None:
        self._begun.discard(request_id)
        self._retired.pop(request_id, None)
        super().free(request_id)

    def drop_blocks(self, request_id: str, first: int, end: int) -> None:
        """Null blocks may stand between states, so those before a null block are looked at, too, but only once."""
        table = self.tables[request_id]
        end = min(end, len(table))
        first = max(first, self._retired.get(request_id, 0))
        if first >= end:
            return
        dropped = [block for block in reversed(table[first:end]) if block != NULL_BLOCK]
        table[first:end] = [NULL_BLOCK] * (end - first)
        if dropped:
            self.pool.free(dropped)
        self._retired[request_id] = end

    def _name_tail(self, request: Request, tokens: int) -> None:
        """Name the state by the last boundary of the prompt at which another request can begin, if it ends there."""
        step = self.rules.hash_tokens
        limit = request.prompt_tokens if self.rules.drafting else request.prompt_tokens - 1
        boundary = limit // step * step - (step if self.rules.drafting else 0)
        if tokens <= 0 or tokens != max(boundary, 0):
            return
        table = self.tables.get(request.request_id, [])
        position = blocks_for(tokens, self.block_tokens) - 1
        if position >= len(table):
            return
        block = table[position]
        block_hash = self.name_inside(request, block, tokens)
        if block_hash is None:
            return
        self._named_in_step.add(block_hash)
        if tokens % self.block_tokens:
            self.shared_tails[request.request_id] = (position, block)
            self.named[request.request_id] = position

    def _leave_name_behind(self, running: int, private: int) -> None:
        """The running state goes on in its block; its names, and the bytes so far, go to a copy."""
        self.pool.names.move(running, private)
        self.copies.append((running, private))
        self.pool.hold(running)
        self._named_in_step.add(self.pool.names.first[private])
        self._named_in_step.discard(None)
