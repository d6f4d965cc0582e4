"""vLLM's scheduler as a foreign top tier: its lookups, loads and stores as jobs of a polled kvtier.

Always: a HIT is a slot that a lease holds until `complete_load`, or until the request runs or ends without it. A load
that failed, came late or found no room is a MISS for this request: nothing is tried for ever. No error of kvtier
reaches vLLM. A request's first lookup asks whether there is anything; the step's end asks for all its keys at once.
"""

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvtier import Keys, Match, NoRoom, open_sync
from kvtier.config import Config
from kvtier.engine.polled import Job, Load, Store
from kvtier.errors import KvtierError
from kvtier.integrations.vllm.worker import SlotSpec
from kvtier.notices import say_once
from kvtier.types import DONE, BatchDone, Outcome, Status

FLUSH_S = 4.0  # vLLM kills a process that takes more than 5 s to end
STEPS_UNDER_WAY = 4  # vLLM schedules one step beyond the one that its workers are at; the rest is caution
T = TypeVar("T")


@dataclass(eq=False)
class Asked:
    """A load or store that was asked for, and the slots that came of it."""

    keys: list[OffloadKey] = field(default_factory=list)
    match: Match | None = None
    answer: Any = None
    slots: dict[OffloadKey, int] = field(default_factory=dict)
    unwanted: bool = False


class KvtierManager(base.OffloadingManager):
    """In the scheduler's thread. `cache` and `errors` are for who wants to know."""

    def __init__(self, config: Config) -> None:
        self.cache, self.errors = open_sync(config), 0
        top: Any = self.cache.top_tier
        self._patience_s = config.limits.load_deadline_s
        self._slab = f"/proc/{os.getpid()}/fd/{top.fd}", top.stride_bytes
        self._tickets: dict[int, Asked] = {}
        self._sought: dict[str, Asked] = {}  # by request
        self._loading: dict[str, Job] = {}
        self._storing: dict[OffloadKey, Job] = {}
        self._steps = 0
        self._overtaken: list[tuple[int, Job]] = []  # by a reset, and until which step workers may be at their slots

    def on_new_request(self, req_context: ReqContext) -> base.RequestOffloadingContext:
        return base.RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        asked = self._sought.get(req_context.req_id)
        if asked is not None and not asked.answer and key == asked.keys[0]:
            self._collect()
        if asked is not None and key in asked.slots:
            return LookupResult.HIT
        if key in self._storing:
            return LookupResult.HIT_PENDING
        if asked is None:
            found = self._try(self.cache.peek, self._keys([key]))
            if found is None or not found.tokens:
                return LookupResult.MISS
            asked = self._sought[req_context.req_id] = Asked()
        if asked.answer:
            return LookupResult.MISS
        if not asked.match and key not in asked.keys:
            asked.keys.append(key)
        return LookupResult.RETRY

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        self._steps += 1
        while self._overtaken and self._overtaken[0][0] < self._steps:
            self._end(self._overtaken.pop(0)[1], success=False)
        for req_id in (*context.new_req_ids, *context.preempted_req_ids):
            self._forget(req_id)  # it runs, or begins anew
        for req_id, asked in self._sought.items():
            if not asked.match and not asked.answer:
                asked.match = self._try(self.cache.match, self._keys(asked.keys), req_id)
                self._ask(asked, Load(asked.match, self._patience_s) if asked.match else None)
        self._collect()

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotSpec:
        asked = self._sought.pop(req_context.req_id)
        self._loading[req_context.req_id] = asked.answer
        return SlotSpec(*self._slab, tuple(asked.slots[key] for key in keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._end(self._loading.pop(req_context.req_id))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> base.PrepareStoreOutput | None:
        asked = Asked([key for key in keys if key not in self._storing])
        self._ask(asked, Store(self._keys(asked.keys), req_context.req_id))
        self._collect()
        if not isinstance(asked.answer, Job):
            return None
        self._storing.update(dict.fromkeys(asked.slots, asked.answer))
        return base.PrepareStoreOutput(list(asked.slots), SlotSpec(*self._slab, tuple(asked.slots.values())), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        for job in {self._storing.pop(key) for key in keys}:
            self._end(job, success=success)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._forget(req_context.req_id)

    def has_pending_work(self) -> bool:
        return bool(self._tickets or self._overtaken)

    def reset_cache(self) -> None:
        jobs = {*self._loading.values(), *self._storing.values()}
        self._overtaken += [(self._steps + STEPS_UNDER_WAY, job) for job in jobs]
        self._loading.clear()
        self._storing.clear()
        for req_id in list(self._sought):
            self._forget(req_id)
        self._try(self.cache.reset)

    def shutdown(self) -> None:
        self.cache.close(FLUSH_S)

    def _keys(self, keys: Collection[OffloadKey]) -> Keys:
        return Keys.opaque([[base.get_offload_block_hash(key) for key in keys]], self.cache.config.model)

    def _try(self, verb: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return verb(*arguments)
        except KvtierError as error:
            self.errors += 1
            say_once(logging.getLogger("kvtier"), "vLLM", type(error).__name__, f"goes on without kvtier: {error}")
            return None

    def _ask(self, asked: Asked, request: Load | Store | None) -> None:
        ticket = request and self._try(self.cache.submit, request)
        if ticket:
            self._tickets[ticket] = asked
        else:
            asked.answer = NoRoom(0, 0)

    def _collect(self) -> None:
        """Take the answers that are there. A cache that has failed has none: what waits for one is refused."""
        answers = self._try(self.cache.poll)
        for ticket, answer in [(ticket, NoRoom(0, 0)) for ticket in self._tickets] if answers is None else answers:
            asked = self._tickets.pop(ticket, None) or Asked(unwanted=True)
            asked.answer = answer
            if isinstance(answer, Job):
                asked.slots = dict(zip(map(OffloadKey, answer.keys), answer.slots, strict=True))
                if asked.unwanted or not answer.keys:
                    self._end(answer, success=False)
            elif asked.match:
                self._try(self.cache.release, asked.match)

    def _forget(self, req_id: str) -> None:
        asked = self._sought.pop(req_id, Asked())
        asked.unwanted = True
        if isinstance(asked.answer, Job):
            self._end(asked.answer)

    def _end(self, job: Job, *, success: bool = True) -> None:
        outcome = DONE if success else Outcome(Status.FAILED)
        self._try(self.cache.apply, BatchDone(job.job_id, (outcome,) * len(job.keys)))
