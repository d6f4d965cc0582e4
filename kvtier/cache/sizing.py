"""Memory divided into the blocks of a model: how many there are, what is lost to padding, how many requests fit.

Owns no state. Always: blocks_total x block_bytes <= memory_bytes < (blocks_total + 1) x block_bytes; block 0 is the
null block, which no request gets; one request of tokens_max tokens fits, or `size` refuses. Groups and pages come
from `cache/grouping`, specs of a model from `cache/models/layers`. Numbers are those of vLLM 0.32, so that its
figure for concurrency, which counts the null block as well, is ours. Units: bytes, tokens, blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from kvtier.cache.grouping import Grouping, aligned_to_state, group_layers
from kvtier.cache.specs import CrossAttention, FullAttention, Group, Mamba, Mla, Spec
from kvtier.config.units import readable_bytes
from kvtier.errors import ConfigError

TOKENS_IN_FLIGHT = 8192


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What a block holds when it is one of this group, and how many of them a request of tokens_max tokens holds.

    A block of the group is content_bytes + page_padding_bytes + layer_padding_bytes: pages that are larger than their
    content, and pages of layers that the widest group has and this one has not.
    """

    group: Group
    content_bytes: int
    page_padding_bytes: int
    layer_padding_bytes: int
    request_blocks: int

    @property
    def padding_bytes(self) -> int:
        return self.page_padding_bytes + self.layer_padding_bytes

    @property
    def padding_share(self) -> float:
        return self.padding_bytes / (self.padding_bytes + self.content_bytes)


