"""What callers hold: a match pins copies for a while, a lease owns slots until it is given back.

A match has an owner and a time to live; a lease ends by release (or by the proven death of its owner), never by
time. Both are given back exactly once, however often that is asked for. Units: tokens, slots, seconds.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from kvtier.blocks.hashing import Keys
from kvtier.cache.prefix import Prefix
from kvtier.errors import UsageError
from kvtier.types import BlockKey


@dataclass(frozen=True, slots=True)
class Found:
    """What a `peek` saw. Nothing is pinned: it may be gone a moment later."""

    tokens: int
    tiers: dict[str, int]  # tier name -> tokens whose fastest copy lies there


NOTHING = Prefix(0, (), ())


class Match:
    """A pinned answer to a lookup. `tokens` of the prompt lie in the cache; `tiers` says where, by name.

    Give it to `reserve`, or `release` it. It expires by itself after its time to live; a `reserve` with an expired
    match looks again.
    """

    __slots__ = (
        "expires_at_s",
        "home",
        "keys",
        "match_id",
        "namespace",
        "owner",
        "pins",
        "prefix",
        "session",
        "tiers",
        "tokens",
        "tokens_max",
        "traced",
    )

    def __init__(
        self, match_id: int, home: object, namespace: int, owner: str, keys: Keys, tokens_max: int | None
    ) -> None:
        self.match_id = match_id
        self.home = home  # the core that made it: its handles mean nothing to any other
        self.namespace = namespace
        self.owner = owner
        self.keys = keys
        self.tokens_max = tokens_max
        self.tokens = 0
        self.tiers: dict[str, int] = {}
        self.expires_at_s = 0.0
        self.session: str | None = None  # whose turn it is
        self.traced = True  # written down, or not to be
        self.prefix = NOTHING  # for the engine only
        self.pins: list[tuple[list[int], int]] = []  # handles and their tier, empty once given back

    def __repr__(self) -> str:
        return f"Match({self.match_id}, owner={self.owner!r}, tokens={self.tokens}, tiers={self.tiers})"


@dataclass(frozen=True, slots=True)
class NoRoom:
    """`reserve` was refused: the slots are held by others. The match stays valid; try later or with less."""

    slots_needed: int
    slots_available: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What the governor chose of a match, and what it reckoned with.

    tokens_found: in the match. tokens_chosen: of these, to be brought up; the rest is computed. load_s: estimated time
    to bring them; where nothing is loaded of what would have had to be, what all of it would have taken. prefill_s:
    estimated time to compute all that was found. None: not known (yet).
    why: ``resident`` (all of it is in the top tier), ``faster`` (all of it, for it loads faster than it is computed),
    ``deadline`` (as much as arrives in time), ``slower`` (the rest, or all, is computed faster), ``unmeasured`` (all of
    it, as one of the speeds is not known), ``off`` (all of it: the configuration has no governor).
    """

    tokens_found: int
    tokens_chosen: int
    load_s: float | None
    prefill_s: float | None
    why: str


class Arrival(Protocol):
    """Copies into slots that a device has taken and may not have made yet."""

    def wait(self, stream: Any, layer: int | None) -> None:
        """Make a stream wait for them, or for those of a layer. Does not wait itself.

        Raises UsageError for what is no stream, DeviceLost if they will never come.
        """
        ...


class Phase(Enum):
    """Where a lease stands."""

    LOADING = "loading"  # promotions into its slots are under way
    ACTIVE = "active"
    RELEASED = "released"


class Lease:
    """A right on slots of the top tier, for reading the restored prefix and for writing the rest.

    The first `tokens_ready` tokens are there; compute from that token on, into the slots that follow. Only slots
    from `tokens_ready // block_tokens` on may be written. `tiers` says which tiers the restored tokens came from,
    `decision` how much the governor wanted of what was found; if a load failed or was late, fewer are ready.
    """

    __slots__ = ("_arrivals", "decision", "lease_id", "owner", "record", "tiers", "tokens_ready")

    def __init__(
        self, record: "LeaseRecord", tokens_ready: int, tiers: dict[str, int], arrivals: Sequence[Arrival] = ()
    ) -> None:
        self.record = record  # for the engine only
        self._arrivals = tuple(arrivals)
        self.lease_id = record.lease_id
        self.owner = record.owner
        self.tokens_ready = tokens_ready
        self.tiers = tiers
        self.decision = record.decision

    def slots(self, group: int = 0) -> tuple[int, ...]:
        """The slots of a group's blocks in prefix order; entry i holds tokens [i * block_tokens, ...).

        Raises UsageError once the lease was released, be it by `release_owner`: they are somebody else's then; or if
        some blocks lie in host memory and are read there (`access: uva`), see `table`.
        """
        row = self.table(group)
        if self.record.in_place and min(row) < 0:
            raise UsageError("some blocks have no slot on the device, they are read in host memory: use lease.table()")
        return row

    def table(self, group: int = 0) -> tuple[int, ...]:
        """The block table of a group, as kvtier's attention kernels read it: a slot, or ~slot of one in host memory.

        Raises UsageError once the lease was released.
        """
        self._expect_held()
        rows = self.record.slots
        index = _number("group", group)
        if not 0 <= index < len(rows):
            raise UsageError(f"the model has no group of that number; it has {len(rows)}, counted from 0")
        return tuple(rows[index])

    def wait(self, stream: Any = None, layer: int | None = None) -> None:
        """Make a device's stream wait for the restored prefix, or for one layer of it. The caller does not wait.

        Needed, before any kernel reads the prefix, of a lease that was reserved with `streamed`; of any other, and on
        host memory, the bytes are there already: no-op. stream: torch's, CuPy's, or the CUDA bindings'. Raises
        UsageError once the lease was released, or for a layer that the model has not; DeviceLost if it never comes.
        """
        self._expect_held()
        number = None if layer is None else _number("layer", layer)
        if isinstance(layer, bool) or (number is not None and number not in self.record.layers):
            raise UsageError(f"the model has no layer {number}")
        for arrival in self._arrivals:
            arrival.wait(stream, number)

    def _expect_held(self) -> None:
        if self.record.phase is Phase.RELEASED:
            raise UsageError(f"{self!r} was released: its slots belong to others; reserve anew")

    def __repr__(self) -> str:
        blocks = [len(slots) for slots in self.record.slots]
        return f"Lease({self.lease_id}, owner={self.owner!r}, tokens_ready={self.tokens_ready}, blocks={blocks})"


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """The core's side of a lease. Lists are per group, in prefix order."""

    lease_id: int
    owner: str
    match: Match
    namespace: int
    era: int  # drops of the namespace before it
    tokens_matched: int
    decision: Decision
    deadline_s: float
    phase: Phase = Phase.LOADING
    slots: list[list[int]] = field(default_factory=list)
    hits: list[list[int]] = field(default_factory=list)  # handles of the leading blocks
    sources: list[Sequence[int]] = field(default_factory=list)  # tier each hit came from
    writable: set[int] = field(default_factory=set)  # slots private to this lease
    layers: frozenset[int] = frozenset()  # of the model
    in_place: set[int] = field(default_factory=set)  # handles whose copy in the tier below is held, and read there
    streamed: bool = False  # what a device's stream has taken counts as there
    promised: dict[int, BlockKey] = field(default_factory=dict)  # slot -> its name, once the work on it is over
    waiting: set[int] = field(default_factory=set)  # handles whose promotion is under way
    failed: bool = False  # a load failed: the prefix ends before it
    lease: Lease | None = None


def _number(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is a {type(value).__name__}; pass an integer") from None
