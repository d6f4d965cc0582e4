"""What a persistent tier has kept comes into the directory at start, in the order in which it would have left.

Owns nothing. Always: every block found is a READY copy afterwards; those whose place in the order is known (see
`order_log`) have it again, and the others follow in the order of their writing, as the newest.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import groupby

from kvtier.cache.order_replay import Recalled, recall, todays_key
from kvtier.cache.residency import Residency
from kvtier.policies.base import Access, Policy
from kvtier.types import StoredBlock


def adopt(residency: Residency, tier: int, blocks: Iterable[StoredBlock], rows: Mapping[bytes, bytes]) -> None:
    """Take over a tier's blocks, oldest write first, and the order in the tier's sidecar `rows`."""
    directory, order = residency.directory, residency.orders[tier]
    handles = directory.enroll(tier, blocks)
    recalled = recall(rows)
    known = set() if recalled is None else _reinstate(residency, tier, handles, recalled)
    order.found(rows)
    unknown = (handle for handle in handles if handle not in known)
    for size_class, alike in groupby(unknown, key=partial(_size_class, residency, tier)):
        order.touch(list(alike), Access.FILL, size_class)
    residency.retire_ghosts(order)


def _reinstate(residency: Residency, tier: int, handles: list[int], recalled: Recalled) -> set[int]:
    """Give the tier's policy the order of the recalled one; returns the residents that have it."""
    directory, order = residency.directory, residency.orders[tier]
    handle_at = {directory.place(handle, tier): handle for handle in handles}
    owner_of = {place: then for then, place in recalled.places.items()}  # one of two, should the log be broken
    found = {then: handle_at[place] for place, then in owner_of.items() if place in handle_at}
    renamed = _of_their_size(residency, tier, recalled.policy, found)
    if recalled.name != order.name:  # another policy takes over the order alone
        leaving = recalled.policy.candidates(len(recalled.policy))
        for handle in (renamed[then] for then in leaving if then in renamed):
            order.touch([handle], Access.FILL, _size_class(residency, tier, handle))
        return set(renamed.values())
    ghosts = _ghosts(residency, recalled)
    residents = set(renamed.values())
    renamed |= {then: handle for then, handle in ghosts.items() if handle not in residents}
    try:
        order.restore(recalled.policy.snapshot(), renamed)
    except ValueError:
        return set()
    finally:
        for handle in ghosts.values():
            residency.retire_unless_known(handle)
    return {handle for handle in residents if order.remembers(handle)} - set(order.ghosts())


def _size_class(residency: Residency, tier: int, handle: int) -> int:
    directory = residency.directory
    return residency.levels[tier].size_class_at(directory.place(handle, tier), directory.length_bytes(handle))


def _of_their_size(residency: Residency, tier: int, policy: Policy, found: Mapping[int, int]) -> dict[int, int]:
    """Those residents of then at whose place a block of the same size lies now.

    The last rows of the order may be missing, and a place have gone to another size since: who looks for room of that
    size would never find the block in the size class of its forerunner.
    """
    size_of = {then: _size_class(residency, tier, handle) for then, handle in found.items()}
    alike = {then for size in {*size_of.values()} for then in _members(policy, size) if size_of.get(then) == size}
    return {then: handle for then, handle in found.items() if then in alike}


def _members(policy: Policy, size: int) -> list[int]:
    """All residents of a size class; `candidates` gives so many or none."""
    least, most = 0, len(policy)
    members = policy.candidates(most, (), size)  # nearly always: there is one size
    while not members and least < most:
        middle = (least + most + 1) // 2
        if policy.candidates(middle, (), size):
            least = middle
        else:
            most = middle - 1
    return members or policy.candidates(least, (), size)


def _ghosts(residency: Residency, recalled: Recalled) -> dict[int, int]:
    """Handles of now for the ghosts of then."""
    found = {}
    for then, ghost in recalled.ghosts.items():
        key = todays_key(recalled, ghost, residency.namespaces.find)
        if key is not None:
            found[then] = residency.directory.admit(key, ghost.length_bytes)
    return found
