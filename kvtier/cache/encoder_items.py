"""Multimodal items, and which of them each request holds in an encoder cache.

Owns: the holds. What an output's room and name become when a hold begins or ends is the cache's (`cache/encoder.py`).
Always:  a request that holds no item has no entry; 0 <= embeddings_free <= embeddings_total.
Units:   embeddings (rows of an output), tokens (positions in the prompt), indexes (of an item in its request).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvtier.cache.counts import expect_count
from kvtier.errors import UsageError

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class EncoderItem:
    """An image, a sound... that stands for the `length` tokens from `offset` on. `identifier` names its content.

    embeddings: rows of its output, at most one per token. spans: where they lie, as ascending [start, end) relative
    to `offset`; without it, any part of the item may hold some.
    """

    identifier: str
    offset: int
    length: int
    embeddings: int
    spans: Spans | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for a place that is none, and for spans that contradict `length` or `embeddings`."""
        if not isinstance(self.identifier, str) or not self.identifier:
            raise UsageError(f"identifier is {self.identifier!r}; pass a text that names the item's content")
        for name, least in (("offset", 0), ("length", 1), ("embeddings", 0)):
            expect_count(f"item {self.identifier!r}: {name}", getattr(self, name), least)
        if self.embeddings > self.length:
            raise UsageError(f"item {self.identifier!r}: {self.embeddings} embeddings for {self.length} tokens")
        if self.spans is not None:
            if not _are_pairs(self.spans):
                text = f"spans is {self.spans!r}; give a tuple of pairs (start, end), such as ((0, {self.length}),)"
                raise UsageError(f"item {self.identifier!r}: {text}")
            bounds = [0, *(bound for span in self.spans for bound in span), self.length]
            rows = sum(end - start for start, end in self.spans)
            if bounds != sorted(bounds) or rows != self.embeddings:
                text = f"spans {self.spans} are not {self.embeddings} of its {self.length} tokens, in ascending order"
                raise UsageError(f"item {self.identifier!r}: {text}")

    @property
    def end(self) -> int:
        """The token behind its last one."""
        return self.offset + self.length

    def has_embeddings_in(self, start: int, end: int) -> bool:
        """Whether the tokens [start, end) of the prompt may hold one of its embeddings."""
        spans = ((0, self.length),) if self.spans is None and self.embeddings else self.spans or ()
        return any(max(start, self.offset + low) < min(end, self.offset + high) for low, high in spans)


