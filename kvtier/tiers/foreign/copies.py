"""ForeignCopies: blocks between foreign caches and pinned places on the host, both ways, each in a stream of its own.

Owns: the two streams. How blocks of a cache are copied one way is a `Choice`, made at the start; a way that the driver
refuses later is given up for pieces, and that is said.
Always: nothing waits here but the start; an outcome says what is under way, and an event that the caller records behind
        it when that is over.
Units: bytes, blocks (foreign index), places. Caches by their number.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.streams import Streams, drop_streams
from kvtier.clock import Clock
from kvtier.errors import DeviceLost, KvtierError, UsageError
from kvtier.notices import say_once
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.calibration import WAYS, Choice, Trial, choose
from kvtier.tiers.foreign.desk import Sheet, Sheets
from kvtier.tiers.foreign.methods import PIECES, Copying, Method, Pieces
from kvtier.tiers.foreign.places import HostPlaces, Numbers
from kvtier.types import DONE, Outcome, Status

log = logging.getLogger("kvtier")
NAME = "foreign cache"

Pinned = Callable[[int], AbstractContextManager[NDArray[np.uint8]]]  # so many bytes, for a while


@dataclass(slots=True)
class Given:
    """What came of giving copies to a stream. sheets: to be given back once an event behind them is over."""

    outcomes: list[Outcome] = field(default_factory=list)
    sheets: list[Sheet] = field(default_factory=list)


class ForeignCopies:
    """One caller at a time. Until `calibrate`, or without it, everything is copied in pieces."""

    def __init__(self, streams: Streams, caches: Sequence[ForeignCache], host: HostPlaces) -> None:
        """Raises UsageError if a cache's blocks do not fit the places."""
        if not caches:
            raise UsageError("no cache; pass one for each group of layers")
        for cache in caches:
            host.expect_room(cache.block_bytes)
        self.caches, self.host = tuple(caches), host
        self.streams = {way: streams.make_stream() for way in WAYS}
        self._all_streams, self._sheets = streams, Sheets(np.zeros(0, np.uint8))
        self._methods: dict[tuple[str, int], list[Method]] = {
            (way, number): [Pieces(streams, cache)] for way in WAYS for number, cache in enumerate(caches)
        }
        self._chosen = {key: methods[0] for key, methods in self._methods.items()}
        self.choices = {
            (way, number): choose(way, caches[number].fragment_bytes, 0, {PIECES: 0.0}) for way, number in self._chosen
        }

    def add(self, way: str, number: int, methods: Iterable[Method], sheets: Sheets) -> None:
        """More methods for one way of a cache, to be chosen from."""
        self._methods[way, number] += methods
        self._sheets = sheets

    def calibrate(self, clock: Clock, pinned: Pinned, seen_at: Callable[[int], int], notes: list[str]) -> None:
        """Measure and choose, before anybody uses the caches: their bytes change meanwhile, and are then as before.

        pinned: lends registered memory. seen_at: where the device sees it. Raises DeviceLost.
        """
        for number, cache in enumerate(self.caches):
            if len(self._methods[WAYS[0], number]) == 1:
                continue
            trial = Trial(self._all_streams, clock, cache, self._sheets)
            taken: dict[str, dict[str, float]] = {way: dict.fromkeys(self._names(way, number), 0.0) for way in WAYS}
            try:
                with pinned(trial.memory_bytes) as memory:
                    lanes = {way: (self.streams[way], self._methods[way, number]) for way in WAYS}
                    taken, problems = trial.run(memory, seen_at(memory.ctypes.data), lanes)
                    notes += problems
            except DeviceLost:
                raise
            except KvtierError as error:
                notes.append(f"nothing was measured: {error}")
            for way in WAYS:
                self._choose(way, number, choose(way, cache.fragment_bytes, trial.payload_bytes, taken[way]))

    def give(self, way: str, number: int, blocks: Numbers, places: Numbers) -> Given:
        """Give the stream of that way copies of distinct blocks. An outcome for each, in order: DONE is under way.

        A block that is not DONE may be half written. Raises nothing.
        """
        given, start = Given(), 0
        while start < len(blocks):
            own = slice(start, start + self._chosen[way, number].blocks_max)
            outcome = self._give(way, number, blocks[own], places[own], given.sheets)
            if outcome is not None:
                given.outcomes += [outcome] * len(blocks[own])
                start = own.stop
        return given

    def take_back(self, sheets: Iterable[Sheet]) -> None:
        """An event behind their copies is over."""
        for sheet in sheets:
            self._sheets.give_back(sheet)

    def close(self) -> None:
        """Wait for both streams and drop them."""
        drop_streams(self._all_streams, self.streams.values())

    # ------------------------------------------------------------ inside

    def _give(self, way: str, number: int, blocks: Numbers, places: Numbers, sheets: list[Sheet]) -> Outcome | None:
        """One call of the chosen method. None: it failed, and another is chosen now."""
        method, pieces = self._chosen[way, number], self._methods[way, number][0]
        sheet = self._sheets.take() if method.needs_sheet else None
        if sheet is not None:
            sheets.append(sheet)
        elif method.needs_sheet:
            method = pieces  # so many launches are under way that the link is busy anyhow
        try:
            method.copy(Copying(way, blocks, places, self.host, self.streams[way], sheet))
        except DeviceLost as error:
            return Outcome(Status.DEVICE_LOST, detail=str(error))
        except KvtierError as error:
            if method is pieces:
                return Outcome(Status.FAILED, detail=str(error))
            say_once(log, NAME, f"{way} {method.name}", f"{way} by {method.name} is given up for pieces: {error}")
            self._choose(way, number, replace(self.choices[way, number], method=PIECES, why="refused"))
            return None
        return DONE

    def _choose(self, way: str, number: int, choice: Choice) -> None:
        self.choices[way, number] = choice
        self._chosen[way, number] = next(m for m in self._methods[way, number] if m.name == choice.method)

    def _names(self, way: str, number: int) -> list[str]:
        return [method.name for method in self._methods[way, number]]
