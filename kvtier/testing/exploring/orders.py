"""`OrderModel`: which blocks would leave the disk, in which order, if the process ended now.

Owns what the policy was each time it was written down, and which of these moments the store has. It looks at the
live policy when its rows are taken, never into the rows but for their numbers, so it shares neither the encoding nor
the replay with what it tests. Always: the store's order is that of the last row that follows the last snapshot
without a gap; a block whose place in the order was not written down, or was written down for a block of another size
that lay in its place, follows as the newest.

Units: handles (of the process that wrote), places.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.blocks.namespace import NamespaceTable
from kvtier.cache import order_rows
from kvtier.cache.order_log import OrderLog
from kvtier.cache.residency import Residency
from kvtier.clock import Clock
from kvtier.policies import POLICIES
from kvtier.policies.base import Access, Policy
from kvtier.testing.exploring.store import Row
from kvtier.testing.exploring.truth import Named
from kvtier.types import block_key_of, namespace_of, page_aligned

NOTED_WITHIN_S = 1.0  # the promise
Order = tuple[list[Named], list[Named], float | None]  # to leave, first to leave first; ghosts; ARC's p


@dataclass(frozen=True, slots=True)
class Moment:
    """A policy as it was written down."""

    state: bytes
    places: dict[int, tuple[int, int]]  # of residents, by handle: place, and bytes of its block in whole pages
    ghosts: dict[int, Named]
    at_s: float


class OrderModel:
    """The order of one persistent tier over all its engines. `None` as a policy: the disk is new."""

    def __init__(self) -> None:
        self._taken: list[Moment | None] = []  # one for each batch with a sidecar that was planned and not yet matched
        self._by_batch: dict[int, Moment | None] = {}
        self._snapshot = 0  # number of the last one in the store
        self._stored: dict[int, Moment] = {}  # by number of its row
        self._noted = b""  # the state that a crash leaves
        self._noted_s = 0.0
        self._differed_s: float | None = None

    def observe(self, residency: Residency, tier: int, clock: Clock) -> None:
        """Look at the policy whenever its rows are taken."""
        order = residency.orders[tier]
        piece = order.piece
        self._noted, self._noted_s, self._differed_s = order.snapshot(), clock.now(), None

        def noted() -> dict[bytes, bytes | None]:
            rows = piece()
            self._taken.append(_moment(residency, tier, order, clock.now()) if rows else None)
            return rows

        setattr(order, "piece", noted)  # noqa: B010  an observer, on this object alone

    def planned(self, batch_ids: list[int]) -> None:
        """These batches were planned with a sidecar, in this order."""
        assert len(batch_ids) == len(self._taken), "a batch went out whose order was not asked for"
        self._by_batch |= dict(zip(batch_ids, self._taken, strict=True))
        self._taken.clear()

    def carried(self, batch_id: int, rows: Mapping[bytes, bytes | None]) -> None:
        """A batch is in the store, and its sidecar with it."""
        moment = self._by_batch.pop(batch_id)
        if moment is None:
            return
        if order_rows.HEAD_KEY in rows:
            self._snapshot = max(order_rows.number_of(key) for key, row in rows.items() if row is not None)
            self._stored = {self._snapshot - 1: moment}
        else:
            self._note(moment, rows)
        last = self._stored.get(self._last())
        if last is not None:
            self._noted, self._noted_s = last.state, last.at_s

    def _note(self, moment: Moment, rows: Mapping[bytes, bytes | None]) -> None:
        (number,) = (order_rows.number_of(key) for key in rows if key.startswith(order_rows.LOG_KEY))
        self._stored[number] = moment

    def disturbed(self) -> None:
        """The disk failed: what was to be written down has to wait."""
        self._differed_s = None

    def quiet(self, residency: Residency, tier: int, now_s: float) -> bool:
        """Nothing moves, nothing fails: what was different a second ago is in the store. Returns whether it had to."""
        waited = self._differed_s is not None and now_s >= self._differed_s + NOTED_WITHIN_S
        assert not waited or self._noted_s >= (self._differed_s or 0.0), (
            f"the order of {self._differed_s:.2f} s was not written down until {now_s:.2f} s"
        )
        same = residency.orders[tier].snapshot() == self._noted
        if waited or same or self._differed_s is None:
            self._differed_s = None if same else now_s
        return waited

    def restarted(self) -> None:
        """What was planned and not carried out will never be."""
        self._by_batch.clear()
        self._taken.clear()

    def _last(self) -> int:
        number = self._snapshot - 1
        while number + 1 in self._stored:
            number += 1
        return number

    def expected(self, name: str, blocks: int, rows: list[Row], namespaces: NamespaceTable) -> Order:
        """The order that an engine must have which opens this disk now."""
        policy = POLICIES.get(name)(blocks)
        names: dict[Named, int] = {}
        rows = sorted(rows, key=lambda row: row.generation)
        by_place = {(row.place, page_aligned(len(row.payload))): (row.fingerprint, row.key) for row in rows}
        known: set[int] = set()
        moment = self._stored.get(self._last())
        if moment is not None:
            there = {handle: by_place[place] for handle, place in moment.places.items() if place in by_place}
            renamed = {handle: names.setdefault(named, len(names)) for handle, named in there.items()}
            known = set(renamed.values())
            for handle, named in moment.ghosts.items():
                if namespaces.find(named[0]) is not None and names.setdefault(named, len(names)) not in known:
                    renamed[handle] = names[named]
            policy.restore(moment.state, renamed)
        for row in rows:
            number = names.setdefault((row.fingerprint, row.key), len(names))
            if number not in known:
                policy.touch([number], Access.FILL, page_aligned(len(row.payload)))
        return _order(policy, {number: named for named, number in names.items()})

    @staticmethod
    def of(residency: Residency, tier: int) -> Order:
        """The order that an engine has."""
        policy = residency.levels[tier].policy
        handles = [*policy.candidates(len(policy)), *policy.ghosts()]
        return _order(policy, {handle: _named(residency, handle) for handle in handles})


def _moment(residency: Residency, tier: int, order: OrderLog, now_s: float) -> Moment:
    directory = residency.directory
    residents = order.candidates(len(order))
    places = {h: (directory.place(h, tier), page_aligned(directory.length_bytes(h))) for h in residents}
    ghosts = {handle: _named(residency, handle) for handle in order.ghosts()}
    return Moment(order.snapshot(), places, ghosts, now_s)


def _named(residency: Residency, handle: int) -> Named:
    key = residency.directory.key(handle)
    return residency.namespaces.fingerprint_of(namespace_of(key)), block_key_of(key)


def _order(policy: Policy, named: Mapping[int, Named]) -> Order:
    inner = getattr(policy, "_policy", policy)
    leaving = [named[handle] for handle in policy.candidates(len(policy))]
    return leaving, [named[handle] for handle in policy.ghosts()], getattr(inner, "p", None)