class HeldItems(ABC):
    """What both caches have: a capacity, and the items that each request holds.

    The indexes of a request lie in a set, and leave it in the order in which CPython walks it, for that is the order
    in which vLLM frees them, and so decides who is evicted first.
    """

    def __init__(self, embeddings_total: int) -> None:
        """Raises UsageError if there is no room for a single embedding."""
        expect_count("embeddings_total", embeddings_total, 1)
        self.embeddings_total = embeddings_total
        self.embeddings_free = embeddings_total
        self._indexes: dict[str, set[int]] = {}
        self._items: dict[str, dict[int, EncoderItem]] = {}

    def held(self, request_id: str) -> list[int]:
        """The items that a request holds, in the order in which `free` lets them go (get_cached_input_ids)."""
        _expect_request(request_id)
        return list(self._indexes.get(request_id, ()))

    def free_item(self, request_id: str, index: int) -> None:
        """A request needs one of its items no more (free_encoder_input).

        Raises UsageError if it does not hold that item: never had it, or freed it already.
        """
        _expect_request(request_id)
        expect_count("index", index, 0)
        items = self._items.get(request_id, {})
        if index not in items:
            raise UsageError(f"request {request_id!r} does not hold item {index}; it holds {sorted(items)}")
        item = items.pop(index)
        self._indexes[request_id].discard(index)
        if not items:
            del self._items[request_id], self._indexes[request_id]
        self._leave(request_id, item)

    def free(self, request_id: str) -> None:
        """A request ends or is preempted, and needs none of its items any more (free).

        Raises UsageError if it holds none, as one whose items have all passed: ask `held` first.
        """
        _expect_request(request_id)
        if request_id not in self._items:
            raise UsageError(f"request {request_id!r} holds no item; it is unknown, or freed already")
        for index in self.held(request_id):
            self.free_item(request_id, index)

    def expect_fit(self, item: EncoderItem) -> None:
        """Raises UsageError for what is no item, and for one larger than the whole cache, which would wait for ever."""
        expect_item(item)
        if item.embeddings > self.embeddings_total:
            text = f"{item.embeddings} embeddings never fit in an encoder cache of {self.embeddings_total}"
            raise UsageError(f"item {item.identifier!r}: {text}; send a smaller item, or enlarge the cache")

    def expect_same(self, request_id: str, index: int, item: EncoderItem) -> None:
        """Raises UsageError for an index that is none, or under which the request holds another item."""
        _expect_request(request_id)
        expect_count("index", index, 0)
        expect_item(item)
        held = self._items.get(request_id, {}).get(index, item)
        if held is not item and held != item:
            text = f"item {index} of request {request_id!r} is {held}, not {item}"
            raise UsageError(f"{text}; free it first")

    def reset(self) -> None:
        """Forget all outputs, as after a change of the weights; requests hold nothing any more (reset)."""
        self.embeddings_free = self.embeddings_total
        self._indexes.clear()
        self._items.clear()

    @abstractmethod
    def _leave(self, request_id: str, item: EncoderItem) -> None:
        """One item less is held."""

    def _hold(self, request_id: str, index: int, item: EncoderItem) -> bool:
        """One item more is held; False if it was already. Raises UsageError if the index means another item."""
        self.expect_same(request_id, index, item)
        indexes = self._indexes.setdefault(request_id, set())
        if index in indexes:
            return False
        indexes.add(index)
        self._items.setdefault(request_id, {})[index] = item
        return True

    def _expect_room(self, item: EncoderItem) -> None:
        expect_item(item)
        if item.embeddings > self.embeddings_free:
            text = f"item {item.identifier!r}: {item.embeddings} embeddings, {self.embeddings_free} are free"
            raise UsageError(f"{text}; allocate only what make_room granted")

    def _check_holds(self) -> list[str]:
        findings = []
        if {name: set(items) for name, items in self._items.items()} != self._indexes or {} in self._items.values():
            findings.append("encoder cache: the items held and their indexes disagree")
        if not 0 <= self.embeddings_free <= self.embeddings_total:
            findings.append(f"encoder cache: {self.embeddings_free} embeddings free of {self.embeddings_total}")
        return findings


def _are_pairs(spans: object) -> bool:
    return isinstance(spans, tuple) and all(
        isinstance(span, tuple) and len(span) == 2 and all(type(bound) is int for bound in span) for span in spans
    )


def _expect_request(request_id: object) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise UsageError(f"request id {request_id!r}; give a text that is not empty")


def expect_item(item: object) -> None:
    """Raises UsageError for what is no EncoderItem."""
    if not isinstance(item, EncoderItem):
        raise UsageError(f"item is {item!r}; pass an EncoderItem")


def expect_items(items: object) -> None:
    """Raises UsageError for what is no sequence of EncoderItem."""
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise UsageError(f"items is {items!r}; pass a list of EncoderItem, all of the request")
    for item in items:
        expect_item(item)


def check_order(items: Sequence[EncoderItem]) -> None:
    """Raises UsageError unless the items of a prompt lie one behind the other, as planning a step takes for granted."""
    expect_items(items)
    for item, following in pairwise(items):
        if following.offset < item.end:
            text = f"item {following.identifier!r} begins at token {following.offset}, inside or before"
            raise UsageError(f"{text} {item.identifier!r}, which ends at {item.end}; pass the items in order")
