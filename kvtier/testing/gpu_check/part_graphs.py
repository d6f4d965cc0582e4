"""Part `graphs`: a captured CUDA graph of paged attention, replayed while its block table changes under it.

Owns no state. Finds: a replay that differs by one bit from the same kernels launched one by one; a replay that does not
see memory that was mapped after the capture. No torch is needed.
"""

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from kvtier.allocator.vmm import Arena
from kvtier.testing.gpu_check.card import Card, Desk
from kvtier.testing.gpu_check.paged import POISON, Placed, Problem, problem
from kvtier.testing.gpu_check.record import Record, Skip

GRAPHS_SINCE = 10010  # of CUDA
ONE_BY_ONE, REPLAYED = "launched one by one", "replayed"


def measure(card: Card, record: Record) -> None:
    if card.calls.pointer("cuGraphLaunch", GRAPHS_SINCE) is None:
        raise Skip("this driver has no CUDA graphs")
    scale = card.scale
    question = problem(4, "bfloat16", scale.heads, scale.decode_head_dim, [scale.kv_tokens] * scale.sequences)
    slots, slot_bytes = len(question.pool), question.pool[0].nbytes
    with ExitStack() as lent:
        arena = Arena(card.driver, stride_bytes=slot_bytes, slots_reserved=2 * slots)
        lent.callback(arena.close)
        arena.grow(slots * slot_bytes)
        lent.callback(card.streams.finish, card.stream)
        card.put(arena.address, question.pool)
        desk = lent.enter_context(card.memory(question.desk_bytes))
        placed = Placed(card, question, arena.address, Desk(card, desk, question.desk_bytes))
        placed.run()
        card.streams.finish(card.stream)
        wanted = placed.result()
        graph = lent.enter_context(_captured(card, placed))

        def replay() -> None:
            card.calls("cuGraphLaunch", graph, card.stream.key)

        replay()
        card.streams.finish(card.stream)
        record.expect(np.array_equal(placed.result(), wanted), "a replay gives other results than its launches")
        _move_blocks(card, arena, question, placed)
        replay()
        card.streams.finish(card.stream)
        moved = placed.result()
        record.expect(np.array_equal(moved, wanted), "a replay does not follow its block table to newly mapped slots")
        for name, work in ((ONE_BY_ONE, placed.run), (REPLAYED, replay)):
            times = [card.milliseconds(work) for _ in range(scale.rounds)]
            record.measured(f"a decode step, {name}", statistics.median(times) * 1e3, "us")


def _move_blocks(card: Card, arena: Arena, question: Problem, placed: Placed) -> None:
    """All blocks go into slots that are mapped only now, and the table follows; where they were there is poison."""
    slots, slot_bytes = len(question.pool), question.pool[0].nbytes
    arena.grow(arena.geometry.granules * card.driver.granule_bytes - arena.mapped_bytes)
    card.put(arena.address + slots * slot_bytes, question.pool)
    card.fill(arena.address, POISON, slots * slot_bytes)
    card.put(placed.tables, question.batch.tables + np.int32(slots))


@contextmanager
def _captured(card: Card, placed: Placed) -> Iterator[int]:
    """The graph of one run, ready to be launched."""
    calls, key = card.calls, card.stream.key
    mode = calls.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    calls("cuStreamBeginCapture", key, mode)
    placed.run()
    graph = calls("cuStreamEndCapture", key)
    ready = calls("cuGraphInstantiate", graph, 0)
    try:
        yield ready
    finally:
        card.streams.finish(card.stream)
        calls("cuGraphExecDestroy", ready)
        calls("cuGraphDestroy", graph)
