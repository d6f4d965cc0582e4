"""Which block has a copy in which tier, in what state, at what place, and how many hold it.

Owns: the one key dict of the engine (StoreKey -> handle) and the columns indexed by handle. Does not own slots,
order or bytes. Always: a handle with a name or a copy is in use; a copy that is not GONE has a place; `idle` and
`idle_clean` count what their comments say (`check()` recounts them).

Units: handles, tier indexes (0 is the fastest), holds. A handle is a small integer that is used again once its
block has no copy left; whoever keeps one across calls holds a copy of it, so that it cannot be.
Columns are `array`s (a Python object per block costs 300 bytes and 2.6 s per million); they grow by doubling.
"""

from array import array
from collections.abc import Container, Iterator, Sequence

from kvtier.cache.transitions import Move, State, after
from kvtier.errors import InvariantError
from kvtier.types import NAMESPACE_BYTES, BlockKey, StoreKey

ROWS_FIRST = 1024
NO_KEY = StoreKey(b"")
GONE, READY = State.GONE, State.READY


class Directory:
    """Handles, states and holds of all known blocks over `tiers` tiers."""

    def __init__(self, tiers: int, persistent: Container[int] = ()) -> None:
        """`persistent`: the tiers whose copies have a generation of their own (a memory tier's slots have one)."""
        self.tiers = tiers
        self._handles: dict[StoreKey, int] = {}
        self._keys: list[StoreKey] = []  # an overtaken handle keeps its key, but the dict does not name it
        self._length = array("I")
        self._state = [array("B") for _ in range(tiers)]
        self._place = [array("I") for _ in range(tiers)]
        self._generation = {tier: array("Q") for tier in range(tiers) if tier in persistent}
        self._holds: list[dict[int, int]] = [{} for _ in range(tiers)]  # few copies are held at a time
        self._unused: list[int] = []
        self.ready = [0] * tiers  # READY copies
        self.idle = [0] * tiers  # READY copies that nobody holds
        self.idle_clean = [0] * tiers  # of these, the clean ones

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._handles)

    # ------------------------------------------------------------ names

    def find(self, key: StoreKey) -> int | None:
        return self._handles.get(key)

    def admit(self, key: StoreKey, length_bytes: int) -> int:
        """The handle of `key`, a new one if it has none."""
        handle = self._handles.get(key)
        if handle is None:
            handle = self._unused.pop() if self._unused else self._grow()
            self._handles[key] = handle
            self._keys[handle] = key
            self._length[handle] = length_bytes
        return handle

    def key(self, handle: int) -> StoreKey:
        """The block's name, even after it was overtaken (`is_named`)."""
        return self._keys[handle]

    def is_named(self, handle: int) -> bool:
        """False once a drop or reset has overtaken the block: no lookup finds this handle."""
        return self._handles.get(self._keys[handle]) == handle

    def length_bytes(self, handle: int) -> int:
        return self._length[handle]

    def handles(self) -> Iterator[int]:
        """All handles that can be found. Do not change the directory while iterating."""
        return iter(self._handles.values())

    def unname(self, handle: int) -> None:
        """Nobody finds the block under its key any more; its copies live on until they are let go."""
        if self.is_named(handle):
            del self._handles[self._keys[handle]]

    def retire(self, handle: int) -> bool:
        """Give the handle back if no copy is left. True if it was."""
        if any(state[handle] for state in self._state):
            return False
        self.unname(handle)
        self._keys[handle] = NO_KEY
        self._unused.append(handle)
        return True

    # ------------------------------------------------------------ copies

    def state(self, handle: int, tier: int) -> State:
        return State(self._state[tier][handle])

    def is_ready(self, handle: int, tier: int) -> bool:
        return self._state[tier][handle] == READY

    def place(self, handle: int, tier: int) -> int:
        return self._place[tier][handle]

    def generation(self, handle: int, tier: int) -> int:
        """The copy's generation in a persistent tier; 0 in a memory tier."""
        return self._generation[tier][handle] if tier in self._generation else 0

    def top(self, handle: int) -> int | None:
        """The fastest tier with a READY copy."""
        for tier, states in enumerate(self._state):
            if states[handle] == READY:
                return tier
        return None

    def leading(self, namespace: int, keys: Sequence[BlockKey]) -> tuple[list[int], list[int]]:
        """Handles of the leading keys that have a READY copy, and the fastest tier of each."""
        prefix = namespace.to_bytes(NAMESPACE_BYTES, "big")
        handles: list[int] = []
        tiers: list[int] = []
        for key in keys:
            handle = self._handles.get(StoreKey(prefix + key))
            top = None if handle is None else self.top(handle)
            if handle is None or top is None:
                break
            handles.append(handle)
            tiers.append(top)
        return handles, tiers

    def is_clean(self, handle: int, tier: int) -> bool:
        """Losing this copy loses nothing: there is a READY one below, or nothing is below this tier."""
        below = self._state[tier + 1 :]
        return not below or any(states[handle] == READY for states in below)

    def move(self, handle: int, tier: int, move: Move) -> State:
        """Change the state of a copy by the table."""
        states = self._state[tier]
        state = State(states[handle])
        following = after(state, move)
        if state is not following:
            counted = READY in (state, following)  # no other state is counted anywhere
            if counted:
                self._account(handle, -1)
            states[handle] = following
            if counted:
                self._account(handle, +1)
        return following

    def put_at(self, handle: int, tier: int, place: int, generation: int = 0) -> None:
        """Note where the copy lies."""
        self._place[tier][handle] = place
        if tier in self._generation:
            self._generation[tier][handle] = generation

    # ------------------------------------------------------------ holds

    def hold(self, handle: int, tier: int) -> None:
        """Nothing takes a held copy's place away."""
        holds = self._holds[tier]
        held = holds.get(handle, 0)
        holds[handle] = held + 1
        if not held:
            self._account_hold(handle, tier, -1)

    def unhold(self, handle: int, tier: int) -> int:
        """Let go once; returns how many hold it still."""
        holds = self._holds[tier]
        held = holds.get(handle, 0) - 1
        if held < 0:
            raise InvariantError(f"copy of handle {handle} in tier {tier} is let go more often than held")
        if held:
            holds[handle] = held
        else:
            del holds[handle]
            self._account_hold(handle, tier, +1)
        return held

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
                    if clean or tier == self.tiers - 1:
                        self.idle_clean[tier] += sign
                clean = True

    def _account_hold(self, handle: int, tier: int, sign: int) -> None:
        """The first hold takes a copy out of the idle ones, the last puts it back: no other tier's count changes."""
        if self._state[tier][handle] == READY:
            self.idle[tier] += sign
            if self.is_clean(handle, tier):
                self.idle_clean[tier] += sign

    def _grow(self) -> int:
        first = len(self._keys)
        rows = max(ROWS_FIRST, first)
        self._keys.extend([NO_KEY] * rows)
        columns = (self._length, *self._state, *self._place, *self._generation.values())
        for column in columns:
            column.frombytes(bytes(rows * column.itemsize))
        self._unused.extend(range(first + rows - 1, first, -1))
        return first

    def check(self) -> list[str]:
        """Recount names, states and counts; an empty list means they agree."""
        findings = [
            f"{key!r} names handle {handle}, which is named {self._keys[handle]!r}"
            for key, handle in self._handles.items()
            if self._keys[handle] != key
        ]
        counts = {"ready": [0] * self.tiers, "idle": [0] * self.tiers, "idle_clean": [0] * self.tiers}
        for tier in range(self.tiers):
            for handle in (h for h in range(len(self._keys)) if self.is_ready(h, tier)):
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
        unused = set(self._unused)
        findings += [f"unused handle {h} has a copy" for h in unused if any(s[h] for s in self._state)]
        return findings
