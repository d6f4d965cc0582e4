"""The chain of hashes over a prompt's full blocks, grown as tokens are appended.

    root     = H("vllm-none-hash")                   or H(seed) when the model names one
    hash[i]  = H((hash[i-1], (t0, t1, ...), extra))  extra: a tuple of tuples, or None

Always: hashes[i] names block i and everything before it; a trailing partial block has no name; an update that is
refused changes nothing. The tokens of named blocks never change: only the end of the list grows.
Units: tokens; `index` counts blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, repeat
from typing import cast

from kvtier.blocks.algorithms import hash_algorithm, root_hash
from kvtier.blocks.extra_keys import ExtraKey, ExtraKeys
from kvtier.blocks.packing import ARRAY, BYTES, NULL, block_packer, check_tokens, head, plain_ints
from kvtier.errors import UsageError
from kvtier.types import BlockHash


class HashChain:
    """Hashes of the full blocks of a growing list of tokens."""

    __slots__ = (
        "_algorithm",
        "_before",
        "_block_tokens",
        "_digest",
        "_due",
        "_extra",
        "_pack",
        "_packer",
        "_plain",
        "_root",
        "hashes",
    )

    def __init__(
        self,
        block_tokens: int,
        hash_name: str = "sha256_cbor",
        seed: str | None = None,
        extra: ExtraKeys | None = None,
    ) -> None:
        """Raises UsageError for a block of no tokens, an unknown hash, and a seed or extra of another type."""
        if type(block_tokens) is not int or not 1 <= block_tokens < 2**32:
            raise UsageError(f"block_tokens is {block_tokens!r}; pass a number from 1")
        if extra is not None and not isinstance(extra, ExtraKeys):
            raise UsageError(f"extra is {extra!r}; pass ExtraKeys")
        self.hashes: list[BlockHash] = []  # of all full blocks so far; read it, don't change it
        self._block_tokens = block_tokens
        self._due = block_tokens  # so many tokens make the next full block
        self._extra = extra
        self._algorithm = hash_algorithm(hash_name)
        self._digest = cast(Callable[[bytes], BlockHash], self._algorithm.digest)
        self._packer = block_packer(block_tokens)
        self._pack = self._packer.one
        self._root = root_hash(hash_name, seed)
        self._before = head(ARRAY, 3) + head(BYTES, len(self._root))
        self._plain = extra is None and self._algorithm.encoding == "cbor"

    def full_tokens(self, tokens: int) -> int:
        """How many of so many tokens are in full blocks."""
        return tokens // self._block_tokens * self._block_tokens

    def update(self, tokens: Sequence[int]) -> None:
        """`tokens` are all tokens so far; names the full blocks that have no hash yet.

        Raises UsageError for what is no token id in those blocks, and then names none of them.
        """
        due, known = self._due, len(tokens)
        if known < due:
            return
        hashes, size = self.hashes, self._block_tokens
        parent = hashes[-1] if hashes else self._root
        if self._plain and known - due < size:  # one block, as when a model writes: kept short
            message = self._before + parent + self._pack(tokens, due - size) + NULL
            hashes.append(self._digest(message))
            self._due = due + size
            return
        stop = known // size * size
        if self._algorithm.encoding == "cbor":
            hashes += self._packed(tokens, due - size, stop, parent)
        else:
            hashes += self._pickled(tokens, due - size, stop, parent)
        self._due = stop + size

    def extra_of(self, index: int) -> tuple[ExtraKey, ...] | None:
        """The extra keys of block `index`."""
        if self._extra is None:
            return None
        size = self._block_tokens
        return self._extra.of_block(index * size, (index + 1) * size)

    def _packed(self, tokens: Sequence[int], start: int, stop: int, parent: bytes) -> list[BlockHash]:
        digest, before = self._digest, self._before
        bodies = self._packer.many(tokens, start, stop)
        tails = repeat(NULL) if self._extra is None else self._tails(start // self._block_tokens)
        made: list[BlockHash] = []
        for body, tail in zip(bodies, tails, strict=False):  # tails never end
            made.append(parent := digest(before + parent + body + tail))
        return made

    def _tails(self, index: int) -> Iterator[bytes]:
        """The encoded extra keys from block `index` on."""
        before, tail = None, NULL
        for at in count(index):
            extra = self.extra_of(at)
            if extra is not before:  # equal is not enough: 1 == True, and they are spelled apart
                before, tail = extra, self._algorithm.encode(extra)
            yield tail

    def _pickled(self, tokens: Sequence[int], start: int, stop: int, parent: bytes) -> list[BlockHash]:
        check_tokens(tokens, start, stop)
        made: list[BlockHash] = []
        for at in range(start, stop, self._block_tokens):
            block = plain_ints(tokens[at : at + self._block_tokens])
            message = self._algorithm.encode((parent, block, self.extra_of(at // self._block_tokens)))
            made.append(parent := self._digest(message))
        return made


def chain(
    tokens: Sequence[int],
    block_tokens: int,
    hash_name: str = "sha256_cbor",
    seed: str | None = None,
    extra: ExtraKeys | None = None,
) -> Iterator[BlockHash]:
    """The hashes of the full blocks of `tokens`, each including all before it."""
    hashes = HashChain(block_tokens, hash_name, seed, extra)
    hashes.update(tokens)
    return iter(hashes.hashes)
