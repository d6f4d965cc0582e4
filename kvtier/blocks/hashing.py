"""Names for blocks: a chain of hashes, each over its parent, its tokens and its extra keys.

    root     = H(cbor("vllm-none-hash"))            or H(cbor(seed)) when the model names a seed
    hash[i]  = H(cbor((hash[i-1], (t0, t1, ...), extra)))      canonical CBOR, RFC 8949 4.2.1

Always: the same tokens give the same keys in every process, with no environment variable (LMCache#1139, #2979).
Bit-compatible with vLLM 0.32's `sha256_cbor` and `xxhash_cbor`. xxhash_cbor is not collision resistant: whoever
can choose prompts can forge a collision, so use it only where all users may see each other's prompts.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import cbor2
import xxhash

from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.errors import UsageError
from kvtier.registry import Registry
from kvtier.types import GROUP_BYTES, HASH_BYTES_MAX, BlockHash, BlockKey, ModelSpec, block_key

HashFunction = Callable[[bytes], bytes]

HASHES: Registry[HashFunction] = Registry(
    "hash",
    {
        "sha256_cbor": lambda data: hashlib.sha256(data).digest(),
        "xxhash_cbor": xxhash.xxh3_128_digest,
    },
)

ROOT_SEED = "vllm-none-hash"


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
    ids = _as_ints(tokens)
    chains: dict[int, list[BlockHash]] = {}
    for size in {group.block_tokens for group in model.groups}:
        chains[size] = list(chain(ids, size, model.hash, model.hash_seed, extra))
    groups = tuple(
        tuple(block_key(block_hash, index) for block_hash in chains[group.block_tokens])
        for index, group in enumerate(model.groups)
    )
    return Keys(groups, tuple(group.block_tokens for group in model.groups))


def chain(
    tokens: Sequence[int],
    block_tokens: int,
    hash_name: str = "sha256_cbor",
    seed: str | None = None,
    extra: ExtraKeys | None = None,
) -> Iterator[BlockHash]:
    """The hashes of the full blocks of `tokens`, each including all before it."""
    digest = HASHES.get(hash_name)
    parent = digest(cbor2.dumps(ROOT_SEED if seed is None else seed, canonical=True))
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        end = start + block_tokens
        extra_keys = None if extra is None else extra.of_block(start, end)
        parent = digest(cbor2.dumps((parent, tuple(tokens[start:end]), extra_keys), canonical=True))
        yield BlockHash(parent)


def _as_ints(tokens: Sequence[int]) -> list[int]:
    if hasattr(tokens, "tolist"):  # numpy and torch scalars would be encoded as something else
        tokens = tokens.tolist()
    if not isinstance(tokens, Iterable):
        raise UsageError(f"tokens is {tokens!r}; pass a flat list of token ids")
    ids = list(tokens)
    for token in ids:
        if type(token) is not int or not 0 <= token < 2**32:
            raise UsageError(f"token {token!r} is not an integer from 0 to 2**32-1; pass a flat list of token ids")
    return ids


def _is_key(key: object, suffix: bytes) -> bool:
    return type(key) is bytes and GROUP_BYTES < len(key) <= HASH_BYTES_MAX + GROUP_BYTES and key.endswith(suffix)
