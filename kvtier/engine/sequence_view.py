"""Sequence views: the blocks of a lease, one behind the other, as attention without a block table reads them.

Owns: which views there are, by lease. A view ends by `close` or with its lease, whichever comes first: on a device
behind the fence of that, on host memory at once.
Always:  a lease that is being given back gets no view any more, and its slots become free only when its views are
         unmapped; each view is unmapped once. Any thread may call.
Units:   tokens, blocks, slots (index).
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvtier.allocator.sequence_ranges import SequenceRange
from kvtier.blocks.spec import BlockSpec
from kvtier.cache.leases import Lease
from kvtier.engine import arguments
from kvtier.engine.engine import Engine
from kvtier.errors import DeviceLost, KvtierError, UsageError
from kvtier.tiers.base import SupportsFences
from kvtier.tiers.sequences import Sequences
from kvtier.tiers.views import sequence_arrays

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("kvtier")


class SequenceView:
    """The tokens of one group of a lease, in one run of addresses. Made by `cache.sequence_view`.

    `tokens` counts those of all its blocks, of the last one too, be they written already or not. `address` is where the
    first block begins; each token takes as many bytes as all layers of it.
    """

    def __init__(self, home: "SequenceViews", lease: Lease, spec: BlockSpec, shown: SequenceRange) -> None:
        self.lease = lease
        self.group = spec.group
        self.blocks = len(shown.slots)
        self.tokens = self.blocks * spec.segments[0].shape[0]
        self.address = shown.address
        self._home = home
        self._spec = spec
        self._shown = shown
        self.has_ended = False
        self._arrays: dict[int, dict[str, np.ndarray[Any, Any]]] = {}

    def kv(self, layer: int = 0) -> "dict[str, np.ndarray[Any, Any]]":
        """Arrays [tokens, heads, dim] of a layer, by segment name, zero-copy: what is written in a slot is seen here.

        As those of `cache.kv`, but for reading only: write through that. Raises UsageError once the view has ended.
        An array that you keep longer sees zeroes on host memory; on a device using it is an error.
        """
        self._home.expect_usable()
        index = arguments.integer("layer", layer)
        found = self._arrays.get(index)
        if self.has_ended:
            raise UsageError(f"this view of {self.lease!r} has ended: it was closed, or its lease released")
        if found is None:
            found = self._arrays[index] = self._home.arrays_of(self._shown, self._spec, index)
        return found

    def close(self, *, after: Any = None) -> None:
        """End the view before its lease does. Idempotent.

        after: on a device, an event recorded behind the last kernel that reads it. On a host nobody may be reading.
        """
        self._home.close(self, after)

    def end(self) -> SequenceRange:
        """For whoever unmaps it: from now on it shows nothing."""
        self.has_ended = True
        self._arrays.clear()
        return self._shown


class SequenceViews:
    """All views of one open cache. `sequences` is None where the configuration does not ask for any."""

    def __init__(
        self,
        engine: Engine,
        sequences: Sequences | None,
        stride_bytes: int,
        specs: Sequence[BlockSpec],
        device: SupportsFences | None,
    ) -> None:
        self._engine = engine
        self._sequences = sequences
        self._stride_bytes = stride_bytes
        self._specs = specs
        self._device = device
        self._lock = threading.Lock()
        self._views: dict[Lease, list[SequenceView]] = {}
        self._leaving: set[Lease] = set()

    def make(self, lease: Lease, group: int) -> SequenceView:
        """See `cache.sequence_view`."""
        spec = self._spec_of(group)
        self._engine.call(lambda core, now_s: core.expect_lease(lease))
        with self._lock:
            if lease in self._leaving:
                raise UsageError(f"{lease!r} is being released: make views before")
            view = SequenceView(self, lease, spec, self._expected.show(lease.slots(spec.group)))
            self._views.setdefault(lease, []).append(view)
        return view

    def close(self, view: SequenceView, after: Any) -> None:
        """End one view; on a device when the work before `after` is over."""
        if view.has_ended:
            return
        self.expect_usable()
        if self._device is None:
            self._unmap(self._taken([view]))
            return
        fence = self._device.fence(after)
        view.end()
        self._engine.once_passed(fence, _nothing, first=lambda: self._unmap(self._taken([view])))

    @contextmanager
    def ending(self, lease: Lease) -> Iterator[None]:
        """On host memory: around the release of a lease, whose views are unmapped before."""
        self._leave(lease)
        self._unmap(self._taken_of(lease))
        try:
            yield
        finally:
            self._gone(lease)

    def ending_behind(self, lease: Lease) -> tuple[Callable[[], None], Callable[[], None]]:
        """On a device: what is to be done once the fence has passed, before the lease is released and after that.

        The views show nothing more from now on, and stay mapped for the work that was given out.
        """
        self._leave(lease)
        return lambda: self._unmap(self._taken_of(lease)), lambda: self._gone(lease)

    def end_owner(self, owner: str) -> None:
        """Its owner is dead. On a device its views stay mapped until all work there is over, for nobody can tell."""
        with self._lock:
            views = [view for lease, views in self._views.items() if lease.owner == owner for view in views]
        for view in views:
            view.end()
        if self._device is None:
            self._unmap(self._taken(views))
        elif views:
            device = self._device
            self._engine.once_passed(None, _nothing, first=lambda: self._unmap_settled(device, views))

    def forget(self) -> None:
        """The cache was closed: its tiers have unmapped everything."""
        with self._lock:
            views = [view for views in self._views.values() for view in views]
            self._views.clear()
        for view in views:
            view.end()

    def expect_usable(self) -> None:
        """Raises ClosedError and the like."""
        self._engine.refuse_if_unusable()

    def arrays_of(self, shown: SequenceRange, spec: BlockSpec, layer: int) -> "dict[str, np.ndarray[Any, Any]]":
        """Arrays [tokens, heads, dim] over what is shown. Raises UsageError for a layer that the group has not."""
        segments = spec.of_layer(layer)
        if not segments:
            raise UsageError(f"the model has no layer {layer} in group {spec.group}")
        return sequence_arrays(self._expected.array(shown), segments, len(shown.slots))

    # ------------------------------------------------------------ inside

    @property
    def _expected(self) -> Sequences:
        if self._sequences is None:
            raise UsageError("there are no sequence views here; write `sequence_views: true` at the gpu tier")
        return self._sequences

    def _spec_of(self, group: int) -> BlockSpec:
        """A group whose blocks, one behind the other, are one behind the other in tokens, too."""
        index = arguments.integer("group", group)
        if index >= len(self._specs):
            raise UsageError(f"the model has no group {index}; it has {len(self._specs)}, counted from 0")
        spec = self._specs[index]
        tokens_bytes = {segment.strides_bytes[0] * segment.shape[0] for segment in spec.segments}
        if tokens_bytes != {spec.block_bytes} or spec.block_bytes != self._stride_bytes:
            raise UsageError(
                f"group {index} cannot be seen as a sequence: that takes layout token_major, and blocks as long as the "
                f"slots ({spec.block_bytes} bytes in slots of {self._stride_bytes})"
            )
        return spec

    def _leave(self, lease: Lease) -> None:
        with self._lock:
            self._leaving.add(lease)
            for view in self._views.get(lease, ()):
                view.end()

    def _gone(self, lease: Lease) -> None:
        with self._lock:
            self._leaving.discard(lease)

    def _taken_of(self, lease: Lease) -> list[SequenceView]:
        with self._lock:
            return self._views.pop(lease, [])

    def _taken(self, views: Sequence[SequenceView]) -> list[SequenceView]:
        """Those that nobody else is unmapping."""
        taken = []
        with self._lock:
            for view in views:
                of_lease = self._views.get(view.lease, [])
                if view in of_lease:
                    of_lease.remove(view)
                    taken.append(view)
                if not of_lease:
                    self._views.pop(view.lease, None)
        return taken

    def _unmap_settled(self, device: SupportsFences, views: Sequence[SequenceView]) -> None:
        try:
            device.settle()
        except KvtierError as error:
            log.error("sequence views stay mapped: %s", error)
        else:
            self._unmap(self._taken(views))

    def _unmap(self, views: Sequence[SequenceView]) -> None:
        """A view that cannot be unmapped keeps its addresses to itself until the cache is closed."""
        for view in views:
            try:
                self._expected.hide(view.end())
            except DeviceLost:
                pass  # with its memory; `reserve` says so
            except KvtierError as error:
                log.error("a sequence view stays mapped until the cache is closed: %s", error)


def _nothing(core: Any, now_s: float) -> None:
    """What remains for the engine's thread to do."""
