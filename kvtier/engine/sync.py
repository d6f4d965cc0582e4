"""`SyncCache`: the blocking face of the engine, for callers without an event loop.

The same verbs as `TieredCache`; what is a coroutine there blocks here until its answer is there. Any thread may
call. Units: tokens, seconds.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvtier.cache.leases import Lease, Match, NoRoom
from kvtier.engine import arguments
from kvtier.engine.answers import Answer, Dropped, Flushed, Resized, Slept, Woken
from kvtier.engine.build import Configuration, loaded
from kvtier.engine.core import Core
from kvtier.engine.engine import Question, Reply
from kvtier.engine.oneshot import OneShot
from kvtier.engine.verbs import CacheVerbs, answer_of
from kvtier.errors import KvtierError


class SyncCache(CacheVerbs):
    """A cache over all configured tiers. Use as `with kvtier.open_sync(config) as cache`."""

    def __enter__(self) -> Self:
        if self._running is None:  # open_sync has opened it
            self._start()
        self._engine.refuse_if_unusable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reserve(
        self, match: Match, blocks_total: int, *, load_deadline_s: float | None = None, streamed: bool = False
    ) -> Lease | NoRoom:
        """Slots for `blocks_total` blocks, the matched prefix promoted into the first of them. Consumes the match.

        Blocks for promotions only, at most `load_deadline_s` (default: the configuration's); then the prefix is
        cut: `lease.tokens_ready` says where to compute from. NoRoom if others hold the slots: the match stays valid.
        streamed: on a device, return when its stream has taken the copies; `lease.wait` makes yours wait for them.
        """
        answer = self._answer(
            self._reserving(match, blocks_total, load_deadline_s, streamed),
            lambda core, ticket: core.give_up(ticket),
        )
        assert isinstance(answer, Lease | NoRoom)
        return answer

    def flush(self, timeout_s: float | None = None) -> Flushed:
        """Copy all that lies only in memory to the lowest persistent tier, under its durability mode.

        Raises TimeoutError after `timeout_s` (None: never); the copying goes on.
        """
        patience_s = None if timeout_s is None else arguments.seconds("timeout_s", timeout_s)
        answer = self._answer(lambda core, now_s: core.submit_flush(), timeout_s=patience_s, behind_fences=True)
        assert isinstance(answer, Flushed)
        return answer

    def drop(self, namespace: bytes | None = None) -> Dropped:
        """Forget a namespace, by its 32-byte fingerprint, in all tiers: at once for lookups, durably on return."""
        answer = self._answer(self._dropping(namespace))
        assert isinstance(answer, Dropped)
        return answer

    def reset(self) -> Dropped:
        """Forget everything of the configured model, in all tiers."""
        return self.drop(None)

    def resize(self, tier: str, size_bytes: int) -> int:
        """Give a tier more or less memory while it is in use; returns the bytes that it has then.

        It grows as far as its `capacity_max` and the machine allow. It shrinks by what nobody leases: blocks are
        copied to the tier below before their memory goes back to the system, no pointer changes, nothing leased moves.
        An lmdb tier takes its new capacity at once; what is stored beyond a smaller one leaves in the moments after.
        Raises UsageError for a tier whose size is fixed, or a size without room for a block.
        """
        answer = self._answer(self._resizing(tier, size_bytes))
        assert isinstance(answer, Resized)
        return answer.bytes

    def sleep(self) -> Slept:
        """Give all memory of the fastest tier back to the machine, as between two jobs of an engine; addresses stay.

        What lies only there is copied to the tiers below first, as far as they have room. Until `wake`, `reserve`,
        `commit` and the tier's `resize` raise Asleep, its slots must not be touched, and all else works. Raises
        UsageError while leases are held, or if the fastest tier is none of type gpu.
        """
        answer = self._answer(self._sleeping(), behind_fences=True)
        assert isinstance(answer, Slept)
        return answer

    def wake(self, *, restore: bool = True) -> Woken:
        """Map the memory that `sleep` gave back at the same addresses, as much as the machine has: wake again for more.

        restore: bring what lay there up again meanwhile, used last first, into free slots only, and after every
        request's loads. Harmless when awake.
        """
        answer = self._answer(self._waking(restore))
        assert isinstance(answer, Woken)
        return answer

    def close(self, flush_s: float = 20.0) -> int:
        """Flush for at most `flush_s`, then stop. Returns how many blocks a persistent tier should have but has not.

        Idempotent.
        """
        patience_s = arguments.seconds("flush_s", flush_s)
        if self._running is None or self._running.closed:
            return 0
        try:
            self.flush(timeout_s=patience_s)
        except (TimeoutError, KvtierError):
            pass  # what is left is counted below
        finally:
            self._stop()
        return self._running.unsaved_blocks

    def _answer(
        self,
        ask: Callable[[Core, float], int],
        give_up: Callable[[Core, int], None] | None = None,
        timeout_s: float | None = None,
        behind_fences: bool = False,
    ) -> Answer:
        """Ask for something that has a ticket and block until its answer is there."""
        answer: OneShot[Reply] = OneShot()
        engine = self._engine
        question = Question(ask, answer.send, behind_fences)
        try:
            engine.ask(question)
            return answer_of(answer.receive(timeout_s))
        except BaseException:  # KeyboardInterrupt above all: nobody would release what comes
            if give_up is not None:
                engine.abandon(question, give_up)
            raise


def open_sync(config: Configuration) -> SyncCache:
    """An open cache with blocking verbs: close it, or use it in a `with`. Takes a Config, a YAML file or a mapping."""
    cache = SyncCache(loaded(config))
    cache._start()
    return cache
