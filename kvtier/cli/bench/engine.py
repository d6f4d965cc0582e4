"""What a whole cache costs beside the bytes it moves: its verbs, its opening, its way to disk and back, its RAM.

Owns no state; each part is measured in a module of its own, in a folder that goes before the next one begins.
Units: blocks, bytes.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier.cli.bench import memory, moves, opening, verbs
from kvtier.cli.bench.folder import emptied, scratch
from kvtier.cli.bench.progress import Begin, silent
from kvtier.cli.bench.report import Cost, Report

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


def measure(path: Path | None, sizes: Sizes, begin: Begin = silent) -> Report:
    """Measure everything. Raises UsageError if the disk cannot be measured. The folder used is gone afterwards."""
    report = Report("engine", asdict(sizes), path or Path.cwd())
    with scratch(path, disk_bytes(sizes)) as folder:
        with emptied(folder / "verbs") as part:
            report.costs += verbs.costs(part, sizes.blocks, sizes.rounds, begin)
        with emptied(folder / "opening") as part:
            report.costs += opening.costs(part, sizes.store_blocks, sizes.rounds, begin)
            report.costs += _of_memory(part, sizes, begin)
        with emptied(folder / "moves") as part:
            report.races += moves.races(part, sizes.move_blocks, sizes.rounds, begin)
    report.notes.append(f"an idle cache's keys are counted with {memory.KEY_TARGET_BYTES:g} bytes each")
    report.notes.append("match, peek, commit and opening use blocks of one page: their cost is by block, not by byte")
    return report


def disk_bytes(sizes: Sizes) -> int:
    """What the part takes that takes most."""
    return max(
        verbs.disk_bytes(sizes.blocks, sizes.rounds),
        opening.disk_bytes(sizes.store_blocks),
        moves.disk_bytes(sizes.move_blocks, sizes.rounds),
    )


def _of_memory(folder: Path, sizes: Sizes, begin: Begin) -> list[Cost]:
    """What keys take, and a cache over the store that was opened."""
    numbers = sorted({max(KEYS_MIN, sizes.keys // KEYS_SMALLER), sizes.keys})
    step = begin("measuring RAM", len(numbers) + 1)
    found = []
    for keys in numbers:
        found.append(memory.key_cost(folder, keys))
        step()
    found.append(memory.idle_cost(folder / "store", sizes.store_blocks))
    step()
    return found
