"""Arena against a model, in any order of calls, on every driver."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.driver_memfd import MemfdDriver
from kvtier.allocator.streams import Event
from kvtier.allocator.vmm import Arena
from kvtier.errors import DriverError, InvariantError
from kvtier.testing.drivers import CopyingDriver, FailingDriver, peek
from tests.arena_bench import PAGE, machine_bytes, write
from tests.fakecuda.fake import load


class ArenaMachine(RuleBasedStateMachine):
    """All verbs in any order, with slots that straddle and calls that fail; content of kept slots must stay."""

    def make_driver(self) -> CopyingDriver:
        return MemfdDriver(64 * PAGE, PAGE)

    @initialize(stride_quarters=st.integers(1, 10), slots=st.integers(2, 9))
    def begin(self, stride_quarters: int, slots: int) -> None:
        self.driver = self.make_driver()
        self.failing = FailingDriver(self.driver)
        self.arena = Arena(
            self.failing,  # type: ignore[arg-type]
            stride_bytes=stride_quarters * PAGE // 4,
            slots_reserved=slots,
        )
        self.address = self.arena.address
        self.kept: set[int] = set()
        self.pending: set[Event] = set()
        self.asleep = False
        self.made = 0

    def bytes_of(self, slot: int) -> NDArray[np.uint8]:
        stride_bytes = self.arena.geometry.stride_bytes
        return peek(self.driver, self.address + slot * stride_bytes, stride_bytes)

    def win(self, won: list[int]) -> None:
        assert not self.kept & set(won)
        for slot in won:
            assert not self.bytes_of(slot).any()
            write(self.arena, self.driver, slot + 1, slot)
        self.kept |= set(won)

    @rule(verb=st.sampled_from(["create", "map", "set_access", "zero", "unmap"]), calls=st.integers(1, 4))
    def break_down(self, verb: str, calls: int) -> None:
        self.failing.fail(verb, calls)

    @rule(granules=st.integers(0, 6))
    def grow(self, granules: int) -> None:
        try:
            self.win(self.arena.grow(granules * PAGE))
        except (InvariantError, DriverError):
            return

    @precondition(lambda self: self.kept)
    @rule(granules=st.sets(st.integers(0, 25), max_size=4), held=st.sets(st.integers(0, 8)), now=st.booleans())
    def shrink(self, granules: set[int], held: set[int], now: bool) -> None:
        try:
            if now:
                lost = self.arena.shrink(granules, lambda slot: slot not in held)
            else:
                self.made += 1
                lost = self.arena.retire(granules, lambda slot: slot not in held, [Event(self.made)])
                self.pending.add(Event(self.made))
        except (InvariantError, DriverError):
            return
        assert not set(lost) & (held | {0})
        self.kept -= set(lost)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pending.discard(data.draw(st.sampled_from(sorted(self.pending, key=lambda event: event.key))))

    @rule()
    def collect(self) -> None:
        before = len(self.arena.granules_retired)
        try:
            assert self.arena.collect(lambda event: event not in self.pending) <= before
        except DriverError:
            return
        assert self.pending or not self.arena.granules_retired

    @rule()
    def doze(self) -> None:
        try:
            self.arena.sleep()
        except (InvariantError, DriverError):
            return
        self.asleep = True
        self.kept.clear()
        assert self.driver.used_bytes == 0

    @precondition(lambda self: self.asleep)
    @rule(share=st.floats(0, 1))
    def wake(self, share: float) -> None:
        slept = sorted(self.arena._asleep or ())
        parts = slept[: max(len(self.arena.geometry.granules_of(0)), int(share * len(slept)))]
        try:
            self.win(self.arena.wake(parts if share < 0.9 else None))
        except DriverError:
            return
        self.asleep = False

    @rule(granules=st.integers(0, 5))
    def fill(self, granules: int) -> None:
        try:
            assert self.arena.fill(granules) >= granules
        except DriverError:
            return

    @rule(keep=st.integers(0, 2))
    def trim(self, keep: int) -> None:
        self.arena.trim(keep)
        retired_bytes = len(self.arena.granules_retired) * PAGE
        assert self.driver.used_bytes <= self.arena.mapped_bytes + retired_bytes + keep * PAGE

    @invariant()
    def holds(self) -> None:
        assert self.arena.check() == []
        assert self.arena.address == self.address
        assert self.arena.held_bytes == self.driver.used_bytes == machine_bytes(self.driver)
        assert {slot for slot in range(9) if self.arena.is_mapped(slot)} == self.kept
        assert all((self.bytes_of(slot) == slot + 1).all() for slot in self.kept)

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.failing.fail("", 0)
            self.arena.close()
            assert self.driver.used_bytes == machine_bytes(self.driver) == 0
            self.driver.close()


class CudaArenaMachine(ArenaMachine):
    """The same on a device."""

    def make_driver(self) -> CopyingDriver:
        fake = load()
        if isinstance(fake, str):
            pytest.skip(fake)
        fake.reset()
        fake.configure(64 * PAGE, PAGE, strict=True)
        return CudaDriver()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestCudaArena = CudaArenaMachine.TestCase
TestCudaArena.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
