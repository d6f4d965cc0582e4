"""`TieredCache`: the asyncio face of the engine.

`match`, `commit`, `release`, `prefetch` and the other plain verbs never wait for I/O; `reserve`, `flush`, `drop`,
`reset` and `aclose` are coroutines, always. Their waiting is a wake-up from the engine's thread; no work is done on
the event loop. Units: tokens, seconds.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvtier.cache.leases import Lease, Match, NoRoom
from kvtier.config import Config
from kvtier.engine import arguments
from kvtier.engine.answers import Answer, Dropped, Flushed, Resized, Slept, Woken
from kvtier.engine.build import Configuration, loaded
from kvtier.engine.core import Core
from kvtier.engine.engine import Question, Reply
from kvtier.engine.verbs import CacheVerbs, answer_of
from kvtier.errors import KvtierError

CLOSING_S = 5.0  # how long a cancelled `aclose` waits for a disk; then the closing goes on without it


class TieredCache(CacheVerbs):
    """A cache over all configured tiers. Use as `async with kvtier.open(config) as cache`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    async def __aenter__(self) -> Self:
        """Open the tiers. If cancelled, what was opened is closed again."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._start))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await self._opened_for_nobody(opening)
            raise
        return self

    async def _opened_for_nobody(self, opening: asyncio.Future[None]) -> None:
        """Close what is just being opened, however often that is cancelled meanwhile."""
        while not opening.done():
            try:
                await asyncio.wait([opening])
            except asyncio.CancelledError:
                continue
        if not opening.cancelled() and opening.exception() is None:
            self._stop()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def reserve(
        self, match: Match, blocks_total: int, *, load_deadline_s: float | None = None, streamed: bool = False
    ) -> Lease | NoRoom:
        """Slots for `blocks_total` blocks, the matched prefix promoted into the first of them. Consumes the match.

        Waits for promotions only, at most `load_deadline_s` (default: the configuration's); then the prefix is cut:
        `lease.tokens_ready` says where to compute from. NoRoom if others hold the slots: the match stays valid.
        streamed: on a device, return when its stream has taken the copies; `lease.wait` makes yours wait for them.
        Cancelled: no slot is held, the match stays valid, loads that run end up in the cache.
        """
        answer = await self._answer(
            self._reserving(match, blocks_total, load_deadline_s, streamed),
            lambda core, ticket: core.give_up(ticket),
        )
        assert isinstance(answer, Lease | NoRoom)
        return answer

    async def flush(self) -> Flushed:
        """Copy all that lies only in memory to the lowest persistent tier, under its durability mode.

        Cancelled: the copying goes on.
        """
        answer = await self._answer(lambda core, now_s: core.submit_flush(), behind_fences=True)
        assert isinstance(answer, Flushed)
        return answer

    async def drop(self, namespace: bytes | None = None) -> Dropped:
        """Forget a namespace, by its 32-byte fingerprint, in all tiers: at once for lookups, durably on return.

        Cancelled: it is forgotten here, and the tiers go on erasing it.
        """
        answer = await self._answer(self._dropping(namespace))
        assert isinstance(answer, Dropped)
        return answer

    async def reset(self) -> Dropped:
        """Forget everything of the configured model, in all tiers. Cancelled: as `drop`."""
        return await self.drop(None)

    async def resize(self, tier: str, size_bytes: int) -> int:
        """Give a tier more or less memory while it is in use; returns the bytes that it has then.

        It grows as far as its `capacity_max` and the machine allow. It shrinks by what nobody leases: blocks are
        copied to the tier below before their memory goes back to the system, no pointer changes, nothing leased moves.
        An lmdb tier takes its new capacity at once; what is stored beyond a smaller one leaves in the moments after.
        Raises UsageError for a tier whose size is fixed, or a size without room for a block. Cancelled: it goes on.
        """
        answer = await self._answer(self._resizing(tier, size_bytes))
        assert isinstance(answer, Resized)
        return answer.bytes

    async def sleep(self) -> Slept:
        """Give all memory of the fastest tier back to the machine, as between two jobs of an engine; addresses stay.

        What lies only there is copied to the tiers below first, as far as they have room. Until `wake`, `reserve`,
        `commit` and the tier's `resize` raise Asleep, its slots must not be touched, and all else works. Raises
        UsageError while leases are held, or if the fastest tier is none of type gpu. Cancelled: it goes on.
        """
        answer = await self._answer(self._sleeping(), behind_fences=True)
        assert isinstance(answer, Slept)
        return answer

    async def wake(self, *, restore: bool = True) -> Woken:
        """Map the memory that `sleep` gave back at the same addresses, as much as the machine has: wake again for more.

        restore: bring what lay there up again meanwhile, used last first, into free slots only, and after every
        request's loads. Harmless when awake. Cancelled: it goes on.
        """
        answer = await self._answer(self._waking(restore))
        assert isinstance(answer, Woken)
        return answer

    async def aclose(self, flush_s: float = 20.0) -> int:
        """Flush for at most `flush_s`, then stop. Returns how many blocks a persistent tier should have but has not.

        Idempotent. Cancelled: what is not flushed yet is lost, all else is closed, unless a hung disk takes longer
        than a few seconds: then it is closed as soon as the disk answers.
        """
        flushing_s = arguments.seconds("flush_s", flush_s)
        if self._running is None or self._running.closed:
            return 0
        patience_s = None
        try:
            async with asyncio.timeout(flushing_s):
                await self.flush()
        except (TimeoutError, KvtierError):
            pass  # what is left is counted below
        except asyncio.CancelledError:
            patience_s = CLOSING_S
            raise
        finally:
            self._running.begin_close()  # before waiting: a loop that ends would cancel what has not begun
            await self._closed(patience_s)
        return self._running.unsaved_blocks

    async def _closed(self, patience_s: float | None) -> None:
        """Wait until the tiers are closed; cancelled, a while only, so that the store can be opened again."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._stop))
        try:
            await asyncio.wait([closing], timeout=patience_s)
        except asyncio.CancelledError:
            await asyncio.wait([closing], timeout=CLOSING_S)
            raise

    async def _answer(
        self,
        ask: Callable[[Core, float], int],
        give_up: Callable[[Core, int], None] | None = None,
        behind_fences: bool = False,
    ) -> Answer:
        """Ask for something that has a ticket and wait for its answer."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()

        def answered(reply: Reply) -> None:  # on the engine's thread
            try:
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(reply))
            except RuntimeError:  # the loop is gone, and with it whoever asked
                if isinstance(reply, Lease):
                    engine.post(lambda core, now_s: core.release_lease(reply))

        engine = self._engine
        question = Question(ask, answered, behind_fences)
        try:
            engine.ask(question)
            return answer_of(await future)
        except BaseException:  # cancelled, or the coroutine is thrown away with its loop: nobody would release it
            if give_up is not None:
                engine.abandon(question, give_up)
            raise


def open(config: Configuration) -> TieredCache:
    """A cache for asyncio: `async with kvtier.open(config) as cache`. Takes a Config, a YAML file or a mapping."""
    return TieredCache(loaded(config))
