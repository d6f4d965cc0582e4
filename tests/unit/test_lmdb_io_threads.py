"""Threads that share out a move: each piece once, and none after the move has ended."""

import gc
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.tiers.lmdb.io_threads import IoThreads

NAME = "kvtier-test-io"


def living() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_many_share_at_once() -> None:
    """A piece of one move would be done for another, twice or never."""
    threads, pieces = IoThreads(3, NAME), 40
    done: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()

    def move(number: int) -> None:
        def work(piece: int) -> None:
            with lock:
                done[number, piece] += 1

        threads.share(work, range(pieces), 4)
        with lock:
            assert all(done[number, piece] for piece in range(pieces)), "it ended before its pieces did"

    with ThreadPoolExecutor(6) as callers:
        list(callers.map(move, range(30)))
    assert set(done.values()) == {1}
    assert len(done) == 30 * pieces
    threads.close()


def test_a_helper_that_fails_is_heard() -> None:
    """A bug on another thread would leave bytes unmoved, and the caller would call them written."""
    threads = IoThreads(1, NAME)
    both = threading.Barrier(2)

    def work(piece: int) -> None:
        both.wait(timeout=20)  # each thread has one
        if threading.current_thread().name.startswith(NAME):
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        threads.share(work, range(2), 2)
    threads.share(lambda piece: None, range(9), 2)  # the thread serves on
    threads.close()


def test_threads_end_with_their_owner() -> None:
    """Each store that is closed, or forgotten, would leave its threads behind."""
    threads = IoThreads(2, NAME)
    threads.share(lambda piece: None, range(5), 1)
    assert living() == []  # nobody was needed
    threads.share(lambda piece: None, range(5), 3)
    started = living()
    assert len(started) == 2
    threads.close()
    threads.close()
    assert living() == []
    done: list[int] = []
    threads.share(done.append, range(5), 3)
    assert done == [0, 1, 2, 3, 4], "who shares after that goes on alone"
    forgotten = IoThreads(2, NAME)
    forgotten.share(lambda piece: None, range(5), 3)
    started = living()
    del forgotten
    gc.collect()
    for thread in started:
        thread.join(timeout=20)
    assert living() == []


def test_threads_that_cannot_start_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without threads to spare a write would fail, or wait for ever."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, done = IoThreads(2, NAME), list[int]()
    with monkeypatch.context() as machine:
        machine.setattr(threading.Thread, "start", refused)
        threads.share(done.append, range(5), 3)
    assert done == [0, 1, 2, 3, 4]
    threads.share(lambda piece: None, range(5), 3)
    assert len(living()) == 2
    threads.close()


def test_sharing_goes_on_while_the_interpreter_ends() -> None:
    """A cache that is closed by an exit handler would wait for ever for threads that have gone."""
    code = """
import atexit
from kvtier.tiers.lmdb.io_threads import IoThreads
@atexit.register  # first, to run last
def close():
    threads.share(done.append, range(9), 3)
    threads.close()
    print(len(done))
threads, done = IoThreads(2, "io"), []
threads.share(done.append, range(9), 3)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.stdout, ended.stderr) == ("18\n", "")
