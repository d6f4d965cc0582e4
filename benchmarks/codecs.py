"""How fast the CPU codes and decodes blocks, against a memcpy of the same blocks in the same run, and what it gains.

    python benchmarks/codecs.py [--blocks 8] [--block-bytes 368640] [--rounds 15] [--json]

GB are those of the blocks as attention reads them. The values are like a model's keys: normally distributed, each
channel with a spread of its own, some of them twenty times that of others. One thread; numpy does the work.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import movement_program
import numpy as np
from numpy.typing import NDArray

from kvtier.blocks.coding import CODECS, FLOATS, Coding
from kvtier.cli.bench.report import OURS, Cost, Race, Report
from kvtier.cli.bench.timing import interleave, plain
from kvtier.errors import UsageError
from kvtier.kernels.block_coder import BlockCoder
from kvtier.kernels.floats import float_to_bfloat16

NAME = "codecs"
ROW_VALUES = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    blocks: int = field(default=8, metadata={"help": "of a batch"})
    block_bytes: int = field(default=368_640, metadata={"help": "of a block, whole rows of 64 values"})
    rounds: int = field(default=15, metadata={"help": "timed, after one that is not"})


def disk_bytes(sizes: Sizes) -> int:
    """What it writes to a disk."""
    return 0


def measure(report: Report, sizes: Sizes, folder: Path) -> None:
    """Each codec with each dtype that it codes."""
    if sizes.block_bytes % (ROW_VALUES * 4):
        raise UsageError(f"--block-bytes {sizes.block_bytes}: use a multiple of {ROW_VALUES * 4}, whole rows")
    for dtype in FLOATS:
        raw = blocks_of(dtype, sizes)
        for codec in CODECS[1:]:
            coding = Coding(codec, dtype, ROW_VALUES)
            if not coding.codes(sizes.block_bytes):
                report.notes.append(f"{codec} of {dtype}: saves no page of such a block")
                continue
            report.races += races(coding, raw, sizes, report)


def blocks_of(dtype: str, sizes: Sizes) -> NDArray[np.uint8]:
    """[blocks, block bytes]."""
    rng, item_bytes = np.random.default_rng(0), FLOATS[dtype][0]
    rows = sizes.blocks * sizes.block_bytes // (ROW_VALUES * item_bytes)
    spreads = np.exp(rng.normal(0, 0.75, ROW_VALUES))
    values = (rng.standard_normal((rows, ROW_VALUES)) * spreads).astype(np.float32)
    bits = float_to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
    return bits.view(np.uint8).reshape(sizes.blocks, sizes.block_bytes)


def races(coding: Coding, raw: NDArray[np.uint8], sizes: Sizes, report: Report) -> Iterator[Race]:
    """Both directions; what the codec gains becomes a cost of the report."""
    coder, blocks, raw_bytes = BlockCoder(), *raw.shape
    coded = np.zeros((blocks, coding.room_bytes(raw_bytes)), np.uint8)
    back, copied = np.zeros_like(raw), np.zeros_like(raw)
    lengths = coder.encode(coding, raw, coded)
    pieces = [row[:length] for row, length in zip(coded, lengths, strict=True)]
    what = f"{coding.codec} of {coding.dtype}"
    report.costs.append(Cost(f"{what}: times smaller", "x", [raw_bytes / length for length in lengths if length]))
    moves: dict[str, Any] = {
        "encode": lambda: coder.encode(coding, raw, coded),
        "decode": lambda: coder.decode(coding, pieces, back),
    }
    for direction, move in moves.items():
        timed = interleave({OURS: plain(move), "memcpy": plain(lambda: np.copyto(copied, raw))}, sizes.rounds)
        yield Race(f"{direction} {what}", blocks, raw_bytes, timed)


if __name__ == "__main__":
    movement_program.main(__name__)
