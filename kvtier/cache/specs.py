"""What one layer keeps of a request: the bytes of a block, and the most blocks that a request holds at once.

Owns no state; every spec is frozen. Always: layers with equal specs may share a group, and a group's block table; a
page is one layer's part of a block. How a group finds hits, grows and lets go is its manager's (`cache/groups`).
Units: tokens, bytes.
"""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from kvtier.blocks.spec import DTYPES
from kvtier.errors import UsageError
from kvtier.registry import suggestion

MAMBA_MODES = ("align", "all")


def blocks_for(tokens: int, block_tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // block_tokens)


def _check_dtype(kind: str, dtype: object) -> None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UsageError(f"{kind}: unknown dtype {dtype!r}. {suggestion(str(dtype), DTYPES)}")


def _is_shapes(shapes: object) -> bool:
    return (
        isinstance(shapes, tuple)
        and shapes != ()
        and all(isinstance(s, tuple) and s and all(type(n) is int and n > 0 for n in s) for s in shapes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What every kind of layer says. `padded_bytes`: a page is made that large, so that all pages are equal."""

    kind: ClassVar[str]
    block_tokens: int
    padded_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for a number that is no count, and for padding that does not fit the content."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int or (field.type == (int | None) and value is not None):
                least = 0 if field.default == 0 else 1
                if type(value) is not int or value < least:
                    raise UsageError(f"{self.kind}: {field.name} is {value!r}; give a number from {least} on")
        if hasattr(self, "dtype"):
            _check_dtype(self.kind, self.dtype)
        if self.padded_bytes is not None and self.padded_bytes < self.content_bytes:
            text = f"a page of {self.padded_bytes} bytes does not hold the {self.content_bytes} bytes of a block"
            raise UsageError(f"{self.kind}: {text}; leave padded_bytes out, or make it larger")

    @property
    def content_bytes(self) -> int:
        """One layer's part of a block, without padding."""
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        """One layer's part of a block as it lies in memory."""
        return self.content_bytes if self.padded_bytes is None else self.padded_bytes

    def blocks_max(self, tokens_max: int, tokens_in_flight: int) -> int:
        """The most blocks that a request of `tokens_max` tokens holds at once.

        tokens_in_flight: tokens that are scheduled and whose step has not ended, at most.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads(Spec):
    kv_heads: int
    head_dim: int
    dtype: str
    value_dim: int | None = None  # of a value head; as wide as a key's if not given

    @property
    def content_bytes(self) -> int:
        width = self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)
        return self.block_tokens * self.kv_heads * width * DTYPES[self.dtype][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(_Heads):
    """Every token attends to all before it: nothing is let go before the request ends."""

    kind: ClassVar[str] = "full"

    def blocks_max(self, tokens_max: int, tokens_in_flight: int) -> int:
        return blocks_for(tokens_max, self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla(Spec):
    """Multi-head latent attention: one latent per token, shared by all heads (DeepSeek-V2, arXiv 2405.04434)."""

    kind: ClassVar[str] = "mla"
    latent_dim: int  # with the part that carries the position
    dtype: str

    @property
    def content_bytes(self) -> int:
        return self.block_tokens * self.latent_dim * DTYPES[self.dtype][0]

    def blocks_max(self, tokens_max: int, tokens_in_flight: int) -> int:
        return blocks_for(tokens_max, self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(_Heads):
    """A token attends to the last `window` tokens, itself included.

    retained_tokens: so many more are kept behind the window, for drafts that are computed again.
    """

    kind: ClassVar[str] = "sliding_window"
    window: int
    retained_tokens: int = 0

    def blocks_max(self, tokens_max: int, tokens_in_flight: int) -> int:
        tokens = min(self.window - 1 + self.retained_tokens + tokens_in_flight, tokens_max)
        return blocks_for(tokens, self.block_tokens) + 1  # the window may begin anywhere in its first block


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocal(_Heads):
    """A token attends to those before it in its own chunk of `chunk_tokens` tokens (Llama 4)."""

    kind: ClassVar[str] = "chunked_local"
    chunk_tokens: int

    def blocks_max(self, tokens_max: int, tokens_in_flight: int) -> int:
        return blocks_for(min(self.chunk_tokens + tokens_in_flight, tokens_max), self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(Spec):
    """A recurrent state instead of KV: a block holds the state after some token of its `block_tokens`.

    shapes, dtypes: of the tensors of one layer's state.
    mode: `align` keeps the states that the steps end with, which the scheduler puts on block boundaries; `all`
    keeps one for each block. speculative_blocks: states of drafts that may be rejected.
    """

    kind: ClassVar[str] = "mamba"
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mode: str = "align"
    speculative_blocks: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in MAMBA_MODES:
            raise UsageError(f"mamba: unknown mode {self.mode!r}. {suggestion(str(self.mode), MAMBA_MODES)}")
        if not (_is_shapes(self.shapes) and isinstance(self.dtypes, tuple) and len(self.shapes) == len(self.dtypes)):
            text = f"shapes {self.shapes!r} with dtypes {self.dtypes!r}"
            raise UsageError(f"mamba: {text}; give a tuple of sizes from 1 on, and a dtype, for each tensor")
        for dtype in self.dtypes:
            _check_dtype("mamba", dtype)
        super(Mamba, self).__post_init__()  # slots=True makes the class anew, and a bare super() means the old one

    @property
    def content_bytes(self) -> int:
        return sum(math.prod(s) * DTYPES[d][0] for s, d in zip(self.shapes, self.dtypes, strict=True))

    def blocks_max(self, tokens_max: int, tokens_in_flight: int) -> int:
        running = 2 if self.mode == "align" else 1  # a step reads the state of the one before, and writes its own
        return running + self.speculative_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention(_Heads):
    """A decoder attends to the encoder's output of its own request: never shared, allocated once."""

    kind: ClassVar[str] = "cross"
    encoder_tokens_max: int

    def blocks_max(self, tokens_max: int, tokens_in_flight: int) -> int:
        return blocks_for(self.encoder_tokens_max, self.block_tokens)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one spec and one block table.

    eagle: layers of a draft model that reads the target's hidden states, so that a hit's last block is computed again.
    """

    spec: Spec
    layers: tuple[str, ...] = ()
    eagle: bool = False