@dataclass(frozen=True)
class Sizing:
    """A division of memory. `layers`: every layer's spec as its group keeps it. `str()` of it is a table.

    page_bytes: one layer's part of a block; of the largest layer, where one group holds layers of unequal pages.
    """

    groups: tuple[Group, ...]
    group_sizes: tuple[GroupSize, ...]
    layers: dict[str, Spec]
    memory_bytes: int
    page_bytes: int
    block_bytes: int
    blocks_total: int
    tokens_max: int
    tokens_in_flight: int

    @property
    def request_blocks(self) -> int:
        """The most blocks that a request of tokens_max tokens holds at once, over all groups."""
        return sum(size.request_blocks for size in self.group_sizes)

    @property
    def concurrency(self) -> float:
        """Requests of tokens_max tokens that fit at once."""
        return self.blocks_total / self.request_blocks

    @property
    def tokens_total(self) -> int:
        """Tokens of such requests that fit at once."""
        return int(self.concurrency * self.tokens_max)

    @cached_property
    def token_bytes(self) -> int:
        """What attention writes for one token, over all layers: states and cross attention don't grow with tokens."""
        specs = self.layers.values()
        return sum(s.content_bytes // s.block_tokens for s in specs if not isinstance(s, (Mamba, CrossAttention)))

    @cached_property
    def token_bytes_kept(self) -> int:
        """The part of `token_bytes` that stays until the request ends: no window passes over it."""
        specs = self.layers.values()
        return sum(s.content_bytes // s.block_tokens for s in specs if isinstance(s, (FullAttention, Mla)))

    @property
    def padding_bytes(self) -> int:
        """What is lost in the blocks of one request of tokens_max tokens."""
        return sum(size.request_blocks * size.padding_bytes for size in self.group_sizes)

    @property
    def padding_share(self) -> float:
        return self.padding_bytes / (self.request_blocks * self.block_bytes)

    def __str__(self) -> str:
        return describe(self)


def size(
    layers: Mapping[str, Spec],
    memory_bytes: int,
    *,
    tokens_max: int,
    tokens_in_flight: int = TOKENS_IN_FLIGHT,
    align_to_state: bool = True,
) -> Sizing:
    """Divide the memory among the layers.

    tokens_max: of the longest request. tokens_in_flight: the most tokens that are scheduled and whose step has not
    ended, that is tokens in a step x steps at once; windows and chunks keep so many more.
    align_to_state: where there are recurrent states, make attention blocks so long that a page holds a state
    (`grouping.aligned_to_state`); vLLM always does.
    Raises ConfigError when one request of tokens_max tokens does not fit, with what it needs, what there is and the
    longest that would fit; for layers that are no mapping to specs, numbers that are no counts; for pages that cannot
    be made equal.
    """
    for name, value in (("memory_bytes", memory_bytes), ("tokens_max", tokens_max)):
        _require_count(name, value, 1)
    _require_count("tokens_in_flight", tokens_in_flight, 0)
    if not isinstance(align_to_state, bool):
        raise ConfigError("align_to_state", f"{align_to_state!r} is neither true nor false", "Pass True or False.")
    grouping = group_layers(aligned_to_state(layers) if align_to_state else layers)
    blocks_total = memory_bytes // grouping.block_bytes
    sizing = Sizing(
        groups=grouping.groups,
        group_sizes=tuple(_group_size(grouping, g, tokens_max, tokens_in_flight) for g in grouping.groups),
        layers=grouping.layers,
        memory_bytes=memory_bytes,
        page_bytes=max(spec.page_bytes for spec in grouping.layers.values()),
        block_bytes=grouping.block_bytes,
        blocks_total=blocks_total,
        tokens_max=tokens_max,
        tokens_in_flight=tokens_in_flight,
    )
    if blocks_total < 1 + sizing.request_blocks:
        raise _too_little(sizing, grouping)
    return sizing


def describe(sizing: Sizing) -> str:
    """The division as plain text: totals, what a token costs, and a row for each group or run of groups alike."""
    rows: list[tuple[str, ...]] = [("group", "kind", "layers", "block", "page", "padding", "per request")]
    for cells, alike in groupby(enumerate(sizing.group_sizes), lambda numbered: _cells(sizing, numbered[1])):
        first, *rest = (str(index) for index, _ in alike)
        rows.append((f"{first}-{rest[-1]}" if rest else first, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    memory, block = readable_bytes(sizing.memory_bytes), readable_bytes(sizing.block_bytes)
    head = f"{memory}: {sizing.blocks_total:,} blocks of {block}"
    room = f"{sizing.concurrency:.2f} requests of {sizing.tokens_max:,} tokens, {sizing.tokens_total:,} tokens in all"
    cost = f"a token writes {sizing.token_bytes:,} bytes, of which {sizing.token_bytes_kept:,} stay"
    return "\n".join([head, room, f"{cost}; padding takes {sizing.padding_share:.1%}", *lines])


def _cells(sizing: Sizing, part: GroupSize) -> tuple[str, ...]:
    spec, layers = part.group.spec, part.group.layers
    page = readable_bytes(max(sizing.layers[name].page_bytes for name in layers))
    block, held = f"{spec.block_tokens} tokens", f"{part.request_blocks} blocks"
    return spec.kind, str(len(layers)), block, page, f"{part.padding_share:.1%}", held


def _group_size(grouping: Grouping, group: Group, tokens_max: int, tokens_in_flight: int) -> GroupSize:
    specs = [grouping.layers[name] for name in group.layers]
    content_bytes, pages_bytes = sum(s.content_bytes for s in specs), sum(s.page_bytes for s in specs)
    return GroupSize(
        group=group,
        content_bytes=content_bytes,
        page_padding_bytes=pages_bytes - content_bytes,
        layer_padding_bytes=grouping.block_bytes - pages_bytes,
        request_blocks=max(spec.blocks_max(tokens_max, tokens_in_flight) for spec in specs),
    )


def _too_little(sizing: Sizing, grouping: Grouping) -> ConfigError:
    needed_bytes = (sizing.request_blocks + 1) * sizing.block_bytes
    tokens = _longest(grouping, sizing.blocks_total - 1, sizing.tokens_max, sizing.tokens_in_flight)
    problem = (
        f"a request of {sizing.tokens_max} tokens needs {readable_bytes(needed_bytes, up=True)}, which are"
        f" {sizing.request_blocks} blocks and the null block of {readable_bytes(sizing.block_bytes)} each;"
        f" {readable_bytes(sizing.memory_bytes)} hold {sizing.blocks_total}"
    )
    shorter = f", or set tokens_max to at most {tokens}" if tokens else "; not even a request of one token fits"
    return ConfigError("memory_bytes", problem, f"Give at least {needed_bytes} bytes{shorter}.")


def _longest(grouping: Grouping, blocks: int, tokens_max: int, tokens_in_flight: int) -> int:
    """The most tokens, less than tokens_max, of a request that holds at most so many blocks. 0 if there is none."""
    fits, too_many = 0, tokens_max
    while too_many - fits > 1:
        tokens = (fits + too_many) // 2
        held = sum(_group_size(grouping, group, tokens, tokens_in_flight).request_blocks for group in grouping.groups)
        fits, too_many = (tokens, too_many) if held <= blocks else (fits, tokens)
    return fits


def _require_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, f"{value!r} is not a whole number from {least} on", "Write bytes or tokens so.")
