"""Builds a persistent tier's policy again after a restart, from the rows that `OrderLog` left (`order_rows`).

Owns nothing. The policy of then comes back under the handles of then, by its snapshot and by the calls noted since;
`adoption` gives its members the handles of now. Always: damage costs order and never more: the log is used up to the
first row that is not whole.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvtier.cache import order_rows
from kvtier.cache.order_log import EVICT, FORGET, RESIZE
from kvtier.cache.order_rows import Ghost
from kvtier.policies import POLICIES
from kvtier.policies.base import Access, Policy
from kvtier.types import StoreKey, block_key_of, namespace_of, store_key


@dataclass(slots=True)
class Recalled:
    """A policy as it was when the last row was committed, in terms of handles of its own: 0, 1, 2 ...

    Those of then may be any u32, and a policy's columns are as long as its largest handle.
    """

    name: str
    policy: Policy
    places: dict[int, int]  # of residents
    ghosts: dict[int, Ghost]
    namespaces: dict[int, bytes]  # fingerprints by the local ids of then
    handles: dict[int, int]  # ours, by those of then

    def ours(self, then: Iterable[int]) -> list[int]:
        """Our handles for those of then, new ones where there are none yet."""
        handles = self.handles
        return [handles.setdefault(handle, len(handles)) for handle in then]

    def note_ghosts(self, ghosts: Iterable[Ghost]) -> None:
        for ghost in ghosts:
            (handle,) = self.ours([ghost.handle])
            self.ghosts[handle] = ghost


def recall(rows: Mapping[bytes, bytes]) -> Recalled | None:
    """The policy that these rows describe; None if there is no snapshot that can be used."""
    try:
        number, snapshot = order_rows.decode_snapshot(rows)
        policy = POLICIES.get(snapshot.policy)(snapshot.blocks)
        recalled = Recalled(snapshot.policy, policy, {}, {}, dict(snapshot.namespaces), {})
        recalled.places = dict(zip(recalled.ours(snapshot.places), snapshot.places.values(), strict=True))
        recalled.note_ghosts(snapshot.ghosts)
        policy.restore(snapshot.state, recalled.handles)
    except Exception:  # noqa: BLE001 -- a store may come from anywhere: what is wrong here costs order, no more
        return None
    for calls, namespaces in order_rows.decode_logs(rows, number):
        try:
            recalled.namespaces |= namespaces
            for call in calls:
                _repeat(recalled, *call)
        except Exception:  # noqa: BLE001 -- as above
            break
    return recalled


def _repeat(recalled: Recalled, what: str, argument: int, handles: bytes, places: bytes, ghosts: bytes) -> None:
    """Tell the policy once more what it was told."""
    policy, named = recalled.policy, recalled.ours(array("I", handles))
    if what == EVICT:
        policy.evict(named, recalled.handles.get(argument))
        for handle in named:
            recalled.places.pop(handle, None)
        recalled.note_ghosts(order_rows.unpack_ghosts(ghosts))
    elif what == FORGET:
        policy.forget(named)
        for handle in named:
            recalled.places.pop(handle, None)
            recalled.ghosts.pop(handle, None)
    elif what == RESIZE:
        policy.resize(argument)
    else:
        policy.touch(named, Access(what), argument)
        recalled.places.update(zip(named, array("I", places), strict=bool(places)))
    for handle in (*policy.forgotten(), *(named if places else ())):
        recalled.ghosts.pop(handle, None)


def todays_key(recalled: Recalled, ghost: Ghost, find: Callable[[bytes], int | None]) -> StoreKey | None:
    """A ghost's key under today's local namespace ids; None if nobody knows its namespace. `find`: by fingerprint."""
    namespace = find(recalled.namespaces.get(namespace_of(ghost.key), b""))
    return None if namespace is None else store_key(namespace, block_key_of(ghost.key))
