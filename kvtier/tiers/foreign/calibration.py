"""Which way of copying is taken: measured at the start on the cache itself, or by a rule where a clock says nothing.

Owns nothing: what is measured are the first copies of a cache that nobody uses yet. Its bytes are afterwards those of
before, and what a method gets wrong is found here: it is not taken.
Units: bytes, seconds.

The rule, from what others measured (an H100 and its link: batches of pieces give 5.2 GB/s at 8 KiB, 39.9 at 28 KiB,
51.4 at 64 KiB): down always in pieces; up by a kernel for fragments under 28 KiB.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.streams import Stream, Streams
from kvtier.clock import Clock
from kvtier.errors import DeviceLost, KvtierError
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.desk import Sheets
from kvtier.tiers.foreign.methods import DIRECT, LOAD, PIECES, STAGED, STORE, Copying, Method
from kvtier.tiers.foreign.places import HostPlaces, Numbers
from kvtier.types import page_aligned

THRESHOLD_BYTES = 28 << 10  # of a fragment, for the rule
MARGIN = 0.05  # another way than the rule's has to save so much of its time
ROUNDS = 5
TRIAL_BYTES = 8 << 20
WAYS = (STORE, LOAD)
POISON = 0xA5


@dataclass(frozen=True, slots=True)
class Choice:
    """How blocks of one cache are copied one way.

    why: ``measured``; ``rule``: the clock told nothing; ``only``: there is no other. gigabytes_per_s: by method, of the
    trial; empty if nothing was measured.
    """

    way: str
    method: str
    why: str
    fragment_bytes: int
    gigabytes_per_s: Mapping[str, float]

    def __str__(self) -> str:
        told = ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in self.gigabytes_per_s.items())
        return f"{self.way} by {self.method} ({told or self.why}), fragments of {self.fragment_bytes} bytes"


def choose(way: str, fragment_bytes: int, trial_bytes: int, seconds: Mapping[str, float]) -> Choice:
    """Pure. seconds: of `trial_bytes`, by method; PIECES is among them."""
    if len(seconds) == 1:
        return Choice(way, next(iter(seconds)), "only", fragment_bytes, {})
    ruled = _by_rule(way, fragment_bytes, seconds)
    if min(seconds.values()) <= 0:
        return Choice(way, ruled, "rule", fragment_bytes, {})
    fastest = min(seconds, key=lambda name: seconds[name])
    if seconds[fastest] > (1 - MARGIN) * seconds[ruled]:
        fastest = ruled
    speeds = {name: trial_bytes / took_s / 1e9 for name, took_s in seconds.items()}
    return Choice(way, fastest, "measured", fragment_bytes, speeds)


def _by_rule(way: str, fragment_bytes: int, names: Iterable[str]) -> str:
    small = way == LOAD and fragment_bytes < THRESHOLD_BYTES
    return next((name for name in (DIRECT, STAGED) if small and name in names), PIECES)


class Trial:
    """The methods of one cache side by side, on pinned memory that no block lies in: `memory` is of `trial_bytes`."""

    def __init__(self, streams: Streams, clock: Clock, cache: ForeignCache, sheets: Sheets | None) -> None:
        self._streams, self._clock, self._cache, self._sheets = streams, clock, cache, sheets
        self._stride_bytes = page_aligned(cache.block_bytes)
        self._count = max(1, min(cache.blocks, TRIAL_BYTES // self._stride_bytes))
        # Backwards, so that blocks and places that are taken for each other show.
        self._blocks: Numbers = np.arange(self._count)[::-1] * (cache.blocks // self._count)

    @property
    def memory_bytes(self) -> int:
        """How much pinned memory it wants."""
        return self._count * self._stride_bytes

    @property
    def payload_bytes(self) -> int:
        """How much each copy moves."""
        return self._count * self._cache.block_bytes

    def run(
        self, memory: NDArray[np.uint8], seen_at: int, lanes: Mapping[str, tuple[Stream, list[Method]]]
    ) -> tuple[dict[str, dict[str, float]], list[str]]:
        """By way, how long each method takes, in seconds; and a sentence for each that is not to be used.

        memory: pinned, uint8 [memory_bytes], which the device sees at `seen_at`. lanes: by way, a stream and the
        methods made for it, pieces first. Raises what pieces raise, and DeviceLost.
        """
        host = HostPlaces(memory.ctypes.data, self._stride_bytes, self._count, 0, self._stride_bytes, seen_at=seen_at)
        bench = _Bench(self, host, memory.reshape(self._count, -1)[:, : self._cache.block_bytes], lanes)
        with bench.on_loan():
            problems = list(bench.leave_out())
            return bench.times(), problems

    def copy(self, method: Method, way: str, host: HostPlaces, stream: Stream) -> None:
        """All of the trial's blocks, and wait for that."""
        sheet = self._sheets.take() if self._sheets and method.needs_sheet else None
        places = np.arange(self._count)
        try:
            for start in range(0, self._count, method.blocks_max):
                own = slice(start, start + method.blocks_max)
                try:
                    method.copy(Copying(way, self._blocks[own], places[own], host, stream, sheet))
                finally:
                    self._streams.finish(stream)
        finally:
            if self._sheets and sheet is not None:
                self._sheets.give_back(sheet)

    def seconds(self, method: Method, way: str, host: HostPlaces, stream: Stream) -> float:
        begun_s = self._clock.now()
        self.copy(method, way, host, stream)
        return self._clock.now() - begun_s


