"""What `kvtier bench nvme` compares a store with does the work that it is praised for."""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.cli.bench.nvme import rivals
from kvtier.cli.bench.nvme.buffers import Buffers
from kvtier.cli.bench.nvme.plan import Plan, Shape

SHAPE = Shape(6000, 5)  # not of whole pages


def test_files_are_synced_named_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rival would be slower for work that is not needed, or faster for leaving some out."""
    calls: Counter[str] = Counter()
    for inner in (os.fdatasync, os.fsync):

        def counting(fd: int, inner: Callable[[int], None] = inner) -> None:
            calls[inner.__name__] += 1
            inner(fd)

        monkeypatch.setattr(os, inner.__name__, counting)
    with ExitStack() as undo:
        buffers = Buffers(SHAPE, undo)
        known = {bytes(view[: SHAPE.block_bytes]) for view in buffers.views(4)}
        ring = rivals.FileRing(tmp_path / "files", SHAPE, 2, buffers, undo)
        ring.fill()
        assert calls == {"fdatasync": 3 * SHAPE.blocks, "fsync": 3 * SHAPE.blocks}  # every file in a folder of its own
        before = files(tmp_path)
        ring.put()()
    after = files(tmp_path)
    assert len(before) == len(after) == 2 * SHAPE.blocks
    assert len(before & after) == SHAPE.blocks
    assert {file.read_bytes() for file in after} <= known


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_a_raw_ring_writes_over_its_oldest_batch(tmp_path: Path) -> None:
    """The raw file would grow for ever, or only one batch of it would be used."""
    with ExitStack() as undo:
        buffers = Buffers(SHAPE, undo)
        try:
            ring = rivals.RawRing(tmp_path / "raw", SHAPE, 3, 1, buffers, undo)
        except OSError as error:
            pytest.skip(f"no O_DIRECT here: {error}")
        ring.fill()
        before = batches(tmp_path / "raw")
        ring.put()()
        after = batches(tmp_path / "raw")
        ring.get()()
        ring.get_scattered()()
    assert len(before) == len(after) == 3
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, True]
    assert all(any(batch) for batch in before)


def batches(path: Path) -> list[bytes]:
    content = path.read_bytes()
    return [content[first : first + SHAPE.batch_bytes] for first in range(0, len(content), SHAPE.batch_bytes)]


def test_views_are_whole_slots_and_different_ones() -> None:
    """Two blocks of a batch would share memory, which is cached."""
    with ExitStack() as undo:
        views = Buffers(SHAPE, undo).views(4)
        assert len(views) == 20
        assert {len(view) for view in views} == {8192}
        assert len({bytes(view) for view in views}) == 20
        assert not any(any(view[SHAPE.block_bytes :]) for view in views)
        del views


def test_rings_are_as_large_as_planned() -> None:
    """A ring that fits into a drive's cache would be fast."""
    plan = Plan()
    for shape in (plan.small, plan.middle, plan.large):
        ring_bytes = plan.ring_batches(shape) * shape.batch_bytes
        assert plan.ring_bytes - shape.batch_bytes < ring_bytes <= plan.ring_bytes
