"""Cold gets: whole batches against raw reads, verified or not, one or four at once; and blocks from all over.

O_DIRECT reads are cold; of an inline store the page cache is emptied before each. Bytes read are the kernel's count of
what this process had fetched from disks (`process_io`). Units: blocks, bytes.
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvtier.cli.bench.nvme.plan import Plan
from kvtier.cli.bench.nvme.process_io import process_bytes
from kvtier.cli.bench.nvme.puts import INLINE, RAW, Stand
from kvtier.cli.bench.nvme.rivals import RawRing
from kvtier.cli.bench.nvme.store_ring import StoreRing
from kvtier.cli.bench.report import OURS, Race
from kvtier.cli.bench.timing import Timed, interleave, prepared, speed_ratio

RAW_DEEP = "raw, 4 threads"
UNVERIFIED = "not verifying"
DEPTH = 4  # threads of a store for large blocks, and batches that the engine reads at once

Move = Callable[[], object]


def whole_batches(folder: Path, plan: Plan, stand: Stand, undo: ExitStack) -> tuple[Race, dict[str, float]]:
    """One batch that was put together, and four of them."""
    batches = DEPTH + 1
    shape, buffers = stand.shape, stand.buffers
    options = {"durability": plan.durability, "verify": False}
    unverified = StoreRing(folder / "unverified", shape, batches, buffers, undo, **options)  # type: ignore[arg-type]
    deep = RawRing(folder / "raw_deep", shape, stand.batches, DEPTH, buffers, undo)
    for ring in (unverified, deep):
        ring.fill()
    at_once = min(DEPTH, stand.batches)
    contestants = {
        OURS: prepared(stand.store.get),
        UNVERIFIED: prepared(unverified.get),
        RAW_DEEP: prepared(deep.get),
        RAW: prepared(stand.raw.get),
        "at once": prepared(lambda: stand.store.get_at_once(at_once)),
    }
    timed = interleave(contestants, plan.rounds)
    four = timed.pop("at once")
    race = Race("get, one batch", shape.blocks, shape.block_bytes, timed)
    figures = {
        "get_2m_vs_raw": speed_ratio(timed[OURS], timed[RAW_DEEP]),
        "verify_ratio": speed_ratio(timed[OURS], timed[UNVERIFIED]),
        "four_in_flight_vs_one": at_once * speed_ratio(four, timed[OURS]),
    }
    return race, figures


def scattered(plan: Plan, stand: Stand) -> tuple[Race, dict[str, float]]:
    """As many blocks as a batch has, from all over the store: a prefetch of many prefixes."""
    read_bytes: list[int] = []
    contestants = {
        OURS: prepared(lambda: counted(stand.store.get_scattered(), read_bytes)),
        INLINE: prepared(stand.inline.get_scattered_cold),
        RAW: prepared(stand.raw.get_scattered),
    }
    timed: dict[str, Timed] = interleave(contestants, plan.rounds)
    useful_bytes = stand.shape.blocks * stand.shape.block_bytes
    race = Race("get, scattered", stand.shape.blocks, stand.shape.block_bytes, timed)
    figures = {
        "sparse_read_amplification": statistics.median(read_bytes) / useful_bytes,
        "sparse_vs_inline": speed_ratio(timed[OURS], timed[INLINE]),
    }
    return race, figures


def counted(move: Move, read_bytes: list[int]) -> Move:
    """The same move, that notes what was read for it."""

    def counting() -> None:
        before = process_bytes("read_bytes")
        move()
        read_bytes.append(process_bytes("read_bytes") - before)

    return counting
