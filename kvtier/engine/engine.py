"""The engine's thread: it alone owns the core, so that demotion runs while the caller computes.

Callers' verbs come in through an inbox and are answered in order; finished batches come in the same way. The
thread sleeps on the inbox until something arrives or the core wants to be woken. A bug inside (`fault`) stops the
cache, not its host: every later call raises InvariantError, every waiting one is answered with it.

Units: seconds of the clock that was given.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kvtier.cache.leases import Arrival
from kvtier.clock import Clock
from kvtier.engine.answers import Answer
from kvtier.engine.core import Core
from kvtier.engine.executor import Executor
from kvtier.engine.oneshot import OneShot
from kvtier.engine.polled import Job, PolledSurface, Request
from kvtier.engine.recoding import Recoding
from kvtier.engine.recorder import TraceRecorder
from kvtier.errors import ClosedError, InvariantError, KvtierError, PolicyFault
from kvtier.tiers.base import SupportsFences, SupportsPinning, Tier
from kvtier.types import BatchDone

log = logging.getLogger("kvtier")
T = TypeVar("T")
Reply = Answer | Job | KvtierError


@dataclass(slots=True)
class Question:
    """A verb whose answer takes a while, and who hears of it. `ticket` is there once the engine has taken it in.

    behind_fences: it concerns what was committed, too, behind work that is not over yet.
    """

    verb: Callable[[Core, float], int]
    answered: Callable[[Reply], None]
    behind_fences: bool = False
    ticket: int | None = None


class Engine:
    """Runs a core on its own thread. All methods may be called from any thread of the process that made it."""

    def __init__(
        self,
        core: Core,
        tiers: list[Tier],
        clock: Clock,
        recoding: Recoding | None = None,
        recorder: TraceRecorder | None = None,
    ) -> None:
        """recorder: closed with the tiers."""
        self._core = core
        self._recorder = recorder
        self._surface = PolledSurface(core)
        self._clock = clock
        self._tiers = tiers
        self._has_fences = isinstance(tiers[0], SupportsFences)
        self._pid = os.getpid()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiters: dict[int, Callable[[Reply], None]] = {}
        self._unclaimed: list[tuple[int, Answer | Job]] = []
        self._fault: InvariantError | None = None
        self._closing = False
        self.turns = 0  # how often the thread has planned
        self.unsaved_blocks = 0  # once closed: what a persistent tier should have and has not
        self._gate = threading.Lock()
        self._executor = Executor(tiers, self._report, self._enqueued, recoding)
        self._thread = threading.Thread(target=self._run, name="kvtier-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ from any thread

    def call(self, verb: Callable[[Core, float], T]) -> T:
        """Run a verb on the engine's thread and return its result. Waits for the thread's turn only, never for I/O."""
        returned: OneShot[T] = OneShot()

        def turn() -> None:
            try:
                self.refuse_if_unusable()
                value = verb(self._core, self._clock.now())
            except PolicyFault as error:
                returned.fail(self._broken(error))
            except KvtierError as error:
                returned.fail(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller must hear of it
                returned.fail(self._broken(error))
            else:
                returned.send(value)

        self.refuse_if_unusable()  # before the gate, which a forked child may have inherited locked
        with self._gate:  # a turn taken in before `close` is answered, one after it is refused
            self.refuse_if_unusable()
            self._inbox.put(turn)
        return returned.receive()

    def ask(self, question: Question) -> None:
        """Run a verb that returns a ticket; its answer goes to `question.answered`, on the engine's thread."""

        def register(core: Core, now_s: float) -> None:
            question.ticket = question.verb(core, now_s)
            self._waiters[question.ticket] = question.answered

        def register_late(core: Core, now_s: float) -> None:
            if self._fault is not None:
                question.answered(self._fault)
                return
            try:
                register(core, now_s)
            except KvtierError as error:  # the caller's mistake: no bug of ours
                question.answered(error)

        if question.behind_fences and self._has_fences:
            self.once_passed(None, register_late)
        else:
            self.call(register)

    def abandon(self, question: Question, give_up: Callable[[Core, int], None]) -> None:
        """Nobody waits for the answer any more, be it on its way or not even asked for. Returns at once."""

        def forget(core: Core, now_s: float) -> None:
            if question.ticket is not None:  # the inbox keeps order: else it was never asked
                self._waiters.pop(question.ticket, None)
                give_up(core, question.ticket)

        self.post(forget)

    def post(self, verb: Callable[[Core, float], None]) -> None:
        """Run a verb some time soon; it must not fail."""
        if os.getpid() == self._pid:
            self._inbox.put(lambda: verb(self._core, self._clock.now()))

    def once_passed(
        self, fence: Any, verb: Callable[[Core, float], None], *, first: Callable[[], None] | None = None
    ) -> None:
        """Run a verb on the engine's thread once a fence has passed; None: once all made so far have.

        first: to be done before, on the thread that waits for fences.
        """

        def then(lost: bool) -> None:
            try:
                if first is not None:
                    first()
            finally:
                if lost:
                    self._inbox.put(self._core.lose_device)
                self._inbox.put(lambda: verb(self._core, self._clock.now()))

        with self._gate:
            self.refuse_if_unusable()
            self._executor.once_passed(fence, then)

    def submit(self, request: Request) -> int:
        """The polled surface: a ticket, answered by `poll`."""
        return self.call(lambda core, now_s: self._surface.submit(request, now_s))

    def poll(self) -> list[tuple[int, Answer | Job]]:
        """Answers to `submit` since the last call."""

        def claim(core: Core, now_s: float) -> list[tuple[int, Answer | Job]]:
            self._answer()
            answers, self._unclaimed = self._unclaimed, []
            return [(ticket, self._surface.current(answer)) for ticket, answer in answers]

        return self.call(claim)

    def apply(self, done: BatchDone) -> None:
        """A foreign top tier reports a job."""
        self.call(lambda core, now_s: self._surface.apply(done))

    def begin_close(self) -> None:
        """Refuse all calls from now on; the thread ends what runs and closes the tiers. Returns at once. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._gate:
            if self._closing:
                return
            self._closing = True
        self._inbox.put(lambda: None)

    def close(self) -> None:
        """Close, and wait until running batches have ended and the tiers are closed. Idempotent."""
        self.begin_close()
        if os.getpid() == self._pid:
            self._thread.join()

    @property
    def tiers(self) -> Sequence[Tier]:
        """Fastest first."""
        return self._tiers

    @property
    def closed(self) -> bool:
        return self._closing

    def refuse_if_unusable(self) -> None:
        """Raises ClosedError after close or in a forked child, InvariantError after a bug. Any thread."""
        if os.getpid() != self._pid:
            raise ClosedError("this cache belongs to another process; start workers with spawn, not fork")
        if self._closing:
            raise ClosedError("the cache is closed")
        if self._fault is not None:
            raise self._fault

    # ------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        while not self._closing:
            self._take_turns(self._patience_s())
            if self._fault is None and not self._closing:
                try:
                    if not all(map(self._executor.submit, self._core.plan(self._clock.now()))):
                        return  # the interpreter ends, and its worker threads have ended before this one
                    self._answer()
                    self.turns += 1
                except Exception as error:  # noqa: BLE001 - the thread must live on to say so
                    self._broken(error)
        self._shut_down()

    def _patience_s(self) -> float | None:
        """How long to sleep if nothing arrives."""
        if self._fault is not None:
            return None
        now_s = self._clock.now()
        wake_s = self._core.wake_at_s(now_s)
        return None if wake_s is None else max(0.0, wake_s - now_s)

    def _take_turns(self, patience_s: float | None) -> None:
        try:
            turn = self._inbox.get(timeout=patience_s)
            while True:
                self._guarded(turn)
                turn = self._inbox.get_nowait()
        except Empty:
            pass

    def _guarded(self, turn: Callable[[], None]) -> None:
        try:
            turn()
        except Exception as error:  # noqa: BLE001 - see _run
            self._broken(error)

    def _answer(self) -> None:
        for ticket, answer in self._surface.poll():
            waiter = self._waiters.pop(ticket, None)
            if waiter is None:
                self._unclaimed.append((ticket, answer))
            else:
                waiter(answer)

    def _enqueued(self, batch_id: int, arrival: Arrival) -> None:
        """Called by worker threads, before the batch is reported."""
        self._inbox.put(lambda: self._core.enqueued(batch_id, arrival))

    def _report(self, done: BatchDone) -> None:
        """Called by worker threads."""
        self._inbox.put(lambda: self._core.apply(done, self._clock.now()))

    def _broken(self, error: Exception) -> InvariantError:
        if isinstance(error, PolicyFault):
            log.exception("kvtier stops: %s", error, exc_info=error)
            self._fault = InvariantError(f"kvtier stopped, for {error} Then restart to use the cache again")
        else:
            log.exception("kvtier stops: a bug, please report it", exc_info=error)
            self._fault = InvariantError(f"kvtier stopped after a bug: {error!r}; restart to use the cache again")
        self._dismiss(self._fault)
        return self._fault

    def _dismiss(self, error: KvtierError) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter(error)

    def _count_unsaved(self) -> None:
        self.unsaved_blocks = self._core.unsaved()

    def _shut_down(self) -> None:
        """Nobody waits in vain: what is asked is refused at once, what is running ends and is acknowledged."""
        self._dismiss(ClosedError("the cache was closed"))
        self._executor.close()
        self._take_turns(0.0)
        self._dismiss(ClosedError("the cache was closed"))
        self._guarded(self._count_unsaved)  # now that no write is under way any more
        try:
            with ExitStack() as closing:  # all of them, the lowest first, whatever happens to one
                for tier in self._tiers:
                    closing.callback(tier.close)
                if isinstance(top := self._tiers[0], SupportsPinning):
                    closing.callback(top.unpin)  # before the memory of the tiers below goes
                if self._recorder is not None:
                    closing.callback(self._recorder.close)
        except Exception:
            log.exception("a tier did not close well")
