"""ManagedCache: the tiers of a configuration, with a block manager running the GPU tier.

Owns: the GPU tier's memory, whose slots are the manager's blocks, and a cache over the tiers below. Always: decisions
are the manager's, vLLM's to the bit while nothing lies below; slot 0 is the null block. Units: blocks, tokens, seconds.

On a device the engine's kernels run on after their launch. What a step moves is copied only behind the event that the
step was given; until then its blocks are nobody else's. A request is back from loading when its bytes are there.
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvtier.blocks.spec import block_specs
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.request import Request
from kvtier.cache.specs import Group
from kvtier.config.schema import Config, GpuTierConfig
from kvtier.engine.build import Configuration, loaded, pin_below
from kvtier.engine.managed import Lookup, ManagedTop
from kvtier.engine.managed_parts import cache_over, pages_of, spec_of
from kvtier.engine.mover import TierMover
from kvtier.engine.sync import SyncCache
from kvtier.errors import ClosedError, DeviceLost, UsageError
from kvtier.tiers.base import SupportsFences, SupportsPinning
from kvtier.tiers.fences import event_key
from kvtier.tiers.host import HostTier
from kvtier.tiers.views import segment_views

if TYPE_CHECKING:
    import numpy as np

POLL_S = 0.0005  # how often a waiting step looks


class ManagedCache:
    """Block tables over the GPU tier, and the tiers below it. One caller at a time. Made by `open_managed`."""

    def __init__(self, config: Config, settings: dict[str, Any]) -> None:
        self.config = config
        self.top: ManagedTop | None = None  # none without tiers below
        self._specs = block_specs(config.model)
        self._below: SyncCache | None = None
        self._mover: TierMover | None = None
        self._ready: list[Request] = []  # loaded while something else was waited for
        self._lost = False
        lengths = [spec.block_bytes for spec in self._specs]
        gpu, *below = config.tiers
        assert isinstance(gpu, GpuTierConfig)  # the configuration begins with it
        self._pages = pages_of(gpu, max(lengths))
        self._device = self._pages if isinstance(self._pages, SupportsFences) else None
        try:
            self.manager = KVCacheManager(
                [Group(spec_of(group)) for group in config.model.groups],
                self._pages.traits.capacity_bytes // self._pages.stride_bytes + 1,
                hash_name=config.model.hash,
                hash_seed=config.model.hash_seed,
                tiers_below=bool(below),
                **settings,
            )
            if below:
                self._below = cache_over(replace(config, tiers=tuple(below)))
                host = self._below.top_tier
                assert isinstance(host, HostTier)
                with ExitStack() as undo:
                    pin_below([self._pages, host], undo)
                    undo.pop_all()  # `close` lets go of it
                self._mover = TierMover(self._pages, host, lengths)
                deadline_s = config.limits.load_deadline_s
                self.top = ManagedTop(
                    self.manager, self._below, self._mover, ahead=gpu.high_watermark, load_deadline_s=deadline_s
                )
        except BaseException:
            self.close(flush_s=0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def kv(self, group: int = 0, layer: int = 0) -> "dict[str, np.ndarray[Any, Any]]":
        """Zero-copy views over all blocks, by segment name ("k", "v", or "latent"): [blocks, tokens, heads, dim].

        numpy on host memory, CuPy on a device. Index only blocks of tables. Raises UsageError for a layer that the
        group has not.
        """
        segments = self._specs[group].of_layer(layer) if 0 <= group < len(self._specs) else []
        if not segments:
            raise UsageError(f"the model has no layer {layer} in group {group}")
        return segment_views(self._pages.array(), segments)

    # ------------------------------------------------------------ a request

    def request(self, request_id: str, tokens: Any, **more: Any) -> Request:
        """As `KVCacheManager.request`."""
        return self.manager.request(request_id, tokens, **more)

    def get_computed_blocks(self, request: Request) -> Lookup:
        """The longest prefix in the pages, and how much further it goes in tiers below. Holds nothing."""
        if self.top is None:
            return Lookup(self.manager.get_computed_blocks(request), 0)
        return self.top.get_computed_blocks(request)

    def allocate_slots(
        self, request: Request, new_tokens: int, lookup: Lookup | None = None, **more: Any
    ) -> tuple[list[int], ...] | None:
        """As `ManagedTop.allocate_slots`: what lies below is loaded first, and `step` returns the request then.

        Raises DeviceLost once the device has failed.
        """
        self._expect_device()
        if self.top is None:
            return self.manager.allocate_slots(request, new_tokens, None if lookup is None else lookup.hit, **more)
        return self.top.allocate_slots(request, new_tokens, lookup, **more)

    def is_loading(self, request: Request) -> bool:
        """Whether the request waits for what comes from below."""
        return self.top is not None and self.top.is_loading(request)

    def free(self, request: Request) -> None:
        """The request has ended, at whatever stage."""
        (self.top or self.manager).free(request)
        self._ready = [other for other in self._ready if other is not request]

    def preempt(self, request: Request) -> None:
        """Free it, to be begun again later."""
        (self.top or self.manager).preempt(request)
        self._ready = [other for other in self._ready if other is not request]

    # ------------------------------------------------------------ a step

    def step(self, wait_s: float = 0.0, *, after: Any = None) -> list[Request]:
        """Before each step of the engine. Returns requests whose load has ended; `computed_tokens` says how far.

        wait_s: how long to wait for one, if there is nothing else to do. after: on a device, the event recorded behind
        all kernels that you have launched so far: blocks are copied behind it. Ignored on host memory.
        Raises DeviceLost once the device has failed.
        """
        self._follow(after)
        if self.top is None:
            self._expect_device()
            self.manager.begin_step()
            return []
        until = time.monotonic() + wait_s
        ready, self._ready = self._ready, []
        while True:
            ready += self.top.step()
            self._expect_device()  # after the step, so that moves end on a lost device, too
            if ready or time.monotonic() >= until:
                return ready
            time.sleep(POLL_S)

    def flush(self, timeout_s: float = 20.0, *, after: Any = None) -> bool:
        """Copy what nobody uses to the lowest tier. False if time was too short, or a copy found no room or failed.

        after: as of `step`. What a lost device held is not copied; host memory still is.
        """
        self._follow(after)
        return self._flush(timeout_s)

    def lose_device(self) -> None:
        """The device has failed for good (a sticky error of its context): forget what lay there, keep what lies below.

        From now on `allocate_slots` and `step` raise DeviceLost; requests can be freed, and `flush` and `close` still
        save host memory.
        """
        self._lost = True
        if self._mover is not None:
            self._mover.device_lost = True
        self.manager.evict_blocks([*range(1, self.manager.pool.blocks_total)])

    def _follow(self, after: Any) -> None:
        """What moves from now on does so behind this event."""
        if self._device is not None and not self._lost:
            event_key(after)
        if self._mover is not None:
            self._mover.follow(after)

    def _expect_device(self) -> None:
        if self._is_lost():
            raise DeviceLost("the device of the pages has failed; host memory and disk keep what they have: close")

    def _is_lost(self) -> bool:
        if self._lost or (self._mover is not None and self._mover.device_lost):
            self.lose_device()  # again, for what a load has named since
        return self._lost

    def _settle(self) -> None:
        """Until nobody uses the pages any more, or the device turns out to be lost."""
        if self._device is None:
            return
        try:
            self._device.settle()
        except ClosedError:
            return
        except DeviceLost:
            if self._mover is not None:
                self._mover.device_lost = True
        if self._mover is not None:
            self._mover.follow(None)

    def _flush(self, timeout_s: float) -> bool:
        if self.top is None or self._below is None:
            return True
        self.top.flush()
        lost, until = self.top.counters.lost, time.monotonic() + timeout_s
        while not self.top.is_idle and time.monotonic() < until:
            self._ready += self.top.step()
            self._is_lost()
            time.sleep(POLL_S)
        done = self.top.is_idle and self.top.counters.lost == lost
        try:
            return self._below.flush(max(until - time.monotonic(), POLL_S)).failed == 0 and done
        except TimeoutError:
            return False  # the copying goes on

    def reset(self) -> bool:
        """Forget everything, in the pages and below, for the weights have changed. False while a block is in use."""
        if not self.manager.reset():
            return False
        if self._below is not None:
            self._below.reset()
        return True

    def check(self) -> list[str]:
        """Recount tables, references, names and what moves hold."""
        return (self.top or self.manager).check()

    def close(self, flush_s: float = 20.0) -> None:
        """Flush for at most `flush_s`, then stop. Idempotent.

        On a device it waits before for all work that the process has given it: nobody uses the pages any more.
        """
        self._settle()
        if self._below is not None and self.top is not None and flush_s > 0:
            self._flush(flush_s)
        if self._mover is not None:
            self._mover.close()
        if isinstance(self._pages, SupportsPinning):
            self._pages.unpin()  # before the memory below goes
        if self._below is not None:
            self._below.close(flush_s)
            self._below = None
        self.top = None
        self._pages.close()


def open_managed(config: Configuration, *, tokens_max: int, **settings: Any) -> ManagedCache:
    """Open the tiers of a configuration with a block manager on top. Close it, or use it in a `with`.

    tokens_max, settings: of `KVCacheManager` (tokens_in_flight, eagle, watermark, events, metrics...).
    Raises ConfigError for tiers that this cannot be built on.
    """
    return ManagedCache(loaded(config), {"tokens_max": tokens_max, **settings})
