"""Part `managed`: a block manager's pages on the card: copied down behind the step's event, loaded into poisoned pages.

Owns no state. Every prompt is written once, then loaded from host memory, then by a new cache from the store. Finds: a
prompt that is not loaded whole, a block with other bytes, books that do not agree. KV follows from prompt and block, so
that every byte is judged.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.blocks.spec import block_specs
from kvtier.cache.request import Request
from kvtier.config import Config
from kvtier.engine.managed_cache import ManagedCache, open_managed
from kvtier.errors import KvtierError
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.paged import BLOCK_TOKENS, POISON
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.serving import configured

STEP_S = 1.0
STEPS_MAX = 60  # that one load may take


def measure(card: Card, record: Record) -> None:
    tokens = card.scale.prompt_blocks * BLOCK_TOKENS
    with configured(card) as config:
        with Pages(card, config, record) as pages:
            pages.serve_all("cold", 0)
            pages.poison()
            pages.serve_all("from host", tokens)
            unsound = pages.cache.check()
            record.expect(not unsound, f"the manager's books: {'; '.join(unsound)}")
        with Pages(card, config, record) as pages:
            pages.poison()
            pages.serve_all("from lmdb", tokens)


class Pages:
    """An engine over a manager's pages, whose work goes to the card's stream. Use with `with`."""

    def __init__(self, card: Card, config: Config, record: Record) -> None:
        self.card, self.record = card, record
        self.block_bytes = block_specs(config.model)[0].block_bytes
        self._event = card.streams.make_event()
        self.cache: ManagedCache = open_managed(config, tokens_max=2 * card.scale.prompt_blocks * BLOCK_TOKENS)
        view: Any = self.cache.kv(0, 0)["k"]  # a block's first segment
        self._address, self._stride_bytes = int(view.data.ptr), int(view.strides[0])

    def __enter__(self) -> "Pages":
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()
        self.card.streams.drop_event(self._event)

    def serve_all(self, when: str, tokens_wanted: int) -> None:
        """Each prompt as a request: what is not loaded is written, and what is, judged."""
        took_s, loaded_bytes = 0.0, 0
        for number in range(self.card.scale.prompts):
            start = time.perf_counter()
            request = self._begin(f"{when}, prompt {number}", number)
            took_s += time.perf_counter() - start
            found = request.computed_tokens
            self.record.expect(found == tokens_wanted, f"{when}, prompt {number}: {found} of {tokens_wanted} tokens")
            loaded_bytes += found // BLOCK_TOKENS * self.block_bytes
            self._compute(request, number, when)
            self.cache.step(after=self._behind())
            self.cache.free(request)
            self.flush()
        if tokens_wanted:
            self.record.measured(f"loaded through step(), {when}", loaded_bytes / max(took_s, 1e-9) / 1e9, "GB/s")

    def poison(self) -> None:
        """Nobody finds anything in the pages, and all of them hold what no block does."""
        if not self.cache.manager.reset():
            raise KvtierError("a page is in use although every request has ended")
        for page in range(1, self.cache.manager.pool.blocks_total):
            self.card.fill(self._address + page * self._stride_bytes, POISON, self._stride_bytes)

    def flush(self) -> None:
        if not self.cache.flush(STEPS_MAX * STEP_S, after=self._behind()):
            raise KvtierError("not all pages could be copied to the store")

    def _begin(self, name: str, number: int) -> Request:
        """A request with pages for all its tokens, loaded as far as it can be."""
        cache = self.cache
        count = self.card.scale.prompt_blocks * BLOCK_TOKENS
        request = cache.request(name, [(number * 1_000_003 + i) % 2**31 for i in range(count + 1)])
        lookup = cache.get_computed_blocks(request)
        if cache.allocate_slots(request, len(request.tokens) - lookup.hit.tokens, lookup) is None:
            raise KvtierError("the check's own pages are too few")
        if not cache.is_loading(request):
            request.computed_tokens = lookup.hit.tokens
            return request
        for _ in range(STEPS_MAX):
            if cache.step(STEP_S, after=self._behind()):
                cache.allocate_slots(request, len(request.tokens) - request.computed_tokens)
                return request
        raise KvtierError("a load does not end")

    def _compute(self, request: Request, number: int, when: str) -> None:
        found = np.empty(self.block_bytes, np.uint8)
        wrong = 0
        for index, page in enumerate(self.cache.manager.block_ids(request)[0]):
            address = self._address + page * self._stride_bytes
            if index < request.computed_tokens // BLOCK_TOKENS:
                self.card.get(address, found)
                wrong += not np.array_equal(found, self._content(number, index))
            else:
                self.card.put(address, self._content(number, index))
        request.computed_tokens = len(request.tokens)
        self.record.expect(wrong == 0, f"{when}, prompt {number}: {wrong} blocks have other bytes")

    def _content(self, number: int, index: int) -> NDArray[np.uint8]:
        """What block `index` of a prompt holds."""
        return np.random.default_rng([number, index]).integers(0, 256, self.block_bytes, np.uint8)

    def _behind(self) -> Any:
        """The event, behind all that the card's stream was given."""
        self.card.streams.record(self._event, self.card.stream)
        return self._event
