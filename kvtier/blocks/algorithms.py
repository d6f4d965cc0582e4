"""The hash algorithms by name: a digest, and what its input is made with.

Built in are vLLM 0.32's four. `sha256_cbor` and `xxhash_cbor` hash canonical CBOR: the same bits in every process,
version and language. `sha256` and `xxhash` hash a pickle, which depends on the Python that makes it and on which
objects of a request are one object, so they name blocks for one process only and no persistent tier takes their keys.
Nothing is ever unpickled.

Which to take: SHA-256 resists collisions, so two prompts never share a block by design of an attacker. xxHash is
faster and does not: who may choose prompts can construct two with one name, and then reads, or poisons, KV of another
user. Use the xxhash pair only where all users may see each other's prompts. A secret seed makes it harder and no more;
a cache_salt per tenant does not help against a made collision.

Always: a name means one algorithm for the life of the process. Nothing here reads the environment by itself.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

import cbor2
import xxhash

from kvtier.errors import UsageError
from kvtier.registry import Registry
from kvtier.types import HASH_BYTES_MAX

ROOT_SEED = "vllm-none-hash"
ENCODINGS = ("cbor", "pickle")

Digest = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class HashAlgorithm:
    """digest: 1 to 64 bytes of any bytes, always as many. encoding: how its input is spelled.

    collision_resistant: whether nobody can make two inputs with one digest.
    """

    digest: Digest
    encoding: Literal["cbor", "pickle"]
    collision_resistant: bool

    def encode(self, value: object) -> bytes:
        """The bytes that stand for `value`. Raises UsageError if it cannot be spelled."""
        try:
            if self.encoding == "cbor":
                return cbor2.dumps(value, canonical=True)
            return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # objects of others choose what they raise while they are encoded
            raise UsageError(f"{value!r} cannot be hashed as {self.encoding}: {error}") from error


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


HASHES: Registry[HashAlgorithm] = Registry(
    "hash",
    {
        "sha256_cbor": HashAlgorithm(_sha256, "cbor", True),
        "xxhash_cbor": HashAlgorithm(xxhash.xxh3_128_digest, "cbor", False),
        "sha256": HashAlgorithm(_sha256, "pickle", True),
        "xxhash": HashAlgorithm(xxhash.xxh3_128_digest, "pickle", False),
    },
)


def register_hash(
    name: str, digest: Digest, *, encoding: Literal["cbor", "pickle"] = "cbor", collision_resistant: bool = False
) -> None:
    """Make a hash function known under `name`, in code (`hash_blocks`, `HashChain`) and in `model.hash`.

    digest: a pure function of bytes to 1-64 bytes, always as many. Raises UsageError for a name that is taken, an
    unknown encoding, and a digest that gives anything else.
    """
    if encoding not in ENCODINGS:
        raise UsageError(f"encoding is {encoding!r}; use one of {', '.join(ENCODINGS)}")
    if not callable(digest):
        raise UsageError(f"digest is {digest!r}; pass a function of bytes to bytes")
    HASHES.add(name, HashAlgorithm(_checked(name, digest), encoding, collision_resistant))


def hash_algorithm(name: str) -> HashAlgorithm:
    """Raises UsageError whose text names the nearest choice."""
    if not isinstance(name, str):
        raise UsageError(f"hash is {name!r}; pass the name of one, such as 'sha256_cbor'")
    try:
        return HASHES.get(name)
    except KeyError as error:
        raise UsageError(error.args[0]) from None


def root_hash(hash_name: str, seed: str | None) -> bytes:
    """The parent of every first block. Raises UsageError for an unknown hash, or a seed that is no text."""
    if seed is not None and not isinstance(seed, str):
        raise UsageError(f"seed is {seed!r}; pass a text")
    hash_algorithm(hash_name)
    return _root_hash(hash_name, ROOT_SEED if seed is None else seed)


@lru_cache(maxsize=64)
def _root_hash(hash_name: str, seed: str) -> bytes:
    algorithm = hash_algorithm(hash_name)
    return algorithm.digest(algorithm.encode(seed))


def vllm_seed(hash_name: str, environ: Mapping[str, str]) -> str:
    """The seed that a vLLM 0.32 started with these environment variables takes for its root.

    PYTHONHASHSEED if it is set; otherwise the fixed default for hashes that resist collisions, and fresh random hex
    for those that do not: such a vLLM shares its names with no other process, and so would a caller of this.
    """
    algorithm = hash_algorithm(hash_name)
    given = environ.get("PYTHONHASHSEED")
    if given is not None:
        return given
    return ROOT_SEED if algorithm.collision_resistant else os.urandom(32).hex()


def _checked(name: str, digest: Digest) -> Digest:
    """The digest of a stranger, which keeps its promise or is told off."""

    def checked(data: bytes) -> bytes:
        try:
            value: Any = digest(data)
        except Exception as error:
            raise UsageError(f"hash {name!r} fails on {len(data)} bytes: {error!r}") from error
        if type(value) is not bytes or len(value) != hash_bytes:
            raise UsageError(f"hash {name!r} gave {value!r} after {hash_bytes} bytes; it must give always as many")
        return value

    try:
        probe: Any = digest(b"")
    except Exception as error:
        raise UsageError(f"hash {name!r} fails on empty bytes: {error!r}") from error
    if type(probe) is not bytes or not 1 <= len(probe) <= HASH_BYTES_MAX:
        raise UsageError(f"hash {name!r} gives {probe!r}; a digest is 1 to {HASH_BYTES_MAX} bytes")
    hash_bytes = len(probe)
    if checked(b"") != probe:
        raise UsageError(f"hash {name!r} gives two digests of the same bytes; keys must not depend on anything else")
    return checked
