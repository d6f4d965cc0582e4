"""What a caller of the manager may hand in, and what the error says otherwise.

Owns nothing. Always: raises UsageError before anything has changed. Units: tokens, blocks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvtier.allocator.block_pool import BlockPool
from kvtier.cache.coordinator import Hit
from kvtier.cache.counts import expect_count, expect_flag, expect_share
from kvtier.cache.groups.rules import Rules
from kvtier.cache.request import Request
from kvtier.cache.specs import CrossAttention, Group, Spec
from kvtier.errors import UsageError


def check_settings(
    groups: object, tokens_max: object, tokens_in_flight: object, watermark: object, flags: dict[str, object]
) -> None:
    """Raises UsageError for arguments of a manager that are not what they should be."""
    if not isinstance(groups, Sequence) or isinstance(groups, str) or not groups:
        raise UsageError(f"groups is {groups!r}; give a list with a Group per kind of layer")
    for group in groups:
        if not isinstance(group, Group) or not isinstance(group.spec, Spec):
            raise UsageError(f"{group!r} is no group; give Group(spec), with a spec of kvtier.cache.specs")
    expect_count("tokens_max", tokens_max, 1)
    if tokens_in_flight is not None:
        expect_count("tokens_in_flight", tokens_in_flight, 1)
    expect_share("watermark", watermark)
    for name, value in flags.items():
        expect_flag(name, value)


def expect_request(request: Any, manager: object) -> None:
    """Raises UsageError for what is no request of this manager."""
    if not isinstance(request, Request):
        raise UsageError(f"{request!r} is no request; make one with the manager's `request`")
    if request.home is not manager:
        raise UsageError(f"request {request.request_id!r} is another manager's; make it with this one's `request`")


def expect_holder(request: Any, manager: object, holders: Mapping[str, Request]) -> None:
    """Raises UsageError for a request that holds no blocks of this manager."""
    expect_request(request, manager)
    if holders.get(request.request_id) is not request:
        text = f"request {request.request_id!r} holds no blocks: it got none, or was freed"
        raise UsageError(f"{text}; free each request once")


class Manager(Protocol):
    """What of a manager is looked at."""

    rules: Rules
    groups: tuple[Group, ...]
    pool: BlockPool

    def get_computed_blocks(self, request: Request) -> Hit: ...


def check_growth(
    request: Request,
    holder: Request | None,
    begun: bool,
    manager: Manager,
    hit: Hit | None,
    new: int,
    external: int,
    encoder: int,
    delayed: bool,
) -> None:
    """Raises UsageError for a step that cannot be meant.

    holder: the request of that id that holds blocks. begun: some of them are named or adopted.
    """
    tokens_max = manager.rules.tokens_max
    name = f"request {request.request_id!r}"
    expect_count("new_tokens", new, 0)
    expect_count("external_tokens", external, 0)
    if hit is not None and not isinstance(hit, Hit):
        raise UsageError(f"hit is {hit!r}; give what get_computed_blocks returned")
    hit_tokens = 0 if hit is None else hit.tokens
    expect_count(f"{name}: computed_tokens", request.computed_tokens, 0)
    expect_count(f"{name}: in_flight_tokens", request.in_flight_tokens, 0)
    if not (new or external or hit_tokens):
        raise UsageError(f"{name} asks for nothing; give new_tokens, external_tokens or a hit")
    if request.computed_tokens + hit_tokens + external + new > tokens_max:
        raise UsageError(f"{name} would exceed tokens_max, {tokens_max}; end it before")
    if external and not delayed and hit_tokens + request.computed_tokens + external >= len(request.tokens):
        text = f"{name}: {external} external tokens behind {hit_tokens} of {len(request.tokens)}"
        raise UsageError(f"{text}; leave at least the last one to be computed, for its logits")
    if external and holder is request and not begun:
        raise UsageError(f"{name} has blocks, and takes no external tokens; give them when it begins")
    if holder is not None and holder is not request:
        raise UsageError(f"another {name} holds blocks; give each an id of its own, or free it first")
    if holder is None and request.computed_tokens:
        text = f"{name} holds no blocks, but has computed_tokens {request.computed_tokens!r}"
        raise UsageError(f"{text}; set it to 0 to begin again (`preempt` does)")
    if hit is not None and any(hit.groups):
        if holder is request:
            raise UsageError(f"{name} has blocks and takes no hit; free or preempt it first")
        if hit.request is not request:
            raise UsageError(f"{name}: the hit is another request's; call get_computed_blocks for this one")
        if hit.version != manager.pool.names.version and manager.get_computed_blocks(request).groups != hit.groups:
            raise UsageError(f"{name}: its hit is gone; call get_computed_blocks just before")
    if holder is None:
        _check_encoder(manager.groups, encoder)


def _check_encoder(groups: Sequence[Group], encoder_tokens: int) -> None:
    """Raises UsageError for tokens of an encoder that no layer reads, or more than the layers were made for."""
    limits = [group.spec.encoder_tokens_max for group in groups if isinstance(group.spec, CrossAttention)]
    expect_count("encoder_tokens", encoder_tokens, 0)
    if encoder_tokens > min(limits, default=0):
        raise UsageError(f"encoder_tokens is {encoder_tokens}, more than encoder_tokens_max, {min(limits, default=0)}")
