"""Layers put into groups that draw equal blocks from one pool.

Owns no state. Always: every layer is in exactly one group; where there are several groups, all pages are equal and
no group has more layers than the widest, so that a block of one group can be a block of any other. The rules are
vLLM 0.32's for layouts whose outermost axis is the layer, so that its block tables and ours are the same.
Units: bytes, tokens.

    layers of one kind                      one group, pages as they are
    else, a page smaller than the largest
        a recurrent state                   padded: a state has one size, however many tokens a block has
        divides the largest                 more tokens in a block
        other attention                     padded
        a latent (mla)                      not possible: its kernels step in whole rows of tokens
    then groups of g layers, g = the fewest layers of a kind, or the most if that is less than 1.5 times as many
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtier.cache.specs import ChunkedLocal, CrossAttention, FullAttention, Group, Mamba, Mla, SlidingWindow, Spec
from kvtier.config.model_files import shown
from kvtier.errors import ConfigError

MLA_BLOCK_TOKENS = 128  # beside a state, a latent's block is a multiple of this: its kernels read 128 tokens at once


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups, and every layer's spec as its group keeps it: block_tokens raised, pages padded."""

    groups: tuple[Group, ...]
    layers: dict[str, Spec]

    @property
    def block_bytes(self) -> int:
        """A block holds one page for each layer of the widest group."""
        return max(sum(self.layers[name].page_bytes for name in group.layers) for group in self.groups)


def group_layers(layers: Mapping[str, Spec]) -> Grouping:
    """The groups, in the order in which their kinds first appear.

    Raises ConfigError for what is no mapping of names to specs, and for pages that cannot be equal.
    """
    _expect_layers(layers)
    if not layers:
        raise ConfigError("layers", "there are none", "Describe at least one layer that keeps something.")
    plain = {name: _without_repetition(spec) for name, spec in layers.items()}
    if _of_one_kind(plain):
        return _one_group(plain)
    try:
        equal = _with_equal_pages(plain)
    except ConfigError:
        whole = _windows_kept_whole(plain)
        if whole is None:
            raise
        return _one_group(whole)
    return Grouping(_groups_of_equal_width(equal), equal)


