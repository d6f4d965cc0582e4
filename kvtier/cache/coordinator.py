"""Coordinator: several groups as one: what all of them can serve, and every verb for each of them.

Owns: the groups' managers, over one pool. Always: a hit has the length that every group can serve; all groups have
touched their hits before one takes a new block, so that none takes what another has found (vLLM #33775).
Units: tokens, blocks.

Each kind of attention accepts the length that the others leave, or shortens it; when one has shortened it, the others
are asked again, until nobody does. It ends, for lengths only fall. With EAGLE a group looks one block further and then
drops the last one it found, once for each length.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from kvtier.allocator.block_pool import NULL_BLOCK, BlockPool
from kvtier.cache.group_rules import draft_groups
from kvtier.cache.groups import GroupManager, manager_class
from kvtier.cache.groups.finding import Find
from kvtier.cache.groups.rules import Rules
from kvtier.cache.request import Request
from kvtier.cache.specs import Group, Spec, blocks_for
from kvtier.errors import UsageError


class Hit(NamedTuple):
    """A prefix that can be served: a table per group, and its tokens. Nothing is held: the next verb may end it.

    boundary_tokens: where a longer prefix ends that some group could have served, had the others kept its blocks; 0
    if there is none.
    """

    groups: tuple[list[int], ...]
    tokens: int
    request: Request | None  # whose it is
    boundary_tokens: int = 0
    version: int = 0  # of the names when it was found


@dataclass(slots=True)
class _Family:
    """Groups with one spec, looked up together."""

    managers: list[GroupManager]
    finds: list[Find]

    @property
    def first(self) -> GroupManager:
        return self.managers[0]


class Coordinator:
    """The groups of one model."""

    def __init__(self, groups: Sequence[Group], pool: BlockPool, rules: Rules, caching: bool) -> None:
        """Raises UsageError for groups that cannot be served together; `rules` is made by `rules_for`."""
        self.pool = pool
        self.rules = rules
        kinds = [manager_class(group.spec) for group in groups]
        drafts = draft_groups(groups, rules.drafting)
        eagles = {(kind, groups[i].spec) for i, kind in enumerate(kinds) if i in drafts} if caching else set()
        self.managers = tuple(
            kind(index, group.spec, pool, rules, (kind, group.spec) in eagles)
            for index, (kind, group) in enumerate(zip(kinds, groups, strict=True))
        )
        self._families = _families(self.managers) if caching else []
        self._exact = len(groups) == 1 or rules.align_tokens < rules.step_tokens  # hits end where blocks or hashes do
        self._forgetful = [m for m in self.managers if _forgets(type(m))]

    # ------------------------------------------------------------ hits

    def longest_hit(self, request: Request, tokens_max: int) -> Hit:
        """The longest prefix within `tokens_max` tokens that all groups can serve."""
        hashes = request.hashes
        if len(self.managers) == 1:
            (family,) = self._families
            tables, tokens = family.first.longest_hit(hashes, tokens_max, family.first.eagle, family.finds)
            return Hit((tables[0],), tokens, request, 0, self.pool.names.version)
        tables_by_group: list[list[int]] = [[] for _ in self.managers]
        settled: dict[int, int] = {}  # by family that serves any shorter prefix as well, and is asked once: its tokens
        dropped: set[int] = set()  # families that have dropped a block at the present length
        limit, longest = tokens_max, 0
        while True:
            tokens = limit
            for index, family in enumerate(self._families):
                if index in settled:
                    tokens = min(tokens, settled[index])
                    continue
                drop = family.first.eagle and index not in dropped
                tables, found = family.first.longest_hit(
                    hashes, self._reach(family.first, tokens, len(hashes)) if drop else tokens, drop, family.finds
                )
                if drop:
                    dropped.add(index)
                elif found < tokens:
                    dropped.clear()
                tokens, longest = found, max(longest, found)
                for manager, table in zip(family.managers, tables, strict=True):
                    tables_by_group[manager.index] = table
                if family.first.serves_shorter:
                    settled[index] = found
            if tokens >= limit:
                break
            limit = tokens
            if settled and len(self._families) == 2:
                break  # the other one has answered for this length
        for index in settled:
            for manager in self._families[index].managers:
                del tables_by_group[manager.index][blocks_for(limit, manager.block_tokens) :]
        boundary = longest if longest > limit else 0
        return Hit(tuple(tables_by_group), limit, request, boundary, self.pool.names.version)

    def _reach(self, manager: GroupManager, tokens: int, hashes: int) -> int:
        """How far to look so that dropping one block leads back to `tokens`."""
        if not manager.drops_last:
            return tokens
        step, inside = self.rules.hash_tokens, self.rules.align_tokens < self.rules.step_tokens
        fine = inside and manager.finds_inside_blocks and manager.block_tokens > step
        return min(tokens + (step if fine else manager.block_tokens), hashes * step)

    # ------------------------------------------------------------ a request grows

    def blocks_needed(
        self,
        request_id: str,
        tokens: int,
        hit: Hit | None,
        computed_tokens: int,
        hit_end: int,
        main_tokens: int,
        encoder_tokens: int,
        capped: bool = False,
    ) -> int:
        """Free blocks that it takes to hold `tokens` tokens, over all groups."""
        needed = 0
        for manager in self.managers:
            if manager.shareable:
                blocks = () if hit is None else hit.groups[manager.index]
                needed += manager.blocks_needed(
                    request_id, tokens, blocks, computed_tokens, hit_end, main_tokens, capped
                )
            else:
                needed += manager.blocks_needed(request_id, encoder_tokens, (), 0, 0, encoder_tokens, capped)
        return needed

    def blocks_uncounted(self, hit: Hit | None, hit_end: int, external_tokens: int, main_tokens: int) -> int:
        """What `blocks_needed` leaves out for a request that begins with external tokens, over all groups."""
        return sum(
            manager.blocks_uncounted(
                () if hit is None else hit.groups[manager.index], hit_end, external_tokens, main_tokens
            )
            for manager in self.managers
        )

    def begun(self, request_id: str) -> bool:
        """Whether a group has named or adopted blocks of it: there are no new hits for it then."""
        return any(request_id in manager.named for manager in self.managers)

    def adopt(self, request_id: str, hit: Hit | None, hit_end: int, external_tokens: int) -> None:
        """A request begins with its hit, and with blocks for what comes from elsewhere."""
        for manager in self.managers:
            manager.adopt(request_id, () if hit is None else hit.groups[manager.index], hit_end, external_tokens)
        if external_tokens > 0:
            for manager in self.managers:
                manager.allocate_external(request_id, hit_end, external_tokens)

    def allocate(self, request_id: str, tokens: int, main_tokens: int, encoder_tokens: int) -> tuple[list[int], ...]:
        """Blocks until the request holds `tokens` tokens. Returns the new ones, by group."""
        if len(self.managers) == 1:
            manager = self.managers[0]
            return (manager.allocate(request_id, tokens if manager.shareable else encoder_tokens, main_tokens),)
        return tuple(
            [
                manager.allocate(request_id, tokens if manager.shareable else encoder_tokens, main_tokens)
                for manager in self.managers
            ]
        )

    def name(self, request: Request, computed_tokens: int) -> None:
        """Name the blocks that hold the first `computed_tokens` tokens, if prefixes are kept at all."""
        if self._families:
            for manager in self.managers:
                manager.name(request, computed_tokens if self._exact else self._nameable(manager, computed_tokens))

    def drop_skipped(self, request_id: str, computed_tokens: int) -> None:
        for manager in self._forgetful:
            manager.drop_skipped(request_id, computed_tokens)

    def tokens_held(self, request_id: str) -> int:
        """How many tokens its tables have entries for."""
        shared = [m for m in self.managers if m.shareable]
        return min((len(m.tables.get(request_id, ())) * m.block_tokens for m in shared), default=0)

    def free(self, request_id: str) -> None:
        for manager in self.managers:
            manager.free(request_id)

    def tables(self, request_id: str) -> tuple[list[int], ...]:
        return tuple([manager.tables.get(request_id, []) for manager in self.managers])

    def begin_step(self) -> None:
        for manager in self.managers:
            manager.begin_step()

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies that groups have asked for since the last call."""
        copies = []
        for manager in self.managers:
            copies += manager.copies
            manager.copies = []
        return copies

    def common_prefix_blocks(self, request_id: str, requests: int) -> list[int]:
        """By group, the leading blocks of a request that have as many references as there are requests."""
        refs = self.pool.refs
        return [
            sum(1 for _ in takewhile(lambda block: block and refs[block] == requests, table))
            for table in self.tables(request_id)
        ]

    def check(self, held: Sequence[int], requests: set[str]) -> list[str]:
        """Recount the references, and that only these requests have tables. held: further references to blocks."""
        findings = []
        refs = Counter(held)
        for manager in self.managers:
            refs.update(block for pair in manager.copies for block in pair)
            for request_id, table in manager.tables.items():
                refs.update(table)
                if request_id not in requests and table:
                    findings.append(f"group {manager.index}: a table of {request_id!r}, which holds nothing")
                if manager.named.get(request_id, 0) > len(table):
                    findings.append(f"group {manager.index}: more blocks of {request_id!r} named than there are")
        del refs[NULL_BLOCK]
        counted = {block: count for block, count in enumerate(self.pool.refs) if count and block}
        if counted != refs:
            findings.append(f"refs: {sorted(set(counted.items()) ^ set(refs.items()))} differ from the tables")
        return findings

    # ------------------------------------------------------------ parts

    def _nameable(self, manager: GroupManager, tokens: int) -> int:
        """How much of a prefix of `tokens` tokens a later hit could use, if it can end at steps only."""
        step = self.rules.step_tokens
        aligned = tokens // step * step
        if manager.eagle and aligned > 0:
            return min(tokens, aligned + manager.block_tokens)  # the block that a hit looks at and drops
        return aligned


def _forgets(kind: type[GroupManager]) -> bool:
    """Whether groups of this kind let go of blocks while a request runs."""
    return kind.tokens_skipped is not GroupManager.tokens_skipped or kind.drop_skipped is not GroupManager.drop_skipped


def _families(managers: Sequence[GroupManager]) -> list[_Family]:
    """Groups by spec; first those that scan from the left, for that bounds what the others have to look at."""
    families: dict[tuple[type[GroupManager], Spec], _Family] = {}
    for manager in managers:
        if not manager.shareable:
            text = f"group {manager.index}: blocks of {manager.spec.kind} attention are never shared"
            raise UsageError(f"{text}; make the manager with caching=False")
        family = families.setdefault((type(manager), manager.spec), _Family([], []))
        family.managers.append(manager)
        family.finds.append(manager.pool.names.finder(manager.index))
    return sorted(families.values(), key=lambda family: not family.first.serves_shorter)
