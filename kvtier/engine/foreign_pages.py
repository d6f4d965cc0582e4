"""ForeignPages: the copying between a foreign engine's cache, layer by layer on a device, and slots of pinned memory.

This is all that an adapter for an engine with its own GPU cache needs on the workers' side: it hands in where its
tensors lie, an event behind the kernels of each step, and moves; it gets an event to wait for and, later, an outcome
for every block. A `Mover`: a manager's pages may be such tensors, too.

Owns: the moves under way, by direction in their order. Always: a move is answered once, when nothing of it is under way
any more; no call waits but `join` and `close`; a device that fails is an outcome.
Units: blocks (foreign index), places (see `HostPlaces`).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.streams import Event, HostStreams, Stream, Streams
from kvtier.clock import Clock, MonotonicClock
from kvtier.engine.moves import Move
from kvtier.errors import DeviceLost, KvtierError, UsageError
from kvtier.kernels.launch_device import Images
from kvtier.tiers.fences import event_key, stream_key
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.calibration import WAYS, Choice
from kvtier.tiers.foreign.copies import ForeignCopies
from kvtier.tiers.foreign.desk import Sheet
from kvtier.tiers.foreign.methods import LOAD, STORE
from kvtier.tiers.foreign.places import HostPlaces, Numbers
from kvtier.tiers.slots import zero
from kvtier.types import BatchDone, Outcome, Status, group_of


@dataclass(slots=True)
class _Moving:
    """A move under way. event: behind its copies; None if there are none."""

    move_id: int
    event: Event | None
    outcomes: list[Outcome]
    sheets: list[Sheet]
    tails: list[tuple[int, int]]  # address and bytes, to be zeroed once all is there


class ForeignPages:
    """One caller at a time. `notes` says what could be had only in part."""

    def __init__(
        self,
        streams: Streams,
        copies: ForeignCopies,
        undo: ExitStack,
        notes: Sequence[str] = (),
        *,
        fenced: bool = True,
    ) -> None:
        """Takes all of it over. fenced: whether moves need the caller's event. See `on_device` and `on_host`."""
        self.notes = tuple(notes)
        self._streams, self._copies, self._undo = streams, copies, undo
        self._fenced, self._followed = fenced, False
        self._moving: dict[str, deque[_Moving]] = {way: deque() for way in WAYS}
        self._ended: list[BatchDone] = []
        self._lifetime = Lifetime("the copying for a foreign cache")

    @classmethod
    def on_device(
        cls,
        caches: Sequence[ForeignCache],
        host: HostPlaces,
        *,
        device: int = 0,
        clock: Clock | None = None,
        images: Images | None = None,
    ) -> "ForeignPages":
        """For caches, one for each group, in the memory of a CUDA device. Before the engine's first step.

        The ways of copying are measured on the caches themselves, which hold afterwards what they held. clock: by
        which. images: the kernels' machine code; by default compiled, and without a compiler all is copied in pieces.
        Raises ConfigError without such a device, UsageError for what does not fit together, and DeviceLost.
        """
        from kvtier.allocator.driver_cuda import CudaDriver
        from kvtier.tiers.foreign.opening import opened_on

        notes: list[str] = []
        with ExitStack() as undo:
            driver = CudaDriver(device)
            undo.callback(driver.close)
            copies = opened_on(
                driver, caches, host, clock=clock or MonotonicClock(), images=images, undo=undo, notes=notes
            )
            return cls(driver.streams, copies, undo.pop_all(), notes)

    @classmethod
    def on_host(cls, caches: Sequence[ForeignCache], host: HostPlaces) -> "ForeignPages":
        """For caches in host memory: every move is over when its `start` returns, and events are ignored."""
        for number, cache in enumerate(caches):
            if cache.on_device:
                raise UsageError(f"cache {number} lies on a device; use on_device")
        streams = HostStreams(Lifetime("the copying for a foreign cache"))
        return cls(streams, ForeignCopies(streams, caches, host), ExitStack(), fenced=False)

    @property
    def choices(self) -> dict[tuple[str, int], Choice]:
        """How blocks are copied, by way (``store``, ``load``) and the number of the cache."""
        return dict(self._copies.choices)

    # ------------------------------------------------------------ order

    def follow(self, after: Any) -> None:
        """Moves from now on come after an event that you have recorded behind what your streams were given so far.

        To be called after each step's last kernel: what a step wrote can be stored then, and a block that it read be
        loaded into. The work of the moment counts: the event may be recorded again, or dropped. Never waits.
        Raises UsageError for what is no event, and DeviceLost.
        """
        self._lifetime.expect()
        if not self._fenced:
            return
        theirs = Event(event_key(after))
        self._streams.bind_thread()
        for stream in self._copies.streams.values():
            self._streams.wait(stream, theirs)
        self._followed = True

    def wait(self, stream: Any, move_id: int | None = None) -> None:
        """Make your stream (of torch, CuPy or the CUDA bindings) wait for a load, or for all loads, that were started.

        A load that has been answered needs no waiting. What failed is not there, waited for or not: outcomes tell.
        Raises UsageError for what is no stream, and DeviceLost.
        """
        self._lifetime.expect()
        if not self._fenced:
            return
        theirs = Stream(stream_key(stream))
        self._streams.bind_thread()
        events = [m.event for m in self._moving[LOAD] if m.event is not None and move_id in (None, m.move_id)]
        if events:
            self._streams.wait(theirs, events[-1])

    # ------------------------------------------------------------ moves

    def start(self, move: Move) -> None:
        """See `Mover`: each block's cache is that of its key's group, its place the slot."""
        self.begin(move.move_id, move.kind, move.blocks, move.slots, [group_of(key) for key in move.keys])

    def begin(
        self,
        move_id: int,
        kind: str,
        blocks: Sequence[int],
        places: Sequence[int],
        caches: Sequence[int] | None = None,
    ) -> None:
        """Copy blocks[i] of cache caches[i] (0 if not given) to (`store`) or from (`load`) places[i].

        Answered by `finished`. Raises UsageError, and nothing is copied, for blocks or places that are not there or are
        written twice, and on a device before the first `follow`.
        """
        self._lifetime.expect()
        wanted = self._expect(move_id, kind, blocks, places, [0] * len(blocks) if caches is None else caches)
        moving = _Moving(move_id, None, [Outcome(Status.FAILED)] * len(blocks), [], [])
        try:
            self._streams.bind_thread()
            moving.event = self._streams.make_event()
        except KvtierError as error:
            moving.outcomes = [failure(error)] * len(blocks)
            self._end(moving)
            return
        for number, rows in wanted:
            self._give(moving, kind, number, np.asarray(blocks)[rows], np.asarray(places)[rows], rows)
        self._mark(moving, kind)

    def finished(self) -> list[BatchDone]:
        """See `Mover`. A block is DONE, FAILED, or DEVICE_LOST; its bytes are nobody's any more then."""
        self._lifetime.expect()
        for kind, moving in self._moving.items():
            while moving and self._is_over(moving[0], kind):
                self._end(moving.popleft())
        ended, self._ended = self._ended, []
        return ended

    def join(self, move_ids: Iterable[int] | None = None) -> None:
        """Block until these moves, or all, are over. They are answered by `finished` as ever."""
        self._lifetime.expect()
        wanted = None if move_ids is None else set(move_ids)
        with suppress(DeviceLost):  # `finished` tells
            self._streams.bind_thread()
            for moving in self._moving.values():
                for move in moving:
                    if move.event is not None and (wanted is None or move.move_id in wanted):
                        self._streams.synchronize(move.event)

    def close(self) -> None:
        """Wait for what is under way, and let go of everything. Unanswered moves stay so. Idempotent."""
        if self._lifetime.end():
            with suppress(DeviceLost):
                with suppress(DeviceLost):
                    self._streams.bind_thread()
                self._undo.close()

    # ------------------------------------------------------------ inside

    def _expect(
        self, move_id: int, kind: str, blocks: Sequence[int], places: Sequence[int], caches: Sequence[int]
    ) -> list[tuple[int, Numbers]]:
        """The numbers of the caches that take part, and which of the blocks are theirs."""
        if kind not in WAYS:
            raise UsageError(f"move {move_id} is a {kind!r}; use {' or '.join(WAYS)}")
        if self._fenced and not self._followed:
            raise UsageError("on a device moves have an order: call `follow` with an event behind your kernels first")
        if any(move_id == moving.move_id for way in WAYS for moving in self._moving[way]):
            raise UsageError(f"move {move_id} is under way already")
        if not len(blocks) == len(places) == len(caches):
            raise UsageError(f"move {move_id}: {len(blocks)} blocks of {len(caches)} caches, and {len(places)} places")
        numbers, found = np.asarray(caches, np.int64), []
        expect_within("place", np.asarray(places, np.int64), self._copies.host.count, distinct=kind == STORE)
        expect_within("cache", numbers, len(self._copies.caches), distinct=False)
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            theirs = np.asarray(blocks, np.int64)[rows]
            expect_within("block", theirs, self._copies.caches[number].blocks, distinct=kind == LOAD)
            found.append((number, rows))
        return found

    def _give(self, moving: _Moving, kind: str, number: int, blocks: Numbers, places: Numbers, rows: Numbers) -> None:
        given = self._copies.give(kind, number, blocks, places)
        moving.sheets += given.sheets
        for row, outcome in zip(rows.tolist(), given.outcomes, strict=True):
            moving.outcomes[row] = outcome
        host, block_bytes = self._copies.host, self._copies.caches[number].block_bytes
        if kind == STORE and host.part_bytes > block_bytes:
            ends = host.addresses(places) + np.uint64(block_bytes)
            moving.tails += [(end, host.part_bytes - block_bytes) for end in ends.tolist()]

    def _mark(self, moving: _Moving, kind: str) -> None:
        """An event behind the move's copies."""
        assert moving.event is not None
        try:
            self._streams.record(moving.event, self._copies.streams[kind])
        except KvtierError as error:
            self._break(moving, kind, error)
            self._end(moving)
        else:
            self._moving[kind].append(moving)

    def _is_over(self, moving: _Moving, kind: str) -> bool:
        assert moving.event is not None
        try:
            self._streams.bind_thread()
            if not self._streams.is_done(moving.event):
                return False
            self._streams.drop_event(moving.event)
        except KvtierError as error:
            self._break(moving, kind, error)
        return True

    def _break(self, moving: _Moving, kind: str, error: KvtierError) -> None:
        """A driver that fails does not tell when these copies end: wait for its stream. A lost device ends them all."""
        moving.outcomes = [failure(error)] * len(moving.outcomes)
        if not isinstance(error, DeviceLost):
            with suppress(KvtierError):
                self._streams.finish(self._copies.streams[kind])

    def _end(self, moving: _Moving) -> None:
        zero(moving.tails)
        self._copies.take_back(moving.sheets)
        self._ended.append(BatchDone(moving.move_id, tuple(moving.outcomes)))


def failure(error: KvtierError) -> Outcome:
    """What a block hears of an error."""
    status = Status.DEVICE_LOST if isinstance(error, DeviceLost) else Status.FAILED
    return Outcome(status, detail=str(error))


def expect_within(what: str, numbers: Numbers, count: int, *, distinct: bool) -> None:
    """Raises UsageError for a number that is none of `count`, or, if they must be distinct, that comes twice."""
    outside = numbers[(numbers < 0) | (numbers >= count)]
    if len(outside):
        raise UsageError(f"{what} {outside[0]}, of {count}")
    if distinct and len(np.unique(numbers)) != len(numbers):
        once, times = np.unique(numbers, return_counts=True)
        raise UsageError(f"{what} {once[times > 1][0]} is written {times.max()} times in one move")
