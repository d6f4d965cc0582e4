"""Two sides with the same verbs: kvtier's KVCacheManager, and vLLM's own, as an engine's scheduler calls them.

Owns nothing but the managers. Always: both sides are set up alike (same groups, blocks, hash and root); a verb does
what its manager does and no more, so what is measured is the manager's. Units: tokens, blocks.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from hashing import BLOCK_TOKENS, hasher_of

from kvtier.cache.manager import KVCacheManager
from kvtier.cache.specs import FullAttention, SlidingWindow
from kvtier.cache.specs import Group as KvtierGroup
from kvtier.errors import UsageError
from kvtier.events import BlockRemoved, BlocksStored

OURS, THEIRS = "kvtier", "vLLM"
HASH_NAME, ROOT = "sha256_cbor", "0"
TOKENS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """Full attention, or with `window` a sliding one."""

    block_tokens: int
    window: int | None = None


PLAIN = (Group(BLOCK_TOKENS),)
HYBRID = (Group(2 * BLOCK_TOKENS), Group(BLOCK_TOKENS, window=64 * BLOCK_TOKENS))


class Side(Protocol):
    """A manager. Requests and hits are what its own verbs take and give."""

    def request(self, request_id: str, tokens: list[int]) -> Any:
        """A new request, its blocks hashed."""

    def get(self, request: Any) -> Any:
        """The hit."""

    def allocate(self, request: Any, new_tokens: int, hit: Any) -> Any:
        """A request begins; None if there are too few blocks."""

    def grow(self, request: Any, new_tokens: int) -> Any:
        """A running request goes on."""

    def free(self, request: Any) -> None: ...

    def take_events(self) -> Any: ...

    # what follows is never measured

    def hit_tokens(self, hit: Any) -> int: ...

    def append(self, request: Any, token: int) -> None:
        """The model wrote a token."""

    def ran(self, request: Any, computed_tokens: int) -> None:
        """The step ended: so many tokens of the request are computed, and it is running."""

    def table(self, request: Any) -> tuple[list[int], ...]: ...

    def told(self, events: Any) -> tuple[int, int]:
        """How many names the events say were stored, and how many removed."""

    def forget(self) -> None:
        """All names, while no block is in use."""

    def scatter(self, order: Sequence[int]) -> None:
        """Put all blocks, which are free and have no names, into this order."""


class Ours:
    """kvtier's."""

    def __init__(self, groups: Sequence[Group], blocks_total: int, events: bool = False) -> None:
        self.manager = manager = KVCacheManager(
            [_our_group(group) for group in groups],
            blocks_total,
            tokens_max=TOKENS_MAX,
            hash_name=HASH_NAME,
            hash_seed=ROOT,
            hash_tokens=BLOCK_TOKENS,
            events=events,
        )
        self.get, self.free, self.take_events = manager.get_computed_blocks, manager.free, manager.take_events

    def request(self, request_id: str, tokens: list[int]) -> Any:
        return self.manager.request(request_id, tokens)

    def allocate(self, request: Any, new_tokens: int, hit: Any) -> Any:
        return self.manager.allocate_slots(request, new_tokens, hit)

    def grow(self, request: Any, new_tokens: int) -> Any:
        return self.manager.allocate_slots(request, new_tokens)

    def hit_tokens(self, hit: Any) -> int:
        return hit.tokens

    def append(self, request: Any, token: int) -> None:
        request.append([token])

    def ran(self, request: Any, computed_tokens: int) -> None:
        request.computed_tokens, request.running = computed_tokens, True

    def table(self, request: Any) -> tuple[list[int], ...]:
        return self.manager.block_ids(request)

    def told(self, events: Any) -> tuple[int, int]:
        stored = sum(len(event.hashes) for event in events if isinstance(event, BlocksStored))
        return stored, sum(isinstance(event, BlockRemoved) for event in events)

    def forget(self) -> None:
        assert self.manager.reset()

    def scatter(self, order: Sequence[int]) -> None:
        self.manager.pool.take(len(order))
        self.manager.pool.free(order)


class Theirs:
    """vLLM's."""

    def __init__(self, groups: Sequence[Group], blocks_total: int, events: bool = False) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        specs = [KVCacheGroupSpec([f"layer{i}"], _their_spec(group)) for i, group in enumerate(groups)]
        self.manager = manager = VllmManager(
            KVCacheConfig(num_blocks=blocks_total, kv_cache_tensors=[], kv_cache_groups=specs),
            max_model_len=TOKENS_MAX,
            scheduler_block_size=max(group.block_tokens for group in groups),
            hash_block_size=BLOCK_TOKENS,
            enable_caching=True,
            log_stats=False,
            enable_kv_cache_events=events,
        )
        self.get, self.free, self.take_events = manager.get_computed_blocks, manager.free, manager.take_events
        self._request, self._hasher = Request, hasher_of(HASH_NAME)
        self._sampling = SamplingParams(max_tokens=TOKENS_MAX)

    def request(self, request_id: str, tokens: list[int]) -> Any:
        return self._request(request_id, tokens, self._sampling, None, block_hasher=self._hasher)

    def allocate(self, request: Any, new_tokens: int, hit: Any) -> Any:
        return self.manager.allocate_slots(request, new_tokens, hit[1], hit[0])

    def grow(self, request: Any, new_tokens: int) -> Any:
        return self.manager.allocate_slots(request, new_tokens)

    def hit_tokens(self, hit: Any) -> int:
        return hit[1]

    def append(self, request: Any, token: int) -> None:
        request.append_output_token_ids(token)

    def ran(self, request: Any, computed_tokens: int) -> None:
        from vllm.v1.request import RequestStatus

        request.num_computed_tokens, request.status = computed_tokens, RequestStatus.RUNNING

    def table(self, request: Any) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(request.request_id)

    def told(self, events: Any) -> tuple[int, int]:
        counts = {"BlockStored": 0, "BlockRemoved": 0}
        for event in events:
            counts[type(event).__name__] += len(event.block_hashes)
        return counts["BlockStored"], counts["BlockRemoved"]

    def forget(self) -> None:
        assert self.manager.reset_prefix_cache()

    def scatter(self, order: Sequence[int]) -> None:
        pool = self.manager.block_pool
        pool.get_new_blocks(len(order))
        pool.free_blocks([pool.blocks[block] for block in order])


def sides() -> dict[str, type[Ours] | type[Theirs]]:
    """By name; vLLM's only where it is installed. Both hash from the same root."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["PYTHONHASHSEED"] = ROOT  # vLLM starts its chain from it
    return {OURS: Ours} if find_spec("vllm") is None else {OURS: Ours, THEIRS: Theirs}


def side_of(name: str) -> type[Ours] | type[Theirs]:
    """Raises UsageError for a side that is not there."""
    known = sides()
    if name not in known:
        raise UsageError(f"no {name!r} here; there are {', '.join(known)}")
    return known[name]


def _our_group(group: Group) -> KvtierGroup:
    heads: dict[str, Any] = {"kv_heads": 1, "head_dim": 1, "dtype": "float32", "block_tokens": group.block_tokens}
    return KvtierGroup(FullAttention(**heads) if group.window is None else SlidingWindow(**heads, window=group.window))


def _their_spec(group: Group) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    heads = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32, "block_size": group.block_tokens}
    return (
        FullAttentionSpec(**heads) if group.window is None else SlidingWindowSpec(**heads, sliding_window=group.window)
    )
