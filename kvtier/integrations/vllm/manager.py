"""vLLM's scheduler over kvtier: its verbs, as those of `ForeignRequests`. All of them are called by one thread."""

import os
from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvtier import open_sync
from kvtier.config import Config
from kvtier.engine.foreign import ForeignRequests, Seen
from kvtier.integrations.vllm.worker import SlotSpec
from kvtier.types import BlockKey

FLUSH_S = 4.0  # vLLM kills a process that takes more than 5 s to end
STEPS_UNDER_WAY = 4  # vLLM schedules one step beyond the one that its workers are at; the rest is caution
RESULTS = {
    Seen.HIT: LookupResult.HIT,
    Seen.MISS: LookupResult.MISS,
    Seen.PENDING: LookupResult.HIT_PENDING,
    Seen.ASKED: LookupResult.RETRY,
}


class KvtierManager(base.OffloadingManager):
    """vLLM's keys are named as ours are: a hash and the number of its group."""

    def __init__(self, config: Config) -> None:
        self.cache = open_sync(config)
        patience_s = config.limits.load_deadline_s
        self.requests = ForeignRequests(self.cache, "vLLM", load_deadline_s=patience_s, steps_under_way=STEPS_UNDER_WAY)
        top: Any = self.cache.top_tier
        self._slab = f"/proc/{os.getpid()}/fd/{top.fd}", top.stride_bytes

    def on_new_request(self, req_context: ReqContext) -> base.RequestOffloadingContext:
        return base.RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return RESULTS[self.requests.seek(req_context.req_id, BlockKey(key))]

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        self.requests.step([*context.new_req_ids, *context.preempted_req_ids])

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotSpec:
        return SlotSpec(*self._slab, self.requests.take(req_context.req_id, [BlockKey(key) for key in keys]))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.requests.loaded(req_context.req_id)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> base.PrepareStoreOutput | None:
        slots = self.requests.offer(req_context.req_id, [BlockKey(key) for key in keys])
        if slots is None:
            return None
        wanted = [OffloadKey(key) for key in slots]
        return base.PrepareStoreOutput(wanted, SlotSpec(*self._slab, tuple(slots.values())), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self.requests.stored([BlockKey(key) for key in keys], success=success)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.requests.forget(req_context.req_id)

    def has_pending_work(self) -> bool:
        return self.requests.busy

    def reset_cache(self) -> None:
        self.requests.reset()

    def shutdown(self) -> None:
        self.cache.close(FLUSH_S)
