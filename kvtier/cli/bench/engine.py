"""What a whole cache costs beside the bytes it moves: its verbs, its opening, its way to disk and back, its RAM.

Owns no state; each part is measured in a module of its own, all in one temporary folder. Units: blocks.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier.cli.bench import memory, moves, opening, verbs, world
from kvtier.cli.bench.folder import scratch
from kvtier.cli.bench.report import Report

KEYS_MIN = 10_000  # fewer take less than what else changes in a process meanwhile
KEYS_SMALLER = 10  # RAM per key is measured at two sizes, for columns grow by doubling


@dataclass(frozen=True, slots=True)
class Sizes:
    """blocks: of a prompt that is looked up. store_blocks: in the store that is opened. keys: names in RAM.
    move_blocks: per flush and promotion."""

    blocks: int = 1000
    store_blocks: int = 10_000
    keys: int = 1_000_000
    move_blocks: int = 64
    rounds: int = 21


def measure(path: Path | None, sizes: Sizes) -> Report:
    """Measure everything. Raises UsageError if the disk cannot be measured. The folder used is gone afterwards."""
    report = Report("engine", asdict(sizes), path or Path.cwd())
    small_bytes = 3 * world.SMALL_BYTES * max(8 * sizes.blocks, sizes.store_blocks) + (256 << 20)
    with scratch(path, small_bytes + moves.disk_bytes(sizes.move_blocks, sizes.rounds)) as folder:
        report.costs += verbs.costs(folder, sizes.blocks, sizes.rounds)
        report.costs += opening.costs(folder, sizes.store_blocks, sizes.rounds)
        for keys in sorted({max(KEYS_MIN, sizes.keys // KEYS_SMALLER), sizes.keys}):
            report.costs.append(memory.key_cost(folder, keys))
        report.costs.append(memory.idle_cost(folder / "opening", sizes.store_blocks))
        report.races += moves.races(folder, sizes.move_blocks, sizes.rounds)
    report.notes.append(f"an idle cache's keys are counted with {memory.KEY_TARGET_BYTES:g} bytes each")
    report.notes.append("match, peek, commit and opening use blocks of one page: their cost is by block, not by byte")
    return report
