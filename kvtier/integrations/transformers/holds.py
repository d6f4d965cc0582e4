"""What one step of a session takes from the cache: matches and leases, all given back when the step ends.

Owns: those matches and leases. Always: nothing is held while the model runs or while a caller thinks, so sessions
never wait for each other; short of room a step gets fewer blocks, from the prefix on, and says so in `shortage`.
Units: blocks, tokens, seconds.
"""

from contextlib import ExitStack
from types import TracebackType

import kvtier
from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Match
from kvtier.integrations.transformers.slots import Slots

ATTEMPTS_MAX = 8  # asking for room again, each time for less


class Holds:
    """Use as `with Holds(cache, owner, slots) as holds`. Leases end behind the copies that were made."""

    def __init__(self, cache: "kvtier.SyncCache", owner: str, slots: Slots) -> None:
        self._cache = cache
        self.slots = slots
        self._owner = owner
        self._undo = ExitStack()
        self._blocks_wanted = 0
        self._blocks_taken = 0

    def __enter__(self) -> "Holds":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give everything back, the latest first."""
        self._undo.close()

    @property
    def shortage(self) -> str | None:
        """What there was no room for, in words."""
        if self._blocks_taken == self._blocks_wanted:
            return None
        return f"room for {self._blocks_taken} of {self._blocks_wanted} blocks in the fastest tier"

    def pin(self, keys: Keys, tokens_max: int | None = None) -> Match:
        """The longest known prefix, kept from leaving until the step ends."""
        match = self._cache.match(keys, owner=self._owner, tokens_max=tokens_max)
        self._undo.callback(self._cache.release, match)
        return match

    def restored(self, keys: Keys, tokens_max: int, load_deadline_s: float) -> "kvtier.Lease | None":
        """A lease on the known prefix, brought into the fastest tier as far as room and deadline allow."""
        block_tokens = keys.block_tokens[0]
        match = self.pin(keys, tokens_max)
        blocks = self._want(match.tokens // block_tokens)
        for _ in range(ATTEMPTS_MAX):
            if blocks < 1:
                break
            answer = self._reserve(match, blocks, load_deadline_s)
            if isinstance(answer, kvtier.Lease):
                return answer
            self._cache.release(match)
            blocks -= answer
            match = self.pin(keys, max(blocks, 0) * block_tokens)
            blocks = min(blocks, match.tokens // block_tokens)
        return None

    def fresh(self, keys: Keys, blocks: int) -> "kvtier.Lease | None":
        """A lease on empty slots for `blocks` blocks of these keys, or for fewer."""
        blocks = self._want(blocks)
        for _ in range(ATTEMPTS_MAX):
            if blocks < 1:
                break
            answer = self._reserve(self.pin(keys.prefix(0)), blocks, None)
            if isinstance(answer, kvtier.Lease):
                return answer
            blocks -= answer
        return None

    def _want(self, blocks: int) -> int:
        self._blocks_wanted += blocks
        return blocks

    def _reserve(self, match: Match, blocks: int, load_deadline_s: float | None) -> "kvtier.Lease | int":
        """A lease, or how many blocks too many were asked for."""
        answer = self._cache.reserve(match, blocks_total=blocks, load_deadline_s=load_deadline_s)
        if isinstance(answer, kvtier.NoRoom):
            return max(answer.slots_needed - answer.slots_available, 1)
        self._undo.callback(lambda: self._cache.release(answer, after=self.slots.event()))
        self._blocks_taken += blocks
        return answer
