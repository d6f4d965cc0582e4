"""The names of a prompt's blocks: per group a chain of hashes, each with the group's number.

Always: the same tokens give the same keys in every process, with no environment variable (LMCache#1139, #2979).
Bit-compatible with vLLM 0.32 under `sha256_cbor` and `xxhash_cbor`; `algorithms` says which hash to take.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from kvtier.blocks.chain import HashChain
from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.blocks.packing import check_tokens
from kvtier.errors import UsageError
from kvtier.types import GROUP_BYTES, HASH_BYTES_MAX, BlockHash, BlockKey, ModelSpec, block_key


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of a prompt's full blocks: per group a tuple of BlockKey, in prefix order."""

    groups: tuple[tuple[BlockKey, ...], ...]
    block_tokens: tuple[int, ...]  # per group

    def __post_init__(self) -> None:
        """Raises UsageError for anything that `hash_blocks` or `opaque` would not have made."""
        shapes = isinstance(self.groups, tuple) and isinstance(self.block_tokens, tuple)
        if not shapes or len(self.groups) != len(self.block_tokens):
            raise UsageError("keys have one tuple of keys and one block size per group")
        for group, row in enumerate(self.groups):
            suffix = group.to_bytes(GROUP_BYTES, "big")
            if not isinstance(row, tuple) or not all(_is_key(key, suffix) for key in row):
                raise UsageError(f"group {group} holds what is no key of it; use hash_blocks or Keys.opaque")

    @classmethod
    def opaque(cls, hashes: Sequence[Sequence[bytes]], model: ModelSpec) -> "Keys":
        """Keys from an engine's own block hashes, given per group. Each hash is 1 to 64 bytes."""
        given: object = hashes
        if not isinstance(given, list | tuple) or not all(isinstance(row, list | tuple) for row in given):
            raise UsageError("hashes are given per group: pass one list of bytes for each group of the model")
        if len(hashes) != len(model.groups):
            raise UsageError(f"hashes of {len(hashes)} groups for a model with {len(model.groups)}")
        for block_hash in (h for group in hashes for h in group):
            if not isinstance(block_hash, bytes) or not 1 <= len(block_hash) <= HASH_BYTES_MAX:
                raise UsageError(f"{block_hash!r} is no hash; pass 1 to {HASH_BYTES_MAX} bytes")
        groups = tuple(tuple(block_key(h, index) for h in group) for index, group in enumerate(hashes))
        return cls(groups, tuple(group.block_tokens for group in model.groups))

    @property
    def tokens(self) -> int:
        """Tokens that all groups' blocks cover."""
        return min((len(keys) * size for keys, size in zip(self.groups, self.block_tokens, strict=True)), default=0)

    def prefix(self, tokens: int) -> "Keys":
        """The keys of whole blocks within the first `tokens` tokens, the same number of tokens in each group."""
        if isinstance(tokens, bool) or not isinstance(tokens, int):
            raise UsageError(f"a prefix of {tokens!r:.80} tokens; pass an integer")
        step = lcm(*self.block_tokens)
        tokens = min(max(tokens, 0), self.tokens) // step * step
        cut = tuple(keys[: tokens // size] for keys, size in zip(self.groups, self.block_tokens, strict=True))
        return Keys(cut, self.block_tokens)


def hash_blocks(tokens: Sequence[int], model: ModelSpec, extra: ExtraKeys | None = None) -> Keys:
    """Name every full block of a prompt. A trailing partial block has no name.

    tokens: token ids, integers 0 .. 2**32-1 (a list, or a 1-d numpy array).
    Raises UsageError for anything else.
    """
    if not isinstance(model, ModelSpec):
        raise UsageError(f"model is {model!r}; pass a ModelSpec, such as config.model")
    if extra is not None and not isinstance(extra, ExtraKeys):
        raise UsageError(f"extra is {extra!r}; pass ExtraKeys")
    ids = _as_list(tokens)
    chains: dict[int, list[BlockHash]] = {}
    for size in {group.block_tokens for group in model.groups}:
        hashes = HashChain(size, model.hash, model.hash_seed, extra)
        hashes.update(ids)
        check_tokens(ids, len(ids) // size * size, len(ids))  # the others were, when they were hashed
        chains[size] = hashes.hashes
    groups = tuple(
        tuple(block_key(block_hash, index) for block_hash in chains[group.block_tokens])
        for index, group in enumerate(model.groups)
    )
    return Keys(groups, tuple(group.block_tokens for group in model.groups))


def _as_list(tokens: Sequence[int]) -> Sequence[int]:
    if hasattr(tokens, "tolist"):  # an array or tensor: its elements as Python's integers
        tokens = tokens.tolist()
    if not isinstance(tokens, Iterable):
        raise UsageError(f"tokens is {tokens!r}; pass a flat list of token ids")
    return tokens if isinstance(tokens, list) else list(tokens)


def _is_key(key: object, suffix: bytes) -> bool:
    return type(key) is bytes and GROUP_BYTES < len(key) <= HASH_BYTES_MAX + GROUP_BYTES and key.endswith(suffix)
