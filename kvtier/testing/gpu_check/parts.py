"""The parts by name, in the order in which they run, and how one is run in this process.

Owns no state. Always: whatever a part does, a record comes back; what it had measured until it failed is kept.
"""

import importlib
import time
from collections.abc import Mapping

from kvtier.errors import KvtierError
from kvtier.kernels.launch_device import Images
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.record import Record, Skip
from kvtier.testing.gpu_check.scale import Scale

PARTS: Mapping[str, str] = {
    "vmm": "what mapping and unmapping memory costs, idle and under load",
    "copies": "GB/s by block size and method, against the link's peak",
    "resize": "growing and shrinking under a live reader",
    "decode": "what demotion costs a decode loop",
    "attention": "paged attention against float64",
    "roundtrip": "down and back through a whole cache, into poisoned slots",
    "aliases": "one block in several ranges, read-only",
    "graphs": "CUDA graph replay over a block table",
    "engine": "a small engine on the card's tier",
    "managed": "a block manager's pages, down and back",
    "dlpack": "torch's views over partly mapped ranges",
    "sequence_views": "torch's attention over aliased ranges",
    "transformers": "generate() with slots beside the model",
}


def run_here(part: str, device: int, scale: Scale, images: Images | None = None) -> Record:
    """Run one part in this process. What goes wrong, whatever it is, becomes a finding."""
    record = Record(part)
    start = time.perf_counter()
    try:
        card = Card(device, scale, images)
        try:
            measure(part, card, record)
        finally:
            card.close()
    except Skip as reason:
        record.skipped = str(reason)
    except KvtierError as error:
        record.findings.append(f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001  other people's code runs here too, and the other parts go on
        record.findings.append(f"{type(error).__name__}: {error}")
    record.seconds = round(time.perf_counter() - start, 2)
    return record


def measure(part: str, card: Card, record: Record) -> None:
    """Let the part measure. Raises Skip, or what went wrong."""
    importlib.import_module(f"kvtier.testing.gpu_check.part_{part}").measure(card, record)
