"""The slab's threads: every slot is moved once, by the caller's thread too, and nobody moves bytes afterwards."""

import mmap
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.slab import Slab, SlotIO
from kvtier.types import block_key

PAGE = 4096
KEY = block_key(b"h" * 32, 0)


class NotedFile(BlockFile):
    """No file: notes which thread wrote at which offset."""

    def __init__(self) -> None:
        super().__init__(-1, direct=False)
        self.offsets: Counter[int] = Counter()
        self.threads: set[int] = set()

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets[offset] += 1
        self.threads.add(threading.get_ident())
        return sum(map(len, buffers))


class BuggyFile(NotedFile):
    """Raises what no disk raises in the caller's thread, while another thread's write goes on until it may end."""

    def __init__(self) -> None:
        super().__init__()
        self.both_write = threading.Barrier(2)
        self.may_end = threading.Event()

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.both_write.wait()
        if not threading.current_thread().name.startswith("kvtier-slab"):
            raise KeyError("a bug")
        self.may_end.wait()
        return super().write(buffers, offset)


def scattered(count: int) -> list[SlotIO]:
    """No two are neighbours, so that each is a run of its own."""
    memory = memoryview(mmap.mmap(-1, count * PAGE))
    return [SlotIO(KEY, 2 * at * PAGE, PAGE, PAGE, memory[at * PAGE : (at + 1) * PAGE]) for at in range(count)]


@pytest.mark.parametrize("threads", [1, 4])
def test_every_run_is_moved_once(threads: int) -> None:
    """A run that two threads take is wasted work; one that nobody takes is a block of old bytes."""
    file = NotedFile()
    slab = Slab(file, threads)
    ios = scattered(200)
    slab.write(ios)
    assert file.offsets == {io.offset: 1 for io in ios}
    assert all(io.error is None for io in ios)
    slab.close()


def test_the_caller_takes_a_share() -> None:
    """With one thread each batch would cost two wake-ups for nothing."""
    file = NotedFile()
    slab = Slab(file, 1)
    slab.write(scattered(3))
    assert file.threads == {threading.get_ident()}
    slab.close()


def test_nobody_writes_after_a_bug_was_told() -> None:
    """The caller would use its buffers again while another thread still writes from them."""
    file = BuggyFile()
    slab = Slab(file, 2)
    with ThreadPoolExecutor(1) as caller:
        writing = caller.submit(slab.write, scattered(2))
        with pytest.raises(TimeoutError):
            writing.result(timeout=0.05)  # it waits for the other thread, however long that takes
        file.may_end.set()
        with pytest.raises(KeyError):
            writing.result()
    assert file.offsets.total() == 1
    slab.close()


class MeetingFile(NotedFile):
    """A disk that serves nobody before so many calls have come."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.meeting = threading.Barrier(calls)

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.meeting.wait(timeout=20)
        return super().write(buffers, offset)


def test_small_blocks_from_all_over_are_moved_many_at_a_time() -> None:
    """A disk waits for the next small call most of the time."""
    file = MeetingFile(6)
    slab = Slab(file, 2)
    slab.write(scattered(12))
    assert len(file.threads) >= 6
    slab.close()


def test_neighbours_are_one_call_of_up_to_4_mib() -> None:
    """Each call more takes another thread, and its CPU, to be as fast."""
    file = NotedFile()
    slab = Slab(file, 4)
    stride = 64 << 10
    memory = memoryview(mmap.mmap(-1, 96 * stride))
    slots = [SlotIO(KEY, at * stride, stride, stride, memory[at * stride : (at + 1) * stride]) for at in range(96)]
    slab.write(slots[::-1])
    assert file.offsets == {0: 1, 4 << 20: 1}
    slab.close()


def test_large_blocks_do_not_wake_more_threads_than_they_need() -> None:
    """Threads beyond those that keep the disk busy take the engine's time."""
    file = NotedFile()
    slab = Slab(file, 2)
    stride = 1 << 20
    memory = memoryview(mmap.mmap(-1, 12 * stride))
    slab.write(
        [SlotIO(KEY, 2 * at * stride, stride, stride, memory[at * stride : (at + 1) * stride]) for at in range(12)]
    )
    assert len(file.threads) <= 2
    slab.close()
