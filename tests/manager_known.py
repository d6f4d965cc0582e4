"""Which prefixes can be found, as the events of a manager tell it.

Owns: for each group and prefix, how many blocks are named by it. Hashes are opaque here: which prefix one stands for is
learnt from the requests. Units: tokens.
"""

from collections import Counter

from kvtier.cache.specs import Mamba
from kvtier.events import BlockRemoved, BlocksStored
from tests.manager_content import first_read


class Known:
    """An index of prefixes that scans where the package's looks from the right end."""

    def __init__(self, setting):
        self.setting = setting
        self.blocks = Counter()
        self._prefixes = {}

    def learn(self, request):
        size = self.setting.hash_tokens
        for i in range(len(request.hashes)):
            self._prefixes[request.hashes[i]] = tuple(request.tokens[: (i + 1) * size])

    def hear(self, events):
        for event in events:
            if isinstance(event, BlocksStored):
                self.blocks.update((event.group, self._prefixes[block_hash]) for block_hash in event.hashes)
            elif isinstance(event, BlockRemoved):
                self.blocks[event.group, self._prefixes[event.hash]] -= 1
                assert self.blocks[event.group, self._prefixes[event.hash]] >= 0, "removed, but not stored"
            else:
                self.blocks.clear()

    def longest(self, tokens):
        """The longest prefix that every group can serve, one token less than all at most."""
        step, limit = self.setting.step, len(tokens) - 1
        lengths = range(limit - limit % step, 0, -step)
        return next((length for length in lengths if self._serves(tokens, length)), 0)

    def _serves(self, tokens, length):
        return all(self._group_serves(group, spec, tokens, length) for group, spec in enumerate(self.setting.specs))

    def _group_serves(self, group, spec, tokens, length):
        if isinstance(spec, Mamba):
            return self.blocks[group, tuple(tokens[:length])] > 0
        size = spec.block_tokens
        first, last = first_read(spec, length) // size, length // size
        if any(not self.blocks[group, tuple(tokens[: (i + 1) * size])] for i in range(first, last)):
            return False
        # Any block that holds the beginning will do. EAGLE looks one block further than it takes.
        ends = range(length, min((last + 1) * size, len(tokens) - (not self.setting.eagle)) + 1)
        return length % size == 0 or any(self.blocks[group, tuple(tokens[:end])] for end in ends)
