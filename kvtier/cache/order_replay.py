"""Builds a persistent tier's policy again after a restart, from the rows that `OrderLog` left (`order_rows`).

Owns nothing. The policy of then comes back under the handles of then, by its snapshot and by the calls noted since;
`adoption` gives the blocks of now these handles. Always: damage costs order and never more: the log is used up to the
first row that is not whole.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.cache import order_rows
from kvtier.cache.order_ghosts import Ghost, unpack_ghosts
from kvtier.cache.order_log import ENDS_SHARED, EVICT, FORGET, HINT, RESIZE
from kvtier.cache.order_rows import Snapshot
from kvtier.policies import POLICIES
from kvtier.policies.base import Access, Hint, Policy, SupportsHints
from kvtier.types import StoreKey, block_key_of, namespace_of, store_key

NO_PLACE = 2**32 - 1
_SPARE_HANDLES = 1 << 12


class Places:
    """Where each handle's block lay, if it lay somewhere: a column of u32 by handle."""

    def __init__(self) -> None:
        self._column = array("I")

    def put(self, handles: Sequence[int], places: "array[int]") -> None:
        """Raises ValueError if these are not equally many."""
        self._reach(max(handles, default=-1))
        for handle, place in zip(handles, places, strict=True):
            self._column[handle] = place

    def put_all(self, pairs: NDArray[np.uint32]) -> None:
        """pairs: [blocks, 2], handle and place."""
        self._reach(int(pairs[:, 0].max(initial=0)))
        np.frombuffer(self._column, np.uint32)[pairs[:, 0]] = pairs[:, 1]

    def clear(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if handle < len(self._column):
                self._column[handle] = NO_PLACE

    def known(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """The handles that have a place, and their places."""
        column = np.frombuffer(self._column, np.uint32)
        handles = np.flatnonzero(column != NO_PLACE)
        return handles, column[handles]

    def _reach(self, handle: int) -> None:
        missing = handle + 1 - len(self._column)
        if missing > 0:
            self._column.frombytes(b"\xff" * (4 * max(missing, len(self._column) // 4)))


@dataclass(slots=True)
class Recalled:
    """A policy as it was when the last row was committed, in terms of handles that are not far apart.

    Those of then are, or they are numbered anew: they may be any u32, and a policy's columns are as long as its
    largest handle.
    """

    name: str
    policy: Policy
    namespaces: dict[int, bytes]  # fingerprints by the local ids of then
    handles: dict[int, int] | None = None  # ours, by those of then; None: they are the same
    places: Places = field(default_factory=Places)  # of residents
    ghosts: dict[int, Ghost] = field(default_factory=dict)

    def ours(self, then: Sequence[int]) -> Sequence[int]:
        """Our handles for those of then, new ones where there are none yet."""
        handles = self.handles
        if handles is None:
            return then
        return [handles.setdefault(handle, len(handles)) for handle in then]

    def known(self, then: int) -> int | None:
        """Our handle for one of then, if there is one."""
        if self.handles is None:
            return then if then >= 0 else None
        return self.handles.get(then)

    def note_ghosts(self, ghosts: Iterable[Ghost]) -> None:
        for ghost in ghosts:
            (handle,) = self.ours([ghost.handle])
            self.ghosts[handle] = ghost

    def forget_ghosts(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.ghosts.pop(handle, None)


def recall(rows: Mapping[bytes, bytes]) -> Recalled | None:
    """The policy that these rows describe; None if there is no snapshot that can be used."""
    try:
        number, snapshot = order_rows.decode_snapshot(rows)
        logs = list(order_rows.decode_logs(rows, number))
        ghosts = unpack_ghosts(bytes(snapshot.ghosts))
        recalled = _at_snapshot(snapshot, ghosts, dense=_are_dense(snapshot, ghosts, logs))
    except Exception:  # noqa: BLE001 -- a store may come from anywhere: what is wrong here costs order, no more
        return None
    for calls, namespaces in logs:
        try:
            recalled.namespaces |= namespaces
            for call in calls:
                _repeat(recalled, *call)
        except Exception:  # noqa: BLE001 -- as above
            return recalled if _is_whole(recalled.policy) else None
    return recalled


def _at_snapshot(snapshot: Snapshot, ghosts: Sequence[Ghost], dense: bool) -> Recalled:
    policy = POLICIES.make(snapshot.policy, snapshot.blocks)
    recalled = Recalled(snapshot.policy, policy, dict(snapshot.namespaces), None if dense else {})
    pairs = snapshot.places
    if not dense:
        pairs = np.stack((np.array(recalled.ours(pairs[:, 0].tolist()), np.uint32), pairs[:, 1]), axis=1)
    recalled.places.put_all(pairs)
    recalled.note_ghosts(ghosts)
    policy.restore(snapshot.state, recalled.handles)
    recalled.forget_ghosts(policy.forgotten())
    return recalled


def _are_dense(
    snapshot: Snapshot, ghosts: Sequence[Ghost], logs: Iterable[tuple[list[list[bytes]], dict[int, bytes]]]
) -> bool:
    """Whether a column that is as long as the largest handle would be hardly longer than needed."""
    largest = max((ghost.handle for ghost in ghosts), default=0)
    largest = max(largest, int(snapshot.places[:, 0].max(initial=0)))
    for calls, _ in logs:
        for call in calls:
            largest = max(largest, int(np.frombuffer(call[2], "<u4").max(initial=0)))
    return largest < 2 * (len(snapshot.places) + len(ghosts)) + _SPARE_HANDLES


def _is_whole(policy: Policy) -> bool:
    """Whether the policy can be used after a call that failed halfway, wherever it stopped."""
    try:
        policy.forgotten()
        return not policy.check()
    except Exception:  # noqa: BLE001 -- as above
        return False


def _repeat(recalled: Recalled, what: str, argument: int, handles: bytes, places: bytes, ghosts: bytes) -> None:
    """Tell the policy once more what it was told."""
    policy, named = recalled.policy, recalled.ours(array("I", handles))
    if what == EVICT:
        policy.evict(named, recalled.known(argument))
        recalled.places.clear(named)
        recalled.note_ghosts(unpack_ghosts(ghosts))
    elif what == FORGET:
        policy.forget(named)
        recalled.places.clear(named)
        recalled.forget_ghosts(named)
    elif what == RESIZE:
        policy.resize(argument)
    elif what == HINT:
        if isinstance(policy, SupportsHints):
            ended = Hint(ends=True, shared=argument == ENDS_SHARED)
            policy.hint(named, ended if argument < 0 else Hint(returns_in=argument))
    else:
        policy.touch(named, Access(what), argument)
        if places:
            recalled.places.put(named, array("I", places))
            recalled.forget_ghosts(named)
    recalled.forget_ghosts(policy.forgotten())


def todays_key(recalled: Recalled, ghost: Ghost, find: Callable[[bytes], int | None]) -> StoreKey | None:
    """A ghost's key under today's local namespace ids; None if nobody knows its namespace. `find`: by fingerprint."""
    namespace = find(recalled.namespaces.get(namespace_of(ghost.key), b""))
    return None if namespace is None else store_key(namespace, block_key_of(ghost.key))
