"""What a persistent tier has kept comes into the directory at start, in the order in which it would have left.

Owns nothing. Always: every block found is a READY copy afterwards; those whose place in the order is known (see
`order_log`) have it again, and the others follow in the order of their writing, as the newest. The policy that
`order_replay` gives stays as it is: its blocks get the handles by which it knows them.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvtier.cache.order_replay import Recalled, recall, todays_key
from kvtier.cache.residency import Residency
from kvtier.cache.stored import StoredBlocks
from kvtier.policies.base import Access, Policy, SupportsSizes
from kvtier.types import StoredBlock, StoreKey

Handles = NDArray[np.int64]


def adopt(residency: Residency, tier: int, blocks: Iterable[StoredBlock], rows: Mapping[bytes, bytes]) -> None:
    """Take over a tier's blocks, oldest write first, and the order in the tier's sidecar `rows`."""
    directory, order = residency.directory, residency.orders[tier]
    stored = StoredBlocks.of(blocks)
    sizes = stored.strides
    recalled = recall(rows)
    handles = np.full(len(stored), -1, np.int64)  # of the blocks whose place in the order is known
    ghosts: dict[int, tuple[StoreKey, int]] = {}
    if recalled is not None:
        handles = _reinstated(recalled.policy, stored.places, sizes, *recalled.places.known())
        if recalled.name == order.name:
            ghosts = _ghosts(residency, recalled, handles)
    known = handles >= 0
    back = _number_those_back(stored, handles, ghosts)
    _number_others(handles, ghosts)
    refused = directory.enroll(tier, stored, handles, ghosts)
    if recalled is not None and recalled.name == order.name:
        _forget_all_but(recalled.policy, handles[known], back | ghosts.keys() - refused)
        order.take_over(recalled.policy)
    elif recalled is not None:  # another policy takes over the order alone
        size_of = dict(zip(handles[known].tolist(), sizes[known].tolist(), strict=True))
        leaving = [handle for handle in recalled.policy.candidates(len(recalled.policy)) if handle in size_of]
        _enter(order, leaving, [size_of[handle] for handle in leaving])
    order.found(rows)
    _enter(order, handles[~known].tolist(), sizes[~known].tolist())
    residency.retire_ghosts(order)
    for handle in [ghost for ghost in ghosts if not order.remembers(ghost)]:
        residency.retire_unless_known(handle)


def _reinstated(
    policy: Policy, now: NDArray[np.uint32], sizes: NDArray[np.int64], known: Handles, places: NDArray[np.uint32]
) -> Handles:
    """For each block the handle by which the policy knows it as resident, -1 for those that it does not know.

    now, sizes: places and size classes of the blocks. known, places: handles and where their blocks lay. The last rows
    of the order may be missing, and a place have gone to a block of another size since: who looks for room of that size
    would never find it in the size class of its forerunner. Should the log be broken, one place may have two handles:
    the higher one counts.
    """
    handles = np.full(len(now), -1, np.int64)
    order = np.argsort(places, kind="stable")
    at = np.searchsorted(places, now, side="right", sorter=order) - 1
    met = np.flatnonzero(at >= 0)
    met = met[places[order[at[met]]] == now[met]]
    then = known[order[at[met]]]
    alike = _are_of_size(policy, then, sizes[met])
    handles[met[alike]] = then[alike]
    return handles


def _are_of_size(policy: Policy, handles: Handles, sizes: Handles) -> NDArray[np.bool_]:
    """Which of these are residents of the size class sizes[i]."""
    if isinstance(policy, SupportsSizes):
        alike: NDArray[np.bool_] = policy.sizes_of(handles) == sizes
        return alike
    members = {(handle, size) for size in np.unique(sizes).tolist() for handle in _members(policy, size)}
    return np.array([pair in members for pair in zip(handles.tolist(), sizes.tolist(), strict=True)], np.bool_)


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


def _number_those_back(stored: StoredBlocks, handles: Handles, ghosts: Mapping[int, tuple[StoreKey, int]]) -> set[int]:
    """Give blocks that the policy knows as ghosts only those handles: their entry is a return. Which are these?"""
    ghost_of = {key: ghost for ghost, (key, _) in ghosts.items()}
    back = set()
    if ghost_of:
        for row in np.flatnonzero(handles < 0).tolist():
            if (ghost := ghost_of.get(stored.keys[row])) is not None:
                handles[row] = ghost
                back.add(ghost)
    return back


def _number_others(handles: Handles, ghosts: Iterable[int]) -> None:
    """Give those that have none (-1) the lowest handles that neither blocks nor ghosts have."""
    used = np.zeros(max(int(handles.max(initial=-1)), max(ghosts, default=-1)) + 1 + len(handles), np.bool_)
    used[handles[handles >= 0]] = True
    used[list(ghosts)] = True
    others = np.flatnonzero(handles < 0)
    handles[others] = np.flatnonzero(~used)[: len(others)]


def _forget_all_but(policy: Policy, residents: Handles, ghosts: Iterable[int]) -> None:
    """What the policy knows besides is not there any more."""
    if len(policy) != len(residents):
        there = set(residents.tolist())
        policy.forget([handle for handle in policy.candidates(len(policy)) if handle not in there])
    named = set(ghosts)
    policy.forget([ghost for ghost in policy.ghosts() if ghost not in named])


def _enter(order: Policy, handles: Iterable[int], sizes: Iterable[int]) -> None:
    for size_class, alike in groupby(zip(handles, sizes, strict=True), key=itemgetter(1)):
        order.touch([handle for handle, _ in alike], Access.FILL, size_class)


def _ghosts(residency: Residency, recalled: Recalled, residents: Handles) -> dict[int, tuple[StoreKey, int]]:
    """Key of now and length of each ghost whose namespace somebody knows."""
    found = {}
    there = set(residents.tolist()) if recalled.ghosts else set()
    for handle, ghost in recalled.ghosts.items():
        key = todays_key(recalled, ghost, residency.namespaces.find)
        if key is not None and handle not in there:
            found[handle] = key, ghost.length_bytes
    return found
