"""Pages on a device for the worlds of managed caches: the production mover and tier, on the fake libcuda.

Moves begin as they do in a cache, behind the event of the step, and end when a test says so. The engine's reads and
writes are kernels on a stream of its own: a move that is not ordered with them fails in the call that makes it.
Units: blocks, bytes.
"""

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvtier.engine.mover import TierMover
from kvtier.tiers.cuda import CudaTier
from kvtier.types import Outcome, Status
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda
from tests.managed_world import STAMP_BYTES


class Later:
    """Stands for the mover's thread: what is submitted waits for `DevicePages.end`."""

    def __init__(self):
        self.waiting = []

    def submit(self, carry_out, move, fence):
        self.waiting.append((carry_out, move, fence))

    def shutdown(self):
        assert not self.waiting


class DevicePages(TierMover):
    """The same verbs as `Pages`. Made by `on_device`."""

    def __init__(self, below, groups, blocks_total, fake):
        sizes = [size for _, size in groups]
        self.tier = CudaTier.create(
            name="gpu", device=0, capacity_bytes=GRANULE_BYTES, length_bytes_max=max(sizes) * STAMP_BYTES
        )
        assert self.tier.traits.slots >= blocks_total
        super().__init__(self.tier, below.host, [size * STAMP_BYTES for size in sizes])
        self._thread.shutdown()
        self._thread = self._later = Later()
        self._fails: Sequence[int] = ()
        self._fake, self._streams = fake, self.tier._cuda.streams
        self._stream = self._streams.make_stream()
        self.met = Counter()

    # ---------------------------------------------------------------- the engine's kernels

    def read(self, block, offset):
        self._kernel(block, offset, writes=False)
        return ctypes.string_at(self._address(block, offset), STAMP_BYTES)

    def write(self, block, offset, stamp):
        self._kernel(block, offset, writes=True)
        ctypes.memmove(self._address(block, offset), stamp, STAMP_BYTES)

    def begin_step(self):
        """The event of the step, behind all kernels so far."""
        event = self._streams.make_event()
        self._streams.record(event, self._stream)
        self.follow(event)
        self._streams.drop_event(event)

    def _kernel(self, block, offset, *, writes):
        code = self._fake.kernel(self._stream.key, self._address(block, offset), STAMP_BYTES, writes=writes)
        assert code == 0, self._fake.report

    def _address(self, block, offset):
        return self.tier._arena.address + block * self.tier.stride_bytes + offset

    # ---------------------------------------------------------------- moves

    @property
    def moves(self):
        return [move for _, move, _ in self._later.waiting]

    def moving(self):
        """The blocks that copies under way read or write."""
        return {block for move in self.moves for block in move.blocks}

    def end(self, index=0, fails=()):
        """Carry a move out. fails: the positions of blocks that cannot be copied, "all" for every one."""
        carry_out, move, fence = self._later.waiting.pop(index)
        self._fails = range(len(move.keys)) if fails == "all" else fails
        carry_out(move, fence)
        assert self._fake.report == ""
        for position in range(len(move.keys)):
            self.met[f"{move.kind} {'failed' if position in self._fails else 'done'}"] += 1

    def _store(self, move):
        return self._in_part(move, super()._store)

    def _load(self, move):
        return self._in_part(move, super()._load)

    def _in_part(self, move, copy):
        """Those that are to fail are not copied."""
        copied = [i for i in range(len(move.keys)) if i not in self._fails]
        parts = {name: tuple(getattr(move, name)[i] for i in copied) for name in ("keys", "blocks", "slots")}
        outcomes = [Outcome(Status.FAILED)] * len(move.keys)
        for position, outcome in zip(copied, copy(replace(move, **parts)), strict=True):
            outcomes[position] = outcome
        return outcomes

    def answer(self, done):
        """An answer that no copy gave."""
        self._done.put(done)

    def close(self):
        self.tier.settle()
        self.tier.close()


def on_device(monkeypatch, fake: FakeCuda):
    """Worlds made from now on have their pages on the fake device. Returns what closes them."""
    made: list[DevicePages] = []

    def pages(below, groups, blocks_total):
        made.append(DevicePages(below, groups, blocks_total, fake))
        return made[-1]

    def close():
        while made:
            made.pop().close()
        assert not fake.report, fake.report

    monkeypatch.setattr("tests.managed_world.Pages", pages)
    return close
