"""Ghosts in the rows of an order: what is packed comes back, in whichever way it was packed."""

import random

import numpy as np
import pytest

from kvtier.cache.directory import Directory
from kvtier.cache.order_ghosts import PACKED_AT_ONCE, Ghost, PackedGhosts, unpack_ghosts
from kvtier.cache.order_log import OrderLog
from kvtier.cache.order_rows import decode_snapshot
from kvtier.policies.arc import ARC
from kvtier.policies.base import Access
from kvtier.types import PAGE_BYTES, block_key, store_key


def ghosts_of(key_bytes: list[int], namespaces: int) -> list[Ghost]:
    rng = random.Random(len(key_bytes))
    keys = [store_key(rng.randrange(namespaces), block_key(rng.randbytes(size), 1)) for size in key_bytes]
    return [Ghost(rng.randrange(2**31), rng.randrange(1, 2**32), key) for key in keys]


def packed(ghosts: list[Ghost], at_once: int) -> PackedGhosts:
    all_of_them = PackedGhosts()
    for start in range(0, len(ghosts), at_once):
        some = ghosts[start : start + at_once]
        lengths = np.array([ghost.length_bytes for ghost in some], np.uint32)
        all_of_them.add([ghost.handle for ghost in some], lengths, [ghost.key for ghost in some])
    return all_of_them


@pytest.mark.parametrize("key_bytes", [[32] * 100, [16] * 100, [32, 16] * 50, [64], []], ids=str)
def test_many_at_once_are_packed_like_one_after_the_other(key_bytes: list[int]) -> None:
    """What a long batch writes down reads as other blocks, or a namespace has no fingerprint after a restart."""
    ghosts = ghosts_of(key_bytes, namespaces=300)
    one_by_one = packed(ghosts, 1)
    together = packed(ghosts, 100)
    assert unpack_ghosts(bytes(one_by_one)) == unpack_ghosts(bytes(together)) == ghosts
    assert one_by_one.namespaces == together.namespaces == {int.from_bytes(ghost.key[:4], "big") for ghost in ghosts}
    assert len(one_by_one) == len(together) == len(ghosts)


def test_a_snapshot_has_every_ghost_once() -> None:
    """Ghosts beyond the first thousand have no name after a restart, so that their return is not seen."""
    blocks = PACKED_AT_ONCE + 100
    directory = Directory(1, persistent=(0,))
    order = OrderLog(ARC(blocks), "arc", blocks, directory, 0, lambda namespace: bytes([namespace]) * 32)
    keys = [ghost.key for ghost in ghosts_of([32] * blocks, namespaces=3)]
    handles = [directory.admit(key, PAGE_BYTES + at) for at, key in enumerate(keys)]
    random.Random(1).shuffle(handles)
    order.touch(handles, Access.FILL, PAGE_BYTES)
    order.touch(handles, Access.REUSE)
    order.evict(handles)
    rows = {key: row for key, row in order.piece().items() if row is not None}
    _, snapshot = decode_snapshot(rows)
    ghosts = unpack_ghosts(bytes(snapshot.ghosts))
    assert {ghost.handle: (ghost.key, ghost.length_bytes) for ghost in ghosts} == {
        handle: (directory.key(handle), directory.length_bytes(handle)) for handle in handles
    }
    assert len(ghosts) == blocks == len(snapshot.ghosts)
    assert snapshot.namespaces == {namespace: bytes([namespace]) * 32 for namespace in range(3)}
