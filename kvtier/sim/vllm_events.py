"""Requests, as far as vLLM's KV events tell of them.

An event says which blocks were stored behind which parent; the parents before that make it a prompt. A batch is
[ts, events, rank] or {"ts": ..., "events": ..., "data_parallel_rank": ...}, the rank being optional, an event
{"type": "BlockStored", ...} or ["BlockStored", ...] as vLLM encoded it at the time. An event whose parent is the last
block of a request of that rank continues that request, if it comes soon enough (prompts are stored in chunks, and
answers block by block as they grow); any other begins one.

Owns the chains seen so far. Not to be seen in such a log: a request that found all its blocks (it stores none), where
a prompt ends and an answer begins, and a partial last block. So hits are fewer than they were, and answers count as
input. Only blocks of the first group in GPU memory count. Units: tokens, seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.sim.trace import Numbers, TracedRequest

STORED = "BlockStored"
FIELDS = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "medium", "lora_name", "extra_keys", "group_idx"),
)
CONTINUES_WITHIN_S = 2.0  # a block of an answer takes a part of a second; a person or a tool takes longer
TIME_MAX = 1e15
FAR = ("CPU", "STORAGE")  # mediums below the GPU

Name = int | str


@dataclass(slots=True)
class _Growing:
    """A request: since when, the time of its latest event, and its blocks."""

    at_s: float
    until_s: float
    blocks: list[Name]


class EventChains:
    """Takes batches in the order of the log."""

    def __init__(self) -> None:
        self.block_tokens = 0
        self._parents: dict[Name, Name | None] = {}
        self._requests: list[_Growing] = []
        self._tips: dict[tuple[int, Name], _Growing] = {}  # rank, last block -> its latest request that ends with it

    def add(self, batch: Any) -> None:
        """Raises ValueError for what is no batch of events."""
        at_s, events, rank = _batch(batch)
        for event in map(_event, events):
            if event.get("type") == STORED and event.get("medium") not in FAR and not event.get("group_idx"):
                self._stored(at_s, rank, event)

    def requests(self) -> list[TracedRequest]:
        """Those of which something was stored, by their first event; times count from the first one."""
        numbers = Numbers()
        start_s = min((request.at_s for request in self._requests), default=0.0)
        return [
            TracedRequest(r.at_s - start_s, len(r.blocks) * self.block_tokens, 0, [numbers[name] for name in r.blocks])
            for r in self._requests
        ]

    def _stored(self, at_s: float, rank: int, event: dict[str, Any]) -> None:
        names, parent = _names(event.get("block_hashes")), event.get("parent_block_hash")
        self._expect_size(event.get("block_size"))
        before: Name | None = None if parent is None else _names([parent])[0]
        for name in names:
            self._parents[name] = before
            before = name
        request = None if parent is None else self._tips.pop((rank, parent), None)
        if request is None or at_s - request.until_s > CONTINUES_WITHIN_S:
            request = _Growing(at_s, at_s, self._chain_to(parent))
            self._requests.append(request)
        request.blocks += names
        if len(set(request.blocks)) != len(request.blocks):
            raise ValueError("a block is stored behind itself")
        request.until_s = at_s
        self._tips[rank, names[-1]] = request

    def _expect_size(self, size: Any) -> None:
        if type(size) is not int or size < 1 or (self.block_tokens and size != self.block_tokens):
            wanted = f", not {self.block_tokens}" if self.block_tokens else ""
            raise ValueError(f"a block of {size!r:.40} tokens{wanted}")
        self.block_tokens = size

    def _chain_to(self, name: Name | None) -> list[Name]:
        """The blocks from the start of the prompt, or of the log, to this one."""
        blocks: list[Name] = []
        seen = set()
        while name is not None:
            if name in seen:
                raise ValueError("a block is stored behind itself")
            seen.add(name)
            blocks.append(name)
            name = self._parents.get(name)
        return blocks[::-1]


def _batch(batch: Any) -> tuple[float, list[Any], int]:
    """When it was published, its events, and the rank that has stored the blocks (0 where it is not told)."""
    at_s, events, rank = None, None, None
    if isinstance(batch, dict):
        at_s, events, rank = batch.get("ts"), batch.get("events"), batch.get("data_parallel_rank")
    elif isinstance(batch, list) and len(batch) >= 2:
        at_s, events, rank = (*batch, None)[:3]
    if (
        isinstance(at_s, bool)
        or not isinstance(at_s, int | float)
        or not 0 <= at_s < TIME_MAX
        or not isinstance(events, list)
        or not (rank is None or type(rank) is int)
    ):
        raise ValueError("it is no batch of KV events")
    return float(at_s), events, rank or 0


def _event(event: Any) -> dict[str, Any]:
    if isinstance(event, list):
        event = dict(zip(FIELDS, event, strict=False))
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise ValueError("it holds what is no KV event")
    return event


def _names(names: Any) -> Sequence[Name]:
    if not isinstance(names, list) or not names or not {*map(type, names)} <= {int, str}:
        raise ValueError("its block hashes are no list of whole numbers or texts")
    return names
