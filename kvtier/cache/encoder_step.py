"""What of one request may be encoded in a step, and how far its tokens may then be computed.

Owns no state: the step's budget is passed along, outputs are the cache's (`cache/encoder.py`).
Always:  no token is computed whose item has no output; an item is encoded whole and at once, for its encoder attends
         in both directions; the items of a plan fit together into the cache and into the step.
Units:   tokens (positions in the prompt), embeddings, indexes (of an item in its request).

A scheduler calls `plan_encoding` for each request of a step, then `carry_out` if it schedules that request, then
`cache.take_evicted()` once; after the step `cache.free_passed(...)` for each. The decisions are those of vLLM 0.32's
scheduler, without its connectors to encoder caches elsewhere.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.cache.counts import expect_count, expect_flag
from kvtier.cache.encoder import EncoderCache, EncoderDecoderCache
from kvtier.cache.encoder_items import EncoderItem, check_order, expect_items
from kvtier.errors import UsageError


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """What a step does for one request, if the scheduler goes on with it.

    new_tokens: how many may be computed; with 0 the request is left out of the step, nothing is encoded for it, and
    compute_left is what it was.
    encode: indexes of the items to encode. repeats: further items with an output that `encode` makes.
    compute_left: embeddings that the step may compute for other requests.
    refused: why the request can never be served, None in all other cases.
    """

    new_tokens: int
    compute_left: int
    encode: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    refused: str | None = None


def plan_encoding(
    cache: EncoderCache | EncoderDecoderCache,
    request_id: str,
    items: Sequence[EncoderItem],
    computed_tokens: int,
    new_tokens: int,
    compute_left: int,
    *,
    lookahead_tokens: int = 0,
    split_items: bool = True,
) -> EncodingPlan:
    """Which items the tokens from `computed_tokens` on need encoded, and how many tokens that allows.

    items: all of the request, one behind the other, or those of an encoder-decoder at offset 0.
    lookahead_tokens: how far a drafter reads ahead.
    split_items: whether the tokens of one item may be computed in several steps.
    Changes the cache, plan carried out or not: the request holds each output that it finds there, and idle outputs
    leave for those to come. Raises UsageError, before that, for numbers that are no counts, for items out of order,
    for one that is larger than the cache, and for one in the place of another that the request holds.
    """
    _expect_cache(cache)
    for name, value in (
        ("computed_tokens", computed_tokens),
        ("new_tokens", new_tokens),
        ("compute_left", compute_left),
        ("lookahead_tokens", lookahead_tokens),
    ):
        expect_count(name, value, 0)
    expect_flag("split_items", split_items)
    _expect_order(cache, items)
    window = _window(cache, items, computed_tokens, new_tokens, lookahead_tokens)
    for index in window:
        cache.expect_fit(items[index])
        cache.expect_same(request_id, index, items[index])
    reach = computed_tokens + lookahead_tokens
    draft = _Draft(cache, request_id, compute_left)
    for index in window:
        item = items[index]
        if not split_items and computed_tokens < item.offset and computed_tokens + new_tokens < item.end:
            return draft.plan(max(0, item.offset - reach))
        embeddings = draft.embeddings_of(item)
        if embeddings not in (None, item.embeddings):
            text = f"item {index}, {item.identifier!r}, has {item.embeddings} embeddings, the output of that name has"
            return replace(draft.plan(0), refused=f"{text} {embeddings}")
        if draft.finds(index, item):
            continue
        if not cache.make_room(item, draft.compute_left, draft.embeddings_planned):
            return draft.plan(max(0, item.offset - reach))
        if item.has_embeddings_in(computed_tokens, reach + new_tokens):
            draft.encode(index, item)
    return draft.plan(new_tokens)


def carry_out(
    cache: EncoderCache | EncoderDecoderCache, request_id: str, items: Sequence[EncoderItem], plan: EncodingPlan
) -> None:
    """The scheduler goes on with a plan that it has just made: the request holds the outputs of all its items.

    To be called before the next plan is made. Does nothing for a plan without tokens: its request is not in the step.
    Raises UsageError, and changes nothing, if the plan was made for other items, or if the cache has changed so that
    it does not fit any more.
    """
    _expect_cache(cache)
    expect_items(items)
    held = set(cache.held(request_id))
    _expect_plan(request_id, items, plan)
    if plan.new_tokens == 0:
        return
    sharing = cache if isinstance(cache, EncoderCache) else None
    kept = sharing is not None and any(sharing.embeddings_of(items[i].identifier) is not None for i in plan.encode)
    embeddings = sum(items[index].embeddings for index in plan.encode)
    if kept or not held.isdisjoint((*plan.encode, *plan.repeats)) or embeddings > cache.embeddings_free:
        raise UsageError(f"the plan for request {request_id!r} does not fit the cache any more; plan again")
    for index in plan.encode:
        cache.allocate(request_id, index, items[index])
    if sharing is not None:  # nothing repeats where nothing is shared
        for index in plan.repeats:
            sharing.lookup(request_id, index, items[index])


def _expect_cache(cache: object) -> None:
    if not isinstance(cache, EncoderCache | EncoderDecoderCache):
        raise UsageError(f"cache is {cache!r}; pass an EncoderCache or an EncoderDecoderCache")


def _expect_order(cache: EncoderCache | EncoderDecoderCache, items: Sequence[EncoderItem]) -> None:
    expect_items(items)
    if isinstance(cache, EncoderCache) or any(item.offset for item in items):
        check_order(items)


def _expect_plan(request_id: str, items: Sequence[EncoderItem], plan: EncodingPlan) -> None:
    """A plan names items that there are, each once, and repeats only what it encodes."""
    if not isinstance(plan, EncodingPlan):
        raise UsageError(f"plan is {plan!r}; pass what plan_encoding returned")
    named = (*plan.encode, *plan.repeats)
    strange = [index for index in named if type(index) is not int or not 0 <= index < len(items)]
    if not strange and len(set(named)) == len(named):
        made = {(items[index].identifier, items[index].embeddings) for index in plan.encode}
        strange = [i for i in plan.repeats if (items[i].identifier, items[i].embeddings) not in made]
    if strange or len(set(named)) < len(named):
        text = f"the plan encodes items {plan.encode} and repeats {plan.repeats}, of {len(items)}"
        raise UsageError(f"request {request_id!r}: {text}; pass the items that it was made for")


def _window(
    cache: EncoderCache | EncoderDecoderCache,
    items: Sequence[EncoderItem],
    computed_tokens: int,
    new_tokens: int,
    lookahead_tokens: int,
) -> range:
    """The items that the tokens of this step touch, those included that a drafter reads ahead."""
    if new_tokens == 0:
        return range(0)
    end = computed_tokens + new_tokens + lookahead_tokens
    if isinstance(cache, EncoderDecoderCache):
        # All lie at offset 0: their tokens are the encoder's. The first token of the decoder is past them all.
        return range(0 if computed_tokens else bisect_left(items, end, key=lambda item: item.offset))
    first = bisect_left(items, computed_tokens + 1, key=lambda item: item.end)
    return range(first, bisect_left(items, end, key=lambda item: item.offset))


class _Draft:
    """A plan in the making: what it encodes so far, of how many embeddings."""

    def __init__(self, cache: EncoderCache | EncoderDecoderCache, request_id: str, compute_left: int) -> None:
        self.compute_left = self._compute_before = compute_left
        self.embeddings_planned = 0
        self._cache = cache
        self._request_id = request_id
        self._encode: list[int] = []
        self._repeats: list[int] = []
        self._planned: dict[str, int] = {}  # identifier -> embeddings

    def embeddings_of(self, item: EncoderItem) -> int | None:
        """The size of an output with that name, planned or kept."""
        if not isinstance(self._cache, EncoderCache):
            return None
        planned = self._planned.get(item.identifier)
        return self._cache.embeddings_of(item.identifier) if planned is None else planned

    def finds(self, index: int, item: EncoderItem) -> bool:
        """Whether the item needs no encoding of its own. An output that is kept is held from now on."""
        if not isinstance(self._cache, EncoderCache):
            return False
        if item.identifier in self._planned:
            self._repeats.append(index)
            return True
        return self._cache.lookup(self._request_id, index, item)

    def encode(self, index: int, item: EncoderItem) -> None:
        self._encode.append(index)
        self._planned[item.identifier] = item.embeddings
        self.embeddings_planned += item.embeddings
        self.compute_left -= item.embeddings

    def plan(self, new_tokens: int) -> EncodingPlan:
        if new_tokens == 0:  # a scheduler leaves the request out, and drops what it would have encoded
            return EncodingPlan(0, self._compute_before)
        return EncodingPlan(new_tokens, self.compute_left, tuple(self._encode), tuple(self._repeats))
