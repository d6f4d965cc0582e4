"""The verbs that never wait, shared by the asyncio and the blocking cache.

Each marshals to the engine's thread and comes back with its answer; none of them waits for I/O.
Units: tokens, seconds, slots.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

from kvtier.blocks.hashing import Keys
from kvtier.blocks.spec import BlockSpec, block_specs
from kvtier.cache.leases import Found, Lease, Match, NoRoom
from kvtier.config import Config
from kvtier.engine import arguments
from kvtier.engine.answers import Answer, Dropped, Flushed, Resized, Slept, Woken
from kvtier.engine.build import reads_in_place, start
from kvtier.engine.core import Core
from kvtier.engine.engine import Engine, Reply
from kvtier.engine.polled import Job, Request
from kvtier.engine.sequence_view import SequenceView, SequenceViews
from kvtier.errors import ClosedError, KvtierError, UsageError
from kvtier.kernels.attention import PagedKv
from kvtier.tiers.base import SupportsFences, SupportsReading, Tier
from kvtier.tiers.views import segment_views
from kvtier.types import BatchDone, BlockKey

if TYPE_CHECKING:
    import numpy as np


def answer_of(reply: Reply) -> Answer:
    """The answer to a question of this cache; raises what the engine answered instead of one."""
    if isinstance(reply, KvtierError):
        raise reply
    assert isinstance(reply, Lease | NoRoom | Flushed | Dropped | Resized | Slept | Woken)
    return reply


class CacheVerbs:
    """What `TieredCache` and `SyncCache` have in common."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._running: Engine | None = None
        self._top: Tier | None = None
        self._device: SupportsFences | None = None  # the top tier, if it is on a device
        self._sequence_views: SequenceViews | None = None  # none before the cache is open
        self._specs: tuple[BlockSpec, ...] = block_specs(config.model)
        self._views: dict[tuple[int, int], dict[str, np.ndarray[Any, Any]]] = {}

    @property
    def _engine(self) -> Engine:
        if self._running is None:
            raise ClosedError(
                "the cache is not open; use it as `with kvtier.open_sync(...)` or `async with kvtier.open(...)`"
            )
        return self._running

    @property
    def _sequences(self) -> SequenceViews:
        self._engine.refuse_if_unusable()
        assert self._sequence_views is not None  # made with the engine
        return self._sequence_views

    @property
    def top_tier(self) -> Tier | None:
        """The fastest tier, for who copies to and from its slots; None before the cache is open."""
        return self._top

    def match(
        self,
        keys: Keys,
        owner: str,
        *,
        session: str | None = None,
        ttl_s: float = 30.0,
        tokens_max: int | None = None,
    ) -> Match:
        """Find and pin the longest prefix that lies in any tier.

        tokens_max: never look further; pass `len(tokens) - 1`, since the last prompt token must be computed.
        ttl_s: the pins end by themselves after this long. session: whose turn this is, by any name of at most 256 bytes
        in UTF-8: see `hint`.
        Changes nothing but pins and counters; does not wait for I/O.
        """
        name = arguments.session_name(arguments.optional("session", session, str))
        limit = arguments.limit("tokens_max", tokens_max)
        lives_s = arguments.seconds("ttl_s", ttl_s)
        return self._engine.call(lambda core, now_s: core.match(keys, owner, limit, now_s + lives_s, name))

    def peek(self, keys: Keys, *, tokens_max: int | None = None) -> Found:
        """Ask what `match` would find, and pin nothing."""
        limit = arguments.limit("tokens_max", tokens_max)
        return self._engine.call(lambda core, now_s: core.peek(keys, limit))

    def kv(self, group: int = 0, layer: int = 0) -> "dict[str, np.ndarray[Any, Any]]":
        """Zero-copy views over all slots of the top tier, by segment name ("k", "v", or "latent" for MLA).

        Shape [slots, tokens, heads, dim]; numpy on host memory, CuPy on a device (torch takes either by `from_dlpack`);
        bfloat16 arrives as uint16, float8 as uint8 (numpy has neither). The strides follow the layout. Index only slots
        of a lease you hold, and write only those from `lease.tokens_ready` on. Raises UsageError with `access: uva`.
        """
        self._engine.refuse_if_unusable()
        place = arguments.integer("group", group), arguments.integer("layer", layer)
        if reads_in_place(self.config.tiers[0]):
            raise UsageError(
                "with `access: uva` a part of a lease's blocks lies in host memory, where attention over the slots of "
                "the device does not find them: use paged_kv() with kvtier's kernels, or `access: copy`"
            )
        known = self._views.get(place)
        if known is None:
            known = self._views[place] = self._view(*place)
        return known

    def _view(self, group: int, layer: int) -> "dict[str, np.ndarray[Any, Any]]":
        segments = self._specs[group].of_layer(layer) if 0 <= group < len(self._specs) else []
        if not segments:
            raise UsageError(f"the model has no layer {layer} in group {group}")
        array = getattr(self._top, "array", None)
        if array is None:
            raise UsageError("the fastest tier shows no slots: the pages above it are somebody else's")
        return segment_views(array(), segments)

    def sequence_view(self, lease: Lease, group: int = 0) -> SequenceView:
        """The blocks of a lease in one run of addresses, so that attention needs no block table and no copy.

        ``view.kv(layer)`` gives [tokens, heads, dim]. The same memory as the slots', mapped once more: blocks that
        several leases share lie in the view of each. It ends with its lease, or by ``view.close()``. Does not wait for
        I/O; docs/sequence_views.md says what it costs. Raises UsageError where the configuration has no
        `sequence_views`, OutOfMemory when a process may not map so many blocks.
        """
        return self._sequences.make(arguments.instance("lease", lease, Lease), group)

    def paged_kv(self, group: int = 0, layer: int = 0) -> PagedKv:
        """K and V of a layer for kvtier's attention kernels, which read them by `lease.table(group)`.

        Views as those of `kv`, over the slots of the top tier and, with `access: uva`, those of host memory (numpy; on
        a device its kernels find them at the same addresses). Write only slots of the top tier. Raises UsageError for
        groups without K and V (MLA).
        """
        self._engine.refuse_if_unusable()
        place = arguments.integer("group", group), arguments.integer("layer", layer)
        top = self._views[place] if place in self._views else self._views.setdefault(place, self._view(*place))
        if not {"k", "v"} <= top.keys():
            raise UsageError(f"group {group} has {', '.join(top)} and no K and V, which the kernels read")
        if not reads_in_place(self.config.tiers[0]):
            return PagedKv(top["k"], top["v"])
        below = self._engine.tiers[1]
        assert isinstance(below, SupportsReading)
        host = segment_views(below.memory(), self._specs[place[0]].of_layer(place[1]))
        return PagedKv(top["k"], top["v"], host["k"], host["v"])

    def commit(self, lease: Lease, pairs: Sequence[tuple[int, BlockKey]], *, after: Any = None) -> None:
        """Publish the keys of slots that the lease has written: (slot, key) pairs.

        From now on others may find them; the slots must not be written any more. Promises no durability (`flush`
        does). after: an event recorded behind the kernels that write them, from which on they are found; ignored on
        host memory, where the bytes are there already.
        Raises UsageError, and publishes nothing, if a pair does not belong to the lease or the model.
        """
        arguments.instance("lease", lease, Lease)
        checked = arguments.slot_pairs(pairs)
        if self._device is None:
            self._engine.call(lambda core, now_s: core.commit(lease, checked))
            return
        fence = self._device.fence(after)
        with self._giving_back(fence):
            self._engine.call(lambda core, now_s: core.promise_commit(lease, checked))
        self._engine.once_passed(fence, lambda core, now_s: core.commit_promised(lease, checked))

    def prefilled(self, tokens: int, seconds: float, *, start: int = 0) -> None:
        """Report how long the engine took to compute `tokens` tokens behind the first `start` ones of a prompt.

        From such reports the governor knows when loading is not worth it (`lease.decision`).
        """
        first, count = arguments.integer("start", start), arguments.integer("tokens", tokens, at_least=1)
        took_s = arguments.seconds("seconds", seconds)
        self._engine.call(lambda core, now_s: core.prefilled(first, count, took_s))

    def lose_device(self) -> None:
        """The device has failed for good (a sticky error of its context): forget what lay there, keep what lies below.

        From now on `reserve`, `commit` and the tier's `resize` raise DeviceLost; `flush` and `close` still save host
        memory.
        """
        self._engine.call(lambda core, now_s: core.lose_device())

    def release(self, held: Lease | Match, *, after: Any = None) -> None:
        """Give a lease or a match back. Idempotent. after: of a lease, behind the last kernel that uses its slots."""
        if isinstance(held, Match):
            self._engine.call(lambda core, now_s: core.release_match(held))
        elif not isinstance(held, Lease):
            raise UsageError(f"held is {arguments.shown(held)}; pass a Lease or a Match")
        elif self._device is None:
            with self._sequences.ending(held):
                self._engine.call(lambda core, now_s: core.release_lease(held))
        else:
            self._release_behind(held, self._device.fence(after))

    def _release_behind(self, lease: Lease, fence: Any) -> None:
        with self._giving_back(fence):
            self._engine.call(lambda core, now_s: core.expect_lease(lease))
            unmap, gone = self._sequences.ending_behind(lease)

        def release(core: Core, now_s: float) -> None:
            core.release_lease(lease)
            gone()

        self._engine.once_passed(fence, release, first=unmap)

    @contextmanager
    def _giving_back(self, fence: Any) -> Iterator[None]:
        """A fence is an event of the driver until it has passed: also that of a verb that was refused."""
        try:
            yield
        except KvtierError:
            self._engine.once_passed(fence, lambda core, now_s: None)
            raise

    def release_owner(self, owner: str) -> int:
        """Give back every lease and match in this name. Its owner must be proven dead: it writes no slot any more.

        Its reservations that still load are answered with NoRoom. Returns how many there were.
        """
        name = arguments.instance("owner", owner, str)
        self._sequences.end_owner(name)
        return self._engine.call(lambda core, now_s: core.release_owner(name))

    def prefetch(self, keys: Keys) -> None:
        """Announce a request: what of it lies only on disk comes into the lowest memory tier, within the budget."""
        self._engine.call(lambda core, now_s: core.prefetch(keys, now_s))

    def hint(
        self,
        session: str,
        *,
        ends: bool = False,
        returns_in_s: float | None = None,
        priority: int | None = None,
        pin: bool | None = None,
        ttl_s: float | None = None,
    ) -> None:
        """Say what is known of a session that `match` has named. It is evidence: a wrong one costs little.

        ends: it will not come back. returns_in_s: it will, in about so many seconds. priority: -1, its blocks leave
        before others; 1, after them; 0, as they do. pin: they leave when nothing else can. The last two hold until
        something else is said, the session ends, or `ttl_s` is over, and within `limits.pin_quota` of each tier.
        Never waits, and is never an error but for arguments that cannot be, or contradict each other (docs/policies.md
        says which): an unknown session is counted.
        """
        name = arguments.session_name(arguments.instance("session", session, str))
        advice = arguments.advice(ends, returns_in_s, priority, pin, ttl_s)
        self._engine.call(lambda core, now_s: core.hint(name, advice, now_s))

    def set_weights_epoch(self, epoch: str) -> None:
        """The weights have changed: look up and commit under a new identity; older blocks age out."""
        name = arguments.instance("epoch", epoch, str)
        self._engine.call(lambda core, now_s: core.set_weights_epoch(name))

    def stats(self) -> dict[str, Any]:
        """Counters and sizes, over all and by tier; reading them changes nothing."""
        return self._engine.call(lambda core, now_s: core.stats())

    def check(self) -> list[str]:
        """Recount all bookkeeping; an empty list means it agrees. Slow: for tests and doctors."""
        return self._engine.call(lambda core, now_s: core.check())

    # ------------------------------------------------------------ polled

    def submit(self, request: Request) -> int:
        """Ask without waiting (`kvtier.engine.polled`: Reserve, Store, Load); the answer comes from `poll`."""
        return self._engine.submit(arguments.one_of("request", request, get_args(Request)))

    def poll(self) -> list[tuple[int, Answer | Job]]:
        """Answers to what was submitted, as (ticket, answer); each is given once."""
        return self._engine.poll()

    def apply(self, done: BatchDone) -> None:
        """A foreign top tier reports how a `Job` ended: one outcome per key."""
        arguments.instance("done", done, BatchDone)
        self._engine.apply(done)

    # ------------------------------------------------------------ questions whose answers take I/O

    def _reserving(
        self, match: Match, blocks_total: int, load_deadline_s: float | None, streamed: bool
    ) -> Callable[[Core, float], int]:
        arguments.instance("match", match, Match)
        arguments.instance("streamed", streamed, bool)
        blocks = arguments.integer("blocks_total", blocks_total, at_least=1)
        default_s = self.config.limits.load_deadline_s
        patience_s = default_s if load_deadline_s is None else arguments.seconds("load_deadline_s", load_deadline_s)
        return lambda core, now_s: core.submit_reserve(match, blocks, now_s + patience_s, now_s, streamed=streamed)

    def _dropping(self, namespace: bytes | None) -> Callable[[Core, float], int]:
        fingerprint = arguments.optional("namespace", namespace, bytes)
        return lambda core, now_s: core.submit_drop(fingerprint)

    def _resizing(self, tier: str, size_bytes: int) -> Callable[[Core, float], int]:
        name = arguments.instance("tier", tier, str)
        wanted_bytes = arguments.integer("size_bytes", size_bytes)
        return lambda core, now_s: core.submit_resize(name, wanted_bytes)

    def _sleeping(self) -> Callable[[Core, float], int]:
        """Raises DeviceLost at once: work on a lost device that never ends must not be waited for."""
        self._engine.call(lambda core, now_s: core.refuse_if_lost())
        return lambda core, now_s: core.submit_sleep()

    def _waking(self, restore: bool) -> Callable[[Core, float], int]:
        again = arguments.instance("restore", restore, bool)
        return lambda core, now_s: core.submit_wake(restore=again)

    # ------------------------------------------------------------ start and end

    def _start(self, first: int = 0) -> None:
        if self._running is not None:
            raise UsageError("the cache is open already")
        self._running, self._top = start(self.config, first)
        self._device = self._top if isinstance(self._top, SupportsFences) else None
        shown, stride_bytes = getattr(self._top, "sequences", None), getattr(self._top, "stride_bytes", 0)
        self._sequence_views = SequenceViews(self._running, shown, stride_bytes, self._specs, self._device)

    def __del__(self) -> None:
        """Forgetting to close keeps a thread and a store's lock until the process ends: say so."""
        running = getattr(self, "_running", None)
        if running is not None and not running.closed:
            warnings.warn(f"a kvtier cache was never closed: {self!r}", ResourceWarning, source=self, stacklevel=2)

    def _stop(self) -> None:
        if self._running is not None:
            self._views.clear()
            self._running.close()
            if self._sequence_views is not None:
                self._sequence_views.forget()
