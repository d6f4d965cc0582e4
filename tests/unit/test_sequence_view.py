"""`cache.sequence_view` on host memory: what a view shows, and that nobody writes through it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.cache.leases import Lease
from kvtier.errors import ClosedError
from kvtier.testing.fork import in_child
from tests.sequence_views import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    DIM,
    HEADS,
    LAYERS,
    cache,
    config_for,
    expected,
    keys_of,
    lease_of,
    same,
    values,
    write,
)

__all__ = ["cache"]


def test_two_sequences_share_a_prefix_and_see_what_is_written(cache: Any) -> None:
    """A sequence shows other tokens than its blocks hold, or a prefix is copied."""
    keys = keys_of(cache, 1, 5, shared=3)
    first = lease_of(cache, keys)
    write(cache, first)
    cache.commit(first, list(zip(first.slots(), keys.groups[0], strict=True)))
    second = lease_of(cache, keys_of(cache, 2, 6, shared=3))
    assert second.tokens_ready == 3 * BLOCK_TOKENS
    assert second.slots()[:3] == first.slots()[:3]
    views = [cache.sequence_view(lease) for lease in (first, second)]
    assert [(view.tokens, view.blocks, view.group) for view in views] == [(40, 5, 0), (48, 6, 0)]
    before = views[1].kv(1)["k"]
    write(cache, second, first=3)  # written after the view was made, and seen
    for lease, view in zip((first, second), views, strict=True):
        assert same(cache, lease, view)
        for name, array in view.kv(1).items():
            assert array.shape == (view.tokens, HEADS, DIM)
            assert array.strides == (BLOCK_BYTES // BLOCK_TOKENS, DIM * 4, 4)
            assert array[0, 0, 0] == values(first.slots()[0], 1, name)[0, 0, 0]
    assert np.array_equal(before, expected(cache, second, 1, "k"))
    assert views[0].address != views[1].address
    assert views[0].kv(0) is views[0].kv(0)  # a step asks for every layer


@pytest.mark.torch
def test_torchs_attention_over_a_view_is_that_over_a_copy_to_the_bit(cache: Any) -> None:
    """An engine that reads a view computes other logits than one that gathers the blocks."""
    torch = pytest.importorskip("torch")
    lease = lease_of(cache, keys_of(cache, 1, 9))
    rng = np.random.default_rng(0)
    for layer in range(LAYERS):
        for array in cache.kv(0, layer).values():
            array[:16] = rng.standard_normal((16, *array.shape[1:]), dtype=np.float32)
    view, layer, tokens = cache.sequence_view(lease), 1, 9 * BLOCK_TOKENS - 3
    attend = torch.nn.functional.scaled_dot_product_attention
    for queries in (1, 7):
        asked = torch.from_numpy(rng.standard_normal((1, HEADS, queries, DIM), dtype=np.float32))
        shown = [torch.from_dlpack(view.kv(layer)[n])[:tokens].permute(1, 0, 2)[None] for n in ("k", "v")]
        copied = [
            torch.from_dlpack(expected(cache, lease, layer, n))[:tokens].permute(1, 0, 2)[None] for n in ("k", "v")
        ]
        assert shown[0].data_ptr() == view.kv(layer)["k"].ctypes.data
        assert torch.equal(attend(asked, *shown), attend(asked, *copied))


def test_blocks_that_come_back_from_below_are_seen(tmp_path: Path) -> None:
    """A promoted prefix lies in other slots than the view maps."""
    disk = {"type": "lmdb", "path": str(tmp_path / "store"), "capacity": "16MiB"}
    with kvtier.open_sync(config_for(below=[disk], limits={"governor": False, "load_deadline": "60s"})) as cache:
        keys = keys_of(cache, 1, 4)
        lease = lease_of(cache, keys)
        write(cache, lease)
        wanted = [expected(cache, lease, 0, "v"), expected(cache, lease, 1, "k")]
        cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True)))
        cache.release(lease)
        assert cache.flush().failed == 0
        cache.release(lease_of(cache, keys_of(cache, 2, 15)))  # takes all slots
        back = lease_of(cache, keys)
        assert (back.tokens_ready, back.tiers["gpu"]) == (4 * BLOCK_TOKENS, 0)
        view = cache.sequence_view(back)
        assert np.array_equal(view.kv(0)["v"], wanted[0])
        assert np.array_equal(view.kv(1)["k"], wanted[1])


def test_asyncio_callers_have_them_too() -> None:
    """The asyncio cache has no views."""

    async def run() -> None:
        async with kvtier.open(config_for()) as cache:
            lease = await cache.reserve(cache.match(keys_of(cache, 1, 3), "req"), 3)
            assert isinstance(lease, Lease)
            view = cache.sequence_view(lease)
            write(cache, lease)
            assert same(cache, lease, view)
            cache.release(lease)

    asyncio.run(run())


def test_an_array_of_a_view_refuses_to_be_written(cache: Any) -> None:
    """A reader changes a prefix that others share, or dies of trying."""
    view = cache.sequence_view(lease_of(cache, keys_of(cache, 1, 2)))
    with pytest.raises(ValueError, match="read-only"):
        view.kv(0)["k"][0] = 1


WRITING = """
import ctypes, sys
from tests.sequence_views import *
with kvtier.open_sync(config_for()) as cache:
    lease = lease_of(cache, keys_of(cache, 1, 2))
    view = cache.sequence_view(lease)
    assert ctypes.string_at(view.address, 4) == bytes(4)
    print("read", flush=True)
    ctypes.memset(view.address, 1, 4)
"""


def test_memory_of_a_view_cannot_be_written() -> None:
    """Code that is no Python writes through a view into a prefix that others share."""
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", WRITING], cwd=root, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.returncode) == ("read\n", -11), ended.stderr


def test_a_forked_child_is_refused(cache: Any) -> None:
    """A child ends its parent's views."""
    lease = lease_of(cache, keys_of(cache, 1, 2))
    write(cache, lease)
    view = cache.sequence_view(lease)

    def child() -> int:
        refused = 0
        for call in (lambda: view.kv(0), view.close, lambda: cache.sequence_view(lease)):
            try:
                call()
            except ClosedError:
                refused += 1
        return refused

    assert in_child(child) == 3
    assert same(cache, lease, view)