def aligned_to_state(layers: Mapping[str, Spec]) -> dict[str, Spec]:
    """Attention blocks of so many tokens that a page holds a recurrent state, and states padded to that page.

    Changes nothing unless there are both. Without it, a state larger than an attention page would pad every
    attention page to its own size. Raises ConfigError when attention layers differ in block_tokens.
    """
    _expect_layers(layers)
    states = [spec for spec in layers.values() if isinstance(spec, Mamba)]
    attention = [spec for spec in layers.values() if not isinstance(spec, Mamba)]
    if not states or not attention:
        return dict(layers)
    sizes = {spec.block_tokens for spec in attention}
    if len(sizes) > 1:
        problem = f"attention layers have blocks of {', '.join(map(str, sorted(sizes)))} tokens"
        raise ConfigError("layers", problem, "Give them one block_tokens, or size with align_to_state=False.")
    kept = next((spec for spec in attention if isinstance(spec, (FullAttention, Mla))), attention[0])
    token_bytes = kept.content_bytes // kept.block_tokens
    step_tokens = max(kept.block_tokens, MLA_BLOCK_TOKENS) if isinstance(kept, Mla) else kept.block_tokens
    state_bytes = max(spec.content_bytes for spec in states)
    block_tokens = step_tokens * -(-state_bytes // (step_tokens * token_bytes))
    page_bytes = block_tokens * token_bytes
    return {name: _aligned(spec, block_tokens, page_bytes) for name, spec in layers.items()}


def _expect_layers(layers: object) -> None:
    remedy = "Pass what layers_of(description) returns: the spec of every layer, by name."
    if not isinstance(layers, Mapping):
        raise ConfigError("layers", f"{shown(layers)} is no mapping", remedy)
    for name, spec in layers.items():
        if not isinstance(spec, Spec):
            raise ConfigError("layers", f"{name!r} is {shown(spec)}, which is no spec of a layer", remedy)


def _aligned(spec: Spec, block_tokens: int, page_bytes: int) -> Spec:
    if not isinstance(spec, Mamba):
        return replace(spec, block_tokens=block_tokens)
    padded_bytes = page_bytes if page_bytes > spec.content_bytes else None
    # Steps end on block boundaries of all groups at once; where a state is kept per block, its blocks are its own.
    own_tokens = block_tokens if spec.mode == "align" else spec.block_tokens
    return replace(spec, padded_bytes=padded_bytes, block_tokens=own_tokens)


def _without_repetition(spec: Spec) -> Spec:
    """Equal layers must compare equal: a value as wide as a key need not be said."""
    if isinstance(spec, (FullAttention, SlidingWindow, ChunkedLocal, CrossAttention)):
        return replace(spec, value_dim=None if spec.value_dim == spec.head_dim else spec.value_dim)
    return spec


def _of_one_kind(layers: Mapping[str, Spec]) -> bool:
    return len({(_kind(spec), spec.block_tokens) for spec in layers.values()}) == 1


def _kind(spec: Spec) -> object:
    """Equal for layers that keep blocks of the same tokens at any time, whatever their shapes."""
    if isinstance(spec, (FullAttention, Mla)):
        return "full"
    if isinstance(spec, SlidingWindow):
        return spec.kind, spec.window
    if isinstance(spec, ChunkedLocal):
        return spec.kind, spec.chunk_tokens
    if isinstance(spec, Mamba):
        return spec.kind, spec.speculative_blocks, spec.page_bytes
    if isinstance(spec, CrossAttention):
        return spec.kind
    return spec  # a kind that others added: only equal layers share a block table


def _one_group(layers: dict[str, Spec]) -> Grouping:
    return Grouping((Group(next(iter(layers.values())), tuple(layers)),), layers)


def _with_equal_pages(layers: Mapping[str, Spec]) -> dict[str, Spec]:
    page_bytes = max(spec.page_bytes for spec in layers.values())
    return {name: _with_page(name, spec, page_bytes) for name, spec in layers.items()}


def _with_page(name: str, spec: Spec, page_bytes: int) -> Spec:
    if spec.page_bytes == page_bytes:
        return spec
    if not isinstance(spec, Mamba) and spec.padded_bytes is None and page_bytes % spec.page_bytes == 0:
        return replace(spec, block_tokens=spec.block_tokens * (page_bytes // spec.page_bytes))
    if not isinstance(spec, Mla):
        return replace(spec, padded_bytes=page_bytes)
    problem = f"a latent page of {spec.page_bytes} bytes does not divide the largest page, {page_bytes} bytes"
    raise ConfigError(name, problem, "Choose block_tokens so that it does: a latent page cannot be padded.")


def _windows_kept_whole(layers: Mapping[str, Spec]) -> dict[str, Spec] | None:
    """Windows beside latents keep every token, as one group, where pages cannot be equal. None if that is no way."""
    sizes = {spec.block_tokens for spec in layers.values() if isinstance(spec, (FullAttention, Mla))}
    block_tokens = sizes.pop() if len(sizes) == 1 else None
    whole = {
        name: _kept_whole(spec, block_tokens or spec.block_tokens) if isinstance(spec, SlidingWindow) else spec
        for name, spec in layers.items()
    }
    return whole if _of_one_kind(whole) else None


def _kept_whole(spec: SlidingWindow, block_tokens: int) -> FullAttention:
    whole = FullAttention(
        block_tokens=block_tokens,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        dtype=spec.dtype,
    )
    if spec.padded_bytes is None:
        return whole
    return replace(whole, padded_bytes=max(spec.padded_bytes, whole.content_bytes))


def _groups_of_equal_width(layers: Mapping[str, Spec]) -> tuple[Group, ...]:
    alike: dict[Spec, list[str]] = {}
    for name, spec in layers.items():
        alike.setdefault(spec, []).append(name)
    fewest, most = min(map(len, alike.values())), max(map(len, alike.values()))
    # A few padding layers cost less than a second group of a kind whose last group is almost empty.
    width = most if 2 * most < 3 * fewest else fewest
    groups = []
    for spec, names in alike.items():
        count = -(-len(names) // width)
        # Interleaved: a pipeline stage, which has a run of layers, then has some of every group.
        groups += [Group(spec, tuple(names[first::count])) for first in range(count)]
    return tuple(groups)