class _Bench:
    """One run: blocks with bytes that tell them apart, and the methods that bring just these."""

    def __init__(
        self,
        trial: Trial,
        host: HostPlaces,
        payload: NDArray[np.uint8],
        lanes: Mapping[str, tuple[Stream, list[Method]]],
    ) -> None:
        self._trial, self._host, self._payload = trial, host, payload
        self._streams = {way: lanes[way][0] for way in WAYS}
        self._methods = {way: list(lanes[way][1]) for way in WAYS}
        self._pieces = {way: self._methods[way][0] for way in WAYS}
        self._wanted = np.random.default_rng(0).integers(0, 256, payload.shape, np.uint8)

    @contextmanager
    def on_loan(self) -> Iterator[None]:
        """The blocks hold what is wanted, and afterwards what they held before."""
        self._move(self._pieces[STORE], STORE)
        before = self._payload.copy()
        try:
            self._bring(self._wanted)
            yield
        finally:
            self._bring(before)

    def leave_out(self) -> Iterator[str]:
        """Let each method copy to poisoned places, and drop what fails there."""
        for way in WAYS:
            for method in self._methods[way][1:]:
                problem = self._problem(method, way)
                if problem:
                    self._methods[way].remove(method)
                    yield f"{way} by {method.name} is left out: {problem}"

    def times(self) -> dict[str, dict[str, float]]:
        """The median of some rounds, in which the methods take turns."""
        self._payload[:] = self._wanted
        turns = [(way, method) for way in WAYS for method in self._methods[way]]
        taken: dict[tuple[str, str], list[float]] = {(way, method.name): [] for way, method in turns}
        for _ in range(ROUNDS):
            for way, method in turns:
                took_s = self._trial.seconds(method, way, self._host, self._streams[way])
                taken[way, method.name].append(took_s)
        return {
            way: {method.name: statistics.median(taken[way, method.name]) for method in self._methods[way]}
            for way in WAYS
        }

    def _problem(self, method: Method, way: str) -> str:
        """What is wrong with it. The blocks hold what is wanted before and afterwards."""
        try:
            if way == STORE:
                self._payload[:] = POISON
                self._move(method, STORE)
                return self._difference()
            self._bring(np.full_like(self._wanted, POISON))
            self._payload[:] = self._wanted
            self._move(method, LOAD)
            self._payload[:] = POISON
            self._move(self._pieces[STORE], STORE)
            return self._difference()
        except DeviceLost:
            raise
        except KvtierError as error:
            return str(error)
        finally:
            if way == LOAD:
                self._bring(self._wanted)

    def _difference(self) -> str:
        return "" if np.array_equal(self._payload, self._wanted) else "it gives other bytes than pieces"

    def _bring(self, payload: NDArray[np.uint8]) -> None:
        """Let the blocks hold this."""
        self._payload[:] = payload
        self._move(self._pieces[LOAD], LOAD)

    def _move(self, method: Method, way: str) -> None:
        self._trial.copy(method, way, self._host, self._streams[way])
