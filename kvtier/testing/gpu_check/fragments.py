"""Blocks of a foreign layer-first cache, for part `copies`: each way of copying them, by the length of a fragment.

Owns no state. Finds: a way that gives other bytes than a batch of pieces, through poisoned destinations.
    pieces   a batch of copies, one for each fragment          direct   a kernel on the host's memory itself
    staged   a kernel, and one copy for each block
Measured by the run that each start makes (`tiers.foreign.calibration`), with its choice. Units: GB/s (10**9 bytes).
"""

from contextlib import ExitStack

from kvtier.clock import MonotonicClock
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.record import Record
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.calibration import TRIAL_BYTES, WAYS, Choice
from kvtier.tiers.foreign.methods import PIECES
from kvtier.tiers.foreign.opening import opened_on
from kvtier.tiers.foreign.places import HostPlaces
from kvtier.tiers.foreign.tensors import ForeignTensor
from kvtier.types import page_aligned

LAYERS = 16
LEFT_OUT = "is left out"


def measure_fragments(card: Card, record: Record) -> None:
    """Figures by fragment length and way, and from which length on pieces are chosen."""
    choices: dict[int, dict[str, Choice]] = {}
    for fragment_bytes in card.scale.fragment_bytes:
        choices[fragment_bytes] = _choices(card, fragment_bytes, record)
        for way, choice in choices[fragment_bytes].items():
            name = f"fragments of {fragment_bytes} bytes, {way}"
            record.measured(f"{name}, chosen", choice.method)
            for method, speed in choice.gigabytes_per_s.items():
                record.measured(f"{name}, {method}", speed, "GB/s")
    for way in WAYS:
        in_pieces = [length for length, both in choices.items() if both[way].method == PIECES]
        told = min(in_pieces) if in_pieces else "none that was tried"
        record.measured(
            f"fragments are copied in pieces from this length on, {way}", told, "bytes" if in_pieces else ""
        )


def _choices(card: Card, fragment_bytes: int, record: Record) -> dict[str, Choice]:
    block_bytes = 2 * LAYERS * fragment_bytes
    blocks = max(1, min(TRIAL_BYTES, card.scale.copy_bytes // 16) // block_bytes)
    layer_bytes, stride_bytes = 2 * blocks * fragment_bytes, page_aligned(block_bytes)
    notes: list[str] = []
    with ExitStack() as undo:
        memory = undo.enter_context(card.memory(LAYERS * layer_bytes))
        slots = undo.enter_context(card.pinned(stride_bytes))
        shape, strides = (2, blocks, fragment_bytes), (blocks * fragment_bytes, fragment_bytes, 1)
        layers = [ForeignTensor(memory + n * layer_bytes, shape, strides, 1, True) for n in range(LAYERS)]
        cache = ForeignCache.of(layers, blocks=blocks, block_axis=1)
        host = HostPlaces(slots.ctypes.data, stride_bytes, 1, 0, stride_bytes)
        copies = opened_on(
            card.driver, [cache], host, clock=MonotonicClock(), images=card.images, undo=undo, notes=notes
        )
        choices = {way: copies.choices[way, 0] for way in WAYS}
    for note in notes:
        if record.expect(LEFT_OUT not in note, f"fragments of {fragment_bytes} bytes: {note}"):
            record.notes.append(note)
    return choices
