"""BlockNames: which block holds which content, by the hash of the content and of all before it.

Owns: the names of blocks, the index from a group's names to its blocks, and the events of names that went.
Always:  a name is found by its group's index; of several blocks with one name the one named first is found, and the
         next one after it went; a block's further names are of prefixes that end inside it.
Units:   blocks (index), tokens.

Blocks with equal content are kept apart, for a block table only grows: nobody is ever moved to another's copy.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.errors import UsageError
from kvtier.events import BlockEvent, BlockRemoved, BlocksCleared
from kvtier.types import BlockHash

GROUPS_MAX = 256  # a byte per block says whose name it has


class BlockNames:
    """Names of blocks 0 .. blocks_total-1. Verbs cost O(1) per name.

    first: the first name by block, None without one; read it where a call per block would cost more than the answer.
    events: what went, if anybody wants to know; whoever names blocks adds what was stored.
    """

    def __init__(self, blocks_total: int, groups: int, events: bool) -> None:
        if not 1 <= groups <= GROUPS_MAX:
            raise UsageError(f"{groups} groups; a pool serves 1 to {GROUPS_MAX}")
        self.first: list[BlockHash | None] = [None] * blocks_total
        self.events: list[BlockEvent] | None = [] if events else None
        self.version = 0  # grows when a name goes or moves: until then, what was found can still be found
        self._group = bytearray(blocks_total)
        self._index: tuple[dict[BlockHash, int], ...] = tuple({} for _ in range(groups))
        self._twins: tuple[dict[BlockHash, OrderedDict[int, None]], ...] = tuple({} for _ in range(groups))
        self._more: dict[int, list[BlockHash]] = {}  # by block: its further names
        self._inner: dict[int, int] = {}  # by block: the tokens that its first name covers, if it ends inside it

    def finder(self, group: int) -> Callable[[BlockHash], int | None]:
        """The function from a name to the block of `group` that is found by it. It stays valid."""
        return self._index[group].get

    def group_of(self, block: int) -> int:
        """The group whose name a block has; it means nothing for one without."""
        return self._group[block]

    def ends_inside(self, block: int) -> bool:
        """Whether a block is named by a prefix that ends inside it: the rest of it may be anything."""
        return block in self._inner

    def add(self, group: int, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Full blocks get their names. One that was named for a part of its tokens loses that name first."""
        index, twins, first = self._index[group], self._twins[group], self.first
        for block, block_hash in zip(blocks, hashes, strict=True):
            if first[block] is not None:
                self.forget(block)
            first[block] = block_hash
            if index.setdefault(block_hash, block) != block:
                twins.setdefault(block_hash, OrderedDict())[block] = None
        if len(self._index) > 1:
            for block in blocks:
                self._group[block] = group

    def add_inner(self, group: int, block: int, block_hash: BlockHash, tokens: int) -> bool:
        """A name for the prefix of `tokens` tokens that ends inside a block. False if the block has it already.

        An earlier such name that covers less is forgotten; the name of the full block stays beside it.
        """
        if self._index[group].get(block_hash) == block or block in self._twins[group].get(block_hash, ()):
            return False
        if self._inner.get(block, tokens) < tokens:
            self.forget(block)
        if self.first[block] is None:
            self.first[block] = block_hash
            self._inner[block] = tokens
            self._group[block] = group
        else:
            self._more.setdefault(block, []).append(block_hash)
        self._enter(group, block_hash, block)
        return True

    def move(self, source: int, target: int) -> None:
        """`target`, which has no name, holds from now on what `source` held. Nobody is told."""
        group, inner = self._group[source], self._inner.get(source)
        names = self._take(source)
        if not names:
            return
        self.first[target] = names[0]
        self._group[target] = group
        if inner is not None:
            self._inner[target] = inner
        if len(names) > 1:
            self._more[target] = list(names[1:])
        for block_hash in names:
            self._enter(group, block_hash, target)

    def forget(self, block: int) -> None:
        """The block has no name any more; nothing happens if it has none."""
        group = self._group[block]
        for block_hash in self._take(block):
            if self.events is not None:
                self.events.append(BlockRemoved(group, block_hash))

    def clear(self) -> None:
        """No block has a name any more."""
        for index, twins in zip(self._index, self._twins, strict=True):
            index.clear()  # the same dictionaries stay: `finder` gave them away
            twins.clear()
        self._more.clear()
        self._inner.clear()
        self.first[:] = [None] * len(self.first)
        self.version += 1
        if self.events is not None:
            self.events.append(BlocksCleared())

    def take_events(self) -> list[BlockEvent]:
        """What happened since the last call; nothing if no events are kept."""
        if self.events is None:
            return []
        events, self.events = self.events, []
        return events

    def check(self) -> list[str]:
        """Compare the names of the blocks with the index."""
        named: dict[tuple[int, BlockHash], set[int]] = {}
        for block, first in enumerate(self.first):
            if first is not None:
                for block_hash in (first, *self._more.get(block, ())):
                    named.setdefault((self._group[block], block_hash), set()).add(block)
        indexed = {
            (group, block_hash): {block, *self._twins[group].get(block_hash, ())}
            for group, index in enumerate(self._index)
            for block_hash, block in index.items()
        }
        findings = ["names: blocks and index disagree"] if named != indexed else []
        if sum(map(len, self._twins)) != sum(len(blocks) > 1 for blocks in indexed.values()):
            findings.append("names: duplicates of a name that is not found")
        if any(self.first[block] is None for block in (*self._more, *self._inner)):
            findings.append("names: a block without a name has a further one")
        return findings

    def _enter(self, group: int, block_hash: BlockHash, block: int) -> None:
        if self._index[group].setdefault(block_hash, block) != block:
            self._twins[group].setdefault(block_hash, OrderedDict())[block] = None

    def _take(self, block: int) -> Sequence[BlockHash]:
        """Take all names off a block."""
        first = self.first[block]
        if first is None:
            return ()
        self.first[block] = None
        self.version += 1
        names = [first]
        if self._more or self._inner:
            names += self._more.pop(block, ())
            self._inner.pop(block, None)
        group = self._group[block]
        index, twins = self._index[group], self._twins[group]
        for block_hash in names:
            others = twins.get(block_hash)
            if others is None:
                del index[block_hash]
                continue
            if index[block_hash] == block:
                index[block_hash], _ = others.popitem(last=False)
            else:
                del others[block]
            if not others:
                del twins[block_hash]
        return names
