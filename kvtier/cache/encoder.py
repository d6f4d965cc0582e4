"""The outputs of a multimodal encoder: which are kept, who uses them, which leaves first.

Owns: names, sizes and users of the outputs. Owns no bytes: `take_evicted` says what the worker may drop.
Always:  embeddings_free + those of all outputs == embeddings_total; an output without users is idle, and idle ones
         leave only when room is needed, the longest idle first; a refused call changes nothing.
Units:   embeddings (rows of an output), tokens (positions in the prompt), indexes (of an item in its request).

`EncoderCache` shares an output among all requests that name it. `EncoderDecoderCache` shares nothing: there an
output is read once, by the step that turns it into cross-attention KV. Both decide as vLLM 0.32 does; each method
names the call that it equals. What a step may encode is decided in `cache/encoder_step.py`.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvtier.cache.counts import expect_count
from kvtier.cache.encoder_items import EncoderItem, HeldItems
from kvtier.errors import UsageError

__all__ = ["EncoderCache", "EncoderDecoderCache", "EncoderItem"]


@dataclass(slots=True)
class _Output:
    """One output that is kept. users: request -> how many of its items are this one."""

    embeddings: int
    users: dict[str, int] = field(default_factory=dict)


class EncoderCache(HeldItems):
    """Outputs by identifier, shared by all requests that name them (EncoderCacheManager)."""

    def __init__(self, embeddings_total: int) -> None:
        super().__init__(embeddings_total)
        self.embeddings_idle = 0
        self._outputs: dict[str, _Output] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # the longest idle first
        self._evicted: dict[str, None] = {}  # in order, since the last report

    def embeddings_of(self, identifier: str) -> int | None:
        """The size of an output, None if it is not kept (get_cached_num_encoder_embeds)."""
        output = self._outputs.get(identifier)
        return None if output is None else output.embeddings

    def lookup(self, request_id: str, index: int, item: EncoderItem) -> bool:
        """Whether the item's output is kept; if so the request holds it from now on (check_and_update_cache).

        Asking again for what is held changes nothing. Raises UsageError if the identifier is kept with another size.
        """
        self.expect_same(request_id, index, item)
        output = self._outputs.get(item.identifier)
        if output is None:
            return False
        if output.embeddings != item.embeddings:
            text = f"item {item.identifier!r} has {item.embeddings} embeddings, the output kept has {output.embeddings}"
            raise UsageError(f"{text}; other content needs another identifier")
        if self._hold(request_id, index, item):
            if not output.users:
                del self._idle[item.identifier]
                self.embeddings_idle -= output.embeddings
            output.users[request_id] = output.users.get(request_id, 0) + 1
        return True

    def make_room(self, item: EncoderItem, compute_left: int, embeddings_planned: int = 0) -> bool:
        """Whether the item may be encoded in this step (can_allocate). Yes evicts idle outputs, as many as needed.

        compute_left: embeddings that the step may still compute. embeddings_planned: of items that were granted
        before and are not allocated yet. Raises UsageError for an item larger than the cache, and for no counts.
        """
        self.expect_fit(item)
        _expect_budget(compute_left, embeddings_planned)
        needed = item.embeddings + embeddings_planned
        if item.embeddings > compute_left or needed > self.embeddings_free + self.embeddings_idle:
            return False
        while needed > self.embeddings_free:
            identifier, _ = self._idle.popitem(last=False)
            embeddings = self._outputs.pop(identifier).embeddings
            self.embeddings_idle -= embeddings
            self.embeddings_free += embeddings
            self._evicted[identifier] = None
        return True

    def allocate(self, request_id: str, index: int, item: EncoderItem) -> None:
        """The item will be encoded in this step: its output takes room, and the request holds it (allocate).

        Raises UsageError if the output is kept already, or without the room that `make_room` grants.
        """
        self.expect_same(request_id, index, item)
        if item.identifier in self._outputs:
            raise UsageError(f"the output of item {item.identifier!r} is kept already; use lookup to share it")
        self._expect_room(item)
        self._hold(request_id, index, item)  # never held already: then its output would be kept
        self._outputs[item.identifier] = _Output(item.embeddings, {request_id: 1})
        self.embeddings_free -= item.embeddings

    def free_passed(self, request_id: str, computed_tokens: int, ahead_tokens: int = 0) -> None:
        """After a step: free the items whose KV is computed (the scheduler's _free_encoder_inputs).

        ahead_tokens: how far behind the computed tokens an item must lie: the look-ahead of a drafter, and computed
        tokens that may yet be rejected. Raises UsageError for no counts.
        """
        _expect_passed(computed_tokens, ahead_tokens)
        for index in self.held(request_id):
            if self._items[request_id][index].end + ahead_tokens <= computed_tokens:
                self.free_item(request_id, index)

    def take_evicted(self) -> list[str]:
        """Identifiers evicted since the last call, each once, without those kept again (get_freed_mm_hashes)."""
        evicted, self._evicted = self._evicted, {}
        return [identifier for identifier in evicted if identifier not in self._outputs]

    def reset(self) -> None:
        super().reset()
        self.embeddings_idle = 0
        for kept in (self._outputs, self._idle, self._evicted):
            kept.clear()

    def check(self) -> list[str]:
        """Recount everything; an empty list means all invariants hold."""
        findings = self._check_holds()
        users: dict[str, dict[str, int]] = {identifier: {} for identifier in self._outputs}
        for request_id, items in self._items.items():
            for item in items.values():
                counts = users.setdefault(item.identifier, {})
                counts[request_id] = counts.get(request_id, 0) + 1
        if users != {identifier: output.users for identifier, output in self._outputs.items()}:
            findings.append("encoder cache: the users of outputs are not those who hold them")
        if set(self._idle) != {identifier for identifier, output in self._outputs.items() if not output.users}:
            findings.append("encoder cache: the idle outputs are not those without users")
        kept = sum(output.embeddings for output in self._outputs.values())
        if kept + self.embeddings_free != self.embeddings_total:
            findings.append(f"encoder cache: {kept} embeddings kept, {self.embeddings_free} free")
        idle = sum(output.embeddings for output in self._outputs.values() if not output.users)
        if idle != self.embeddings_idle:
            findings.append(f"encoder cache: {idle} embeddings idle, {self.embeddings_idle} counted")
        return findings

    def _leave(self, request_id: str, item: EncoderItem) -> None:
        output = self._outputs[item.identifier]
        output.users[request_id] -= 1
        if not output.users[request_id]:
            del output.users[request_id]
        if not output.users:
            self._idle[item.identifier] = None
            self.embeddings_idle += output.embeddings


class EncoderDecoderCache(HeldItems):
    """Outputs that nobody shares: each item is encoded for its own request (EncoderDecoderCacheManager).

    Room is given back when an item is freed. The output's name is reported one step after the step that allocated it,
    whether freed or not: by then that step has read it.
    """

    def __init__(self, embeddings_total: int) -> None:
        super().__init__(embeddings_total)
        self._allocated: dict[str, None] = {}  # in order, since the last report
        self._read: dict[str, None] = {}  # allocated before the last report, to be named by the next

    def make_room(self, item: EncoderItem, compute_left: int, embeddings_planned: int = 0) -> bool:
        """Whether the item may be encoded in this step (can_allocate). There is nothing to evict.

        compute_left, embeddings_planned, errors: as in `EncoderCache.make_room`.
        """
        self.expect_fit(item)
        _expect_budget(compute_left, embeddings_planned)
        return item.embeddings <= compute_left and item.embeddings + embeddings_planned <= self.embeddings_free

    def allocate(self, request_id: str, index: int, item: EncoderItem) -> None:
        """The item will be encoded in this step: its output takes room, and the request holds it (allocate).

        Raises UsageError if the request holds it already, or without the room that `make_room` grants.
        """
        self._expect_room(item)
        if not self._hold(request_id, index, item):
            raise UsageError(f"request {request_id!r} holds item {index} already; free it before it is encoded again")
        self.embeddings_free -= item.embeddings
        self._allocated[item.identifier] = None

    def free_passed(self, request_id: str, computed_tokens: int, ahead_tokens: int = 0) -> None:
        """After a step: free all items, if any token is computed (the scheduler's _free_encoder_inputs).

        The first token of the decoder has made the cross-attention KV of them all; `ahead_tokens` does not matter.
        Raises UsageError for no counts.
        """
        _expect_passed(computed_tokens, ahead_tokens)
        if computed_tokens > 0:
            for index in self.held(request_id):
                self.free_item(request_id, index)

    def take_evicted(self) -> list[str]:
        """Identifiers allocated before the previous call, each once (get_freed_mm_hashes): call once per step."""
        evicted, self._read, self._allocated = self._read, self._allocated, {}
        return list(evicted)

    def reset(self) -> None:
        super().reset()
        self._allocated.clear()
        self._read.clear()

    def check(self) -> list[str]:
        """Recount everything; an empty list means all invariants hold."""
        findings = self._check_holds()
        held = sum(item.embeddings for items in self._items.values() for item in items.values())
        if held + self.embeddings_free != self.embeddings_total:
            findings.append(f"encoder cache: {held} embeddings held, {self.embeddings_free} free")
        return findings

    def _leave(self, request_id: str, item: EncoderItem) -> None:
        self.embeddings_free += item.embeddings


def _expect_budget(compute_left: int, embeddings_planned: int) -> None:
    expect_count("compute_left", compute_left, 0)
    expect_count("embeddings_planned", embeddings_planned, 0)


def _expect_passed(computed_tokens: int, ahead_tokens: int) -> None:
    expect_count("computed_tokens", computed_tokens, 0)
    expect_count("ahead_tokens", ahead_tokens, 0)
