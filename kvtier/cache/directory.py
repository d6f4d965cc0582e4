"""Which block has a copy in which tier, in what state, at what place, and how many hold it.

Owns: the columns of all copies, by tier and handle (`Names` says which block that is). Does not own slots, order or
bytes. Always: a handle with a name or a copy is in use; a copy that is not GONE has a place; `idle` and `idle_clean`
count what their comments say (`check()` recounts them).

Units: handles, tier indexes (0 is the fastest), holds.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvtier.cache.names import Names
from kvtier.cache.stored import StoredBlocks
from kvtier.cache.transitions import Move, State, after
from kvtier.errors import InvariantError
from kvtier.types import NAMESPACE_BYTES, BlockKey, StoreKey

LOOKUPS_AT_ONCE = 64  # keys looked up before the first miss among them ends the search
NO_TIER = 255
STATES = tuple(State)  # by number; asking the Enum takes three times as long
GONE, READY, RECLAIMED = int(State.GONE), int(State.READY), int(State.RECLAIMED)  # an Enum compares slowly


class Directory(Names):
    """Handles, states and holds of all known blocks over `tiers` tiers."""

    def __init__(self, tiers: int, persistent: Container[int] = ()) -> None:
        """`persistent`: the tiers whose copies have a generation of their own (a memory tier's slots have one)."""
        super().__init__()
        self.tiers = tiers
        self._top = self._column("B", NO_TIER)  # the fastest tier with a READY copy, or NO_TIER
        self._bottom = self._column("B")  # the slowest one, or 0
        self._state = [self._column("B") for _ in range(tiers)]
        self._place = [self._column("I") for _ in range(tiers)]
        self._generation = {tier: self._column("Q") for tier in range(tiers) if tier in persistent}
        self._holds: list[dict[int, int]] = [{} for _ in range(tiers)]  # few copies are held at a time
        self.bypassed: frozenset[int] = frozenset()  # tiers whose copies no lookup takes into account now
        self.ready = [0] * tiers  # READY copies
        self.idle = [0] * tiers  # READY copies that nobody holds
        self.idle_clean = [0] * tiers  # of these, the clean ones
        # By tier: READY copies between a READY one above and one below, as long as that is so, oldest first. Their
        # loss costs the least: the block is found above, and will be found below.
        self.doubled: list[dict[int, None]] = [{} for _ in range(tiers)]

    # ------------------------------------------------------------ start

    def enroll(
        self,
        tier: int,
        blocks: StoredBlocks,
        handles: NDArray[np.int64],
        ghosts: Mapping[int, tuple[StoreKey, int]] | None = None,
    ) -> list[int]:
        """Take in READY copies of the lowest tier before anything else is known, under these handles, and names of
        ghosts (handle -> key, length). Returns the ghosts that got no name, for their key has one already."""
        if tier != self.tiers - 1 or self._rows:
            raise InvariantError(f"blocks of tier {tier} are enrolled first, and only if it is the lowest")
        refused = self.begin(blocks.keys, blocks.lengths, handles, ghosts or {})
        self._set(self._state[tier], handles, after(State.GONE, Move.PUBLISH))
        self._set(self._place[tier], handles, blocks.places)
        self._set(self._generation[tier], handles, blocks.generations)
        self._set(self._top, handles, tier)
        self._set(self._bottom, handles, tier)
        self.ready[tier] = self.idle[tier] = self.idle_clean[tier] = len(handles)
        return refused

    def ghosts(self) -> int:
        """Names without a copy: what is in use and has none (an overtaken block is in use for its copies only)."""
        copies = np.zeros(self._rows, np.bool_)
        for states in self._state:
            copies |= np.frombuffer(states, np.uint8, self._rows) != GONE
        return self._rows - len(self._unused) - int(copies.sum())

    # ------------------------------------------------------------ copies

    def has_copy(self, handle: int) -> bool:
        """In whatever state."""
        return self._top[handle] != NO_TIER or any(state[handle] for state in self._state)

    def state(self, handle: int, tier: int) -> State:
        return STATES[self._state[tier][handle]]

    def is_ready(self, handle: int, tier: int) -> bool:
        return self._state[tier][handle] == READY

    def place(self, handle: int, tier: int) -> int:
        return self._place[tier][handle]

    def generation(self, handle: int, tier: int) -> int:
        """The copy's generation in a persistent tier; 0 in a memory tier."""
        return self._generation[tier][handle] if tier in self._generation else 0

    def ready_among(self, handles: Iterable[int], tier: int) -> list[int]:
        """Those of these handles that have a READY copy in this tier."""
        states = self._state[tier]
        return [handle for handle in handles if states[handle] == READY]

    def ready_in(self, tier: int) -> list[int]:
        """All handles with a READY copy in this tier."""
        found: list[int] = self._ready(tier).tolist()
        return found

    def _ready(self, tier: int) -> NDArray[np.int64]:
        return np.flatnonzero(np.frombuffer(self._state[tier], np.uint8, self._rows) == READY)

    def ready_from(self, first: int, tier: int, count: int) -> list[int]:
        """Up to `count` handles from `first` on with a READY copy in this tier, the lowest ones."""
        states = np.frombuffer(self._state[tier], np.uint8, self._rows)[first:]
        found: list[int] = (np.flatnonzero(states == READY)[:count] + first).tolist()
        return found

    def places_in(self, tier: int) -> NDArray[np.uint32]:
        """[copies, 2]: handle and place of all READY copies in this tier."""
        handles = self._ready(tier)
        pairs = np.empty((len(handles), 2), np.uint32)
        pairs[:, 0], pairs[:, 1] = handles, np.frombuffer(self._place[tier], np.uint32)[handles]
        return pairs

    def top(self, handle: int) -> int | None:
        """The fastest tier with a READY copy."""
        top = self._top[handle]
        return None if top == NO_TIER else top

    def is_found(self, key: StoreKey) -> bool:
        """Whether a block of this name has a READY copy in any tier."""
        handle = self.find(key)
        return handle is not None and self._top[handle] != NO_TIER

    def fastest(self, handle: int) -> int | None:
        """The fastest tier with a READY copy that is not bypassed."""
        top = self._top[handle]
        if top in self.bypassed:
            ready = (t for t in range(top + 1, self.tiers) if t not in self.bypassed and self.is_ready(handle, t))
            return next(ready, None)
        return None if top == NO_TIER else top

    def leading(self, namespace: int, keys: Sequence[BlockKey]) -> tuple[list[int], list[int]]:
        """Handles of the leading keys that have a READY copy in a tier not bypassed, and the fastest one of each."""
        prefix = namespace.to_bytes(NAMESPACE_BYTES, "big")
        find, tops = self._handles.get, self._top
        handles: list[int] = []
        tiers: list[int] = []
        remaining = iter(keys)
        while some := [find(StoreKey(prefix + key), -1) for key in islice(remaining, LOOKUPS_AT_ONCE)]:
            known = some if -1 not in some else some[: some.index(-1)]
            ready = [tops[handle] for handle in known]
            if self.bypassed:
                ready = [NO_TIER if (tier := self.fastest(handle)) is None else tier for handle in known]
            if NO_TIER in ready:
                del ready[ready.index(NO_TIER) :]
            handles += known[: len(ready)]
            tiers += ready
            if len(ready) < len(some):
                break
        return handles, tiers

    def is_clean(self, handle: int, tier: int) -> bool:
        """Losing this copy loses nothing, or nothing that is worth keeping: there is a READY one below, or nothing is
        below this tier, or a tier below has refused the block: between the tiers above it would go round for ever."""
        return tier == self.tiers - 1 or self._bottom[handle] > tier or self._refused[handle] > tier

    def is_below(self, handle: int, tier: int) -> bool:
        """Whether there is a READY copy below this one."""
        return self._bottom[handle] > tier

    def move(self, handle: int, tier: int, move: Move) -> State:
        """Change the state of a copy by the table."""
        states = self._state[tier]
        state = STATES[states[handle]]
        following = after(state, move)
        if state is not following:
            counted = READY in (state, following)  # no other state is counted anywhere
            if counted:
                self._account(handle, -1)
            states[handle] = following
            if counted:
                self._account(handle, +1)
                self._top[handle], self._bottom[handle] = self._extremes(handle)
                self._note_doubled(handle)
        return following

    def publish_held(self, handles: Sequence[int], tier: int, places: Sequence[int]) -> None:
        """Copies that are GONE from a memory tier become READY at these places, each held once: by who wrote it."""
        published = after(State.GONE, Move.PUBLISH)
        states, at, holds = self._state[tier], self._place[tier], self._holds[tier]
        for handle, place in zip(handles, places, strict=True):
            at[handle] = place
            if self._top[handle] != NO_TIER or handle in holds:
                self.move(handle, tier, Move.PUBLISH)
                self.hold((handle,), tier)
                continue
            if states[handle] != GONE:
                after(STATES[states[handle]], Move.PUBLISH)
            states[handle] = published
            self._top[handle] = self._bottom[handle] = tier
            self.ready[tier] += 1
            holds[handle] = 1

    def take_out(self, handles: Sequence[int], tier: int) -> None:
        """READY copies of a memory tier that nobody holds are reclaimed and gone: nothing uses their bytes."""
        after(after(State.READY, Move.RECLAIM), Move.ACKNOWLEDGED)
        states, lowest = self._state[tier], tier == self.tiers - 1
        for handle in handles:
            if states[handle] != READY or handle in self._holds[tier]:
                raise InvariantError(f"copy of handle {handle} in tier {tier} is not idle")
            if self._top[handle] == self._bottom[handle]:  # the only one
                states[handle] = GONE
                self._top[handle], self._bottom[handle] = NO_TIER, 0
                self.ready[tier] -= 1
                self.idle[tier] -= 1
                self.idle_clean[tier] -= lowest or self._refused[handle] > tier
            else:
                self.move(handle, tier, Move.RECLAIM)
                self.move(handle, tier, Move.ACKNOWLEDGED)

    def put_at(self, handle: int, tier: int, place: int, generation: int = 0) -> None:
        """Note where the copy lies."""
        self._place[tier][handle] = place
        if tier in self._generation:
            self._generation[tier][handle] = generation

    # ------------------------------------------------------------ worth

    def refuse(self, handles: Iterable[int], tier: int) -> None:
        """A tier does not want these blocks, until they are reconsidered: their copies above it are clean."""
        for handle in handles:
            self._judge(handle, tier)

    def reconsider(self, handles: Iterable[int]) -> None:
        """These blocks may be worth keeping after all."""
        for handle in handles:
            if self._refused[handle]:
                self._judge(handle, 0)

    def refused_by(self, tier: int) -> list[int]:
        """The blocks that a tier did not want."""
        found: list[int] = np.flatnonzero(np.frombuffer(self._refused, np.uint8, self._rows) == tier).tolist()
        return found

    def _judge(self, handle: int, tier: int) -> None:
        self._account(handle, -1)
        self._refused[handle] = tier
        self._account(handle, +1)

    # ------------------------------------------------------------ holds

    def hold(self, handles: Iterable[int], tier: int) -> None:
        """Nothing takes a held copy's place away."""
        holds = self._holds[tier]
        newly = []
        for handle in handles:
            held = holds.get(handle, 0)
            holds[handle] = held + 1
            if not held:
                newly.append(handle)
        self._account_holds(newly, tier, -1)

    def unhold(self, handles: Iterable[int], tier: int) -> list[int]:
        """Let go once each; returns those that nobody holds any more and that can't be found: they have to end."""
        holds, states = self._holds[tier], self._state[tier]
        let_go = []
        for handle in handles:
            held = holds.get(handle, 0) - 1
            if held > 0:
                holds[handle] = held
            elif held == 0:
                del holds[handle]
                let_go.append(handle)
            else:
                raise InvariantError(f"copy of handle {handle} in tier {tier} is let go more often than held")
        self._account_holds(let_go, tier, +1)
        return [handle for handle in let_go if states[handle] == RECLAIMED]

    def is_held(self, handle: int, tier: int) -> bool:
        return handle in self._holds[tier]

    # ------------------------------------------------------------ bookkeeping

    def _account(self, handle: int, sign: int) -> None:
        """Add or take away this handle's share of the counts; called around every change."""
        clean = False  # of the copy above the tiers looked at so far
        for tier in range(self.tiers - 1, -1, -1):
            if self._state[tier][handle] == READY:
                self.ready[tier] += sign
                if handle not in self._holds[tier]:
                    self.idle[tier] += sign
                    if clean or tier == self.tiers - 1 or self._refused[handle] > tier:
                        self.idle_clean[tier] += sign
                clean = True

    def _account_holds(self, handles: Sequence[int], tier: int, sign: int) -> None:
        """The first hold takes a copy out of the idle ones, the last puts it back: no other tier's count changes."""
        states, bottom, lowest, refused = self._state[tier], self._bottom, tier == self.tiers - 1, self._refused
        for handle in handles:
            if states[handle] == READY:
                self.idle[tier] += sign
                if lowest or bottom[handle] > tier or refused[handle] > tier:
                    self.idle_clean[tier] += sign

    def _note_doubled(self, handle: int) -> None:
        for tier in range(1, self.tiers - 1):
            if self._is_doubled(handle, tier):
                self.doubled[tier].setdefault(handle)
            else:
                self.doubled[tier].pop(handle, None)

    def _is_doubled(self, handle: int, tier: int) -> bool:
        return self._state[tier][handle] == READY and self._top[handle] < tier < self._bottom[handle]

    def _extremes(self, handle: int) -> tuple[int, int]:
        """The fastest and the slowest tier with a READY copy, as `_top` and `_bottom` have it."""
        found = [tier for tier, states in enumerate(self._state) if states[handle] == READY]
        return (found[0], found[-1]) if found else (NO_TIER, 0)

    def check(self) -> list[str]:
        """Recount names, states and counts; an empty list means they agree."""
        findings = [
            f"{key!r} names handle {handle}, which is named {self._keys[handle]!r}"
            for key, handle in self._handles.items()
            if self._keys[handle] != key
        ]
        counts = {"ready": [0] * self.tiers, "idle": [0] * self.tiers, "idle_clean": [0] * self.tiers}
        for tier in range(self.tiers):
            for handle in (h for h in range(self._rows) if self.is_ready(h, tier)):
                counts["ready"][tier] += 1
                if handle not in self._holds[tier]:
                    counts["idle"][tier] += 1
                    counts["idle_clean"][tier] += self.is_clean(handle, tier)
            findings += [
                f"tier {tier} holds handle {handle}, which has no copy there"
                for handle in self._holds[tier]
                if self._state[tier][handle] == GONE
            ]
        for name, recounted in counts.items():
            if recounted != getattr(self, name):
                findings.append(f"{name} is {getattr(self, name)}, recounted {recounted}")
        rows = range(self._rows)
        unused = set(self._unused)
        findings += [f"unused handle {h} has a copy" for h in unused if any(s[h] for s in self._state)]
        ends = ((h, (self._top[h], self._bottom[h])) for h in rows)
        findings += [f"handle {h} has wrong extremes {found}" for h, found in ends if found != self._extremes(h)]
        findings += [
            f"tier {tier}: the copies between two others are not as noted"
            for tier in range(1, self.tiers - 1)
            if {*self.doubled[tier]} != {h for h in rows if self._is_doubled(h, tier)}
        ]
        lost = {h for h in rows if not self.is_named(h) and not self.has_copy(h)} - unused
        findings += [f"handle {h} is used by nobody and cannot be given again" for h in lost]
        return findings
