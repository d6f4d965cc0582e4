"""What the requests of a foreign scheduler look for, load and store, for one that must never wait.

Such a scheduler (vLLM's) has GPU blocks of its own and asks again in every step. Here its questions become jobs of the
polled cache: a request's first `seek` asks whether there is anything; `step` asks for all that it has sought at once.

Owns: for every request its load and the job that came of it; for every key that is being stored, its job. Always: a HIT
is a slot that a lease holds until `loaded`, or until its request is forgotten. A load that failed, came late or found
no room is a MISS for this request: nothing is tried for ever. No error of the cache reaches the scheduler: it is
counted (`errors`), said once, and a miss.

Units: keys of one group, slots of the cache's fastest tier, steps of the scheduler, seconds.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Match, NoRoom
from kvtier.engine.answers import Answer
from kvtier.engine.polled import Drop, Job, Load, Store
from kvtier.engine.sync import SyncCache
from kvtier.errors import KvtierError
from kvtier.notices import say_once
from kvtier.types import DONE, BatchDone, BlockKey, Outcome, Status, hash_of

T = TypeVar("T")
log = logging.getLogger("kvtier")


class Seen(Enum):
    """What `seek` answers."""

    HIT = "hit"  # it lies in a slot, until `loaded`
    MISS = "miss"
    PENDING = "pending"  # somebody stores it now
    ASKED = "asked"  # look again in the next step


@dataclass(eq=False, slots=True)
class _Asked:
    """A load or store that was asked for, and the slots that came of it."""

    keys: list[BlockKey] = field(default_factory=list)
    match: Match | None = None
    answer: Answer | Job | None = None
    slots: dict[BlockKey, int] = field(default_factory=dict)
    unwanted: bool = False


class ForeignRequests:
    """One caller at a time. `name` is who is told of in the log; `held()` and `errors` are for who wants to know."""

    def __init__(self, cache: SyncCache, name: str, *, load_deadline_s: float, steps_under_way: int) -> None:
        """steps_under_way: how many steps after a `reset` somebody may still copy to or from slots of before."""
        self.cache, self.errors = cache, 0
        self._name, self._load_deadline_s, self._steps_under_way = name, load_deadline_s, steps_under_way
        self._tickets: dict[int, _Asked] = {}
        self._sought: dict[str, _Asked] = {}  # by request
        self._loading: dict[str, Job] = {}
        self._storing: dict[BlockKey, Job] = {}
        self._steps = 0
        self._overtaken: list[tuple[int, Job]] = []  # by a reset, and until which step their slots may be in use

    # ------------------------------------------------------------ looking and loading

    def seek(self, request: str, key: BlockKey) -> Seen:
        """Whether this request can have this block. Its keys are asked for in their order, in every step again."""
        asked = self._sought.get(request)
        if asked is not None and not asked.answer and key == asked.keys[0]:
            self._collect()
        if asked is not None and key in asked.slots:
            return Seen.HIT
        if key in self._storing:
            return Seen.PENDING
        if asked is None:
            found = self._try(self.cache.peek, self._keys([key]))
            if found is None or not found.tokens:
                return Seen.MISS
            asked = self._sought[request] = _Asked()
        if asked.answer:
            return Seen.MISS
        if not asked.match and key not in asked.keys:
            asked.keys.append(key)
        return Seen.ASKED

    def step(self, begun: Iterable[str] = ()) -> None:
        """A step of the scheduler ends: load what was sought in it. `begun`: requests that run, or begin anew."""
        self._steps += 1
        while self._overtaken and self._overtaken[0][0] < self._steps:
            self._end(self._overtaken.pop(0)[1], success=False)
        for request in begun:
            self.forget(request)
        for request, asked in self._sought.items():
            if not asked.match and not asked.answer:
                asked.match = self._try(self.cache.match, self._keys(asked.keys), request)
                self._ask(asked, Load(asked.match, self._load_deadline_s) if asked.match else None)
        self._collect()

    def take(self, request: str, keys: Collection[BlockKey]) -> tuple[int, ...]:
        """The slots of these hits, to be read until `loaded`."""
        asked = self._sought.pop(request)
        assert isinstance(asked.answer, Job), "there was no hit"
        self._loading[request] = asked.answer
        return tuple(asked.slots[key] for key in keys)

    def loaded(self, request: str) -> None:
        """They were read."""
        self._end(self._loading.pop(request), success=True)

    def forget(self, request: str) -> None:
        """This request loads nothing of what it has sought: it runs without, or has ended. Idempotent."""
        asked = self._sought.pop(request, None)
        if asked is not None:
            asked.unwanted = True
            if isinstance(asked.answer, Job):
                self._end(asked.answer, success=True)

    # ------------------------------------------------------------ storing

    def offer(self, request: str, keys: Iterable[BlockKey]) -> dict[BlockKey, int] | None:
        """The slots into which to write those of these blocks that are wanted, until `stored`; None without room."""
        asked = _Asked([key for key in keys if key not in self._storing])
        self._ask(asked, Store(self._keys(asked.keys), request))
        self._collect()
        if not isinstance(asked.answer, Job):
            return None
        self._storing.update(dict.fromkeys(asked.slots, asked.answer))
        return asked.slots

    def stored(self, keys: Iterable[BlockKey], *, success: bool) -> None:
        """The job that had these keys has written them all, or not."""
        for job in {self._storing.pop(key) for key in keys}:
            self._end(job, success=success)

    # ------------------------------------------------------------ all of them

    def reset(self) -> None:
        """Forget all blocks, at once and without waiting. Slots that are in use stay out of it for some steps more."""
        jobs = {*self._loading.values(), *self._storing.values()}
        self._overtaken += [(self._steps + self._steps_under_way, job) for job in jobs]
        self._loading.clear()
        self._storing.clear()
        for request in list(self._sought):
            self.forget(request)
        self._ask(_Asked(), Drop())

    @property
    def busy(self) -> bool:
        """There are answers to come or slots to be given back: call `step` though no request runs."""
        return bool(self._tickets or self._overtaken)

    def held(self) -> dict[str, int]:
        """Requests that were asked for and jobs that have not ended: none when nothing runs."""
        return {
            "asked": len(self._tickets) + len(self._sought),
            "jobs": len(self._loading) + len(self._storing) + len(self._overtaken),
        }

    # ------------------------------------------------------------ inside

    def _keys(self, keys: Sequence[BlockKey]) -> Keys:
        return Keys.opaque([[hash_of(key) for key in keys]], self.cache.config.model)

    def _try(self, verb: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return verb(*arguments)
        except KvtierError as error:
            self.errors += 1
            say_once(log, self._name, type(error).__name__, f"goes on without kvtier: {error}")
            return None

    def _ask(self, asked: _Asked, request: Load | Store | Drop | None) -> None:
        ticket = request and self._try(self.cache.submit, request)
        if ticket:
            self._tickets[ticket] = asked
        else:
            asked.answer = NoRoom(0, 0)

    def _collect(self) -> None:
        """Take the answers that are there. A cache that has failed has none: what waits for one is refused."""
        answers = self._try(self.cache.poll)
        for ticket, answer in [(ticket, NoRoom(0, 0)) for ticket in self._tickets] if answers is None else answers:
            asked = self._tickets.pop(ticket, None) or _Asked(unwanted=True)
            asked.answer = answer
            if isinstance(answer, Job):
                asked.slots = dict(zip(answer.keys, answer.slots, strict=True))
                if asked.unwanted:
                    self._end(answer, success=False)
            elif asked.match:
                self._try(self.cache.release, asked.match)

    def _end(self, job: Job, *, success: bool) -> None:
        outcome = DONE if success else Outcome(Status.FAILED)
        self._try(self.cache.apply, BatchDone(job.job_id, (outcome,) * len(job.keys)))
