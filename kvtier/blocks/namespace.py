"""The namespace: a fingerprint of everything that makes two processes' KV bytes interchangeable.

Two caches share blocks exactly when their fingerprints are equal; a store keeps any number of namespaces side by
side. The fields are stored beside the fingerprint, so that `kvtier inspect` can say which one differs.

Encoding (docs/format.md): fingerprint = SHA-256 of the canonical CBOR of `fields(model)`. Ranks do not appear:
sizes of the parallel groups do.
"""

import hashlib
from typing import Any

import cbor2

from kvtier.types import ModelSpec

IDENTITY_VERSION = 1  # raised when the meaning of a field, the layout of a block or the key scheme changes
FINGERPRINT_BYTES = 32


def fields(model: ModelSpec) -> dict[str, Any]:
    """The identity as plain data, in the spelling of the YAML."""
    return {
        "identity_version": IDENTITY_VERSION,
        "name": model.name,
        "weights_epoch": model.weights_epoch,
        "layout": model.layout,
        "hash": model.hash,
        "hash_seed": model.hash_seed,
        "tensor_parallel": model.tensor_parallel,
        "pipeline_parallel": model.pipeline_parallel,
        "context_parallel": model.context_parallel,
        "codec": model.codec,
        "groups": [
            {
                "kind": group.kind,
                "layers": list(group.layers),
                "kv_heads": group.kv_heads,
                "head_dim": group.head_dim,
                "dtype": group.dtype,
                "block_tokens": group.block_tokens,
            }
            for group in model.groups
        ],
    }


def encode_fields(model: ModelSpec) -> bytes:
    """Canonical CBOR of the fields: equal models give equal bytes on every machine."""
    return cbor2.dumps(fields(model), canonical=True)


def fingerprint(model: ModelSpec) -> bytes:
    """The 32-byte name of the model's namespace."""
    return hashlib.sha256(encode_fields(model)).digest()


class NamespaceTable:
    """Engine-local ids (u32) for namespaces, given in the order they are met.

    Shared by the engine and its persistent tiers; each tier maps these ids to its own by full fingerprint.
    An id is never reused while the engine lives.
    """

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._descriptions: list[bytes] = []
        self._fingerprints: list[bytes] = []

    def __len__(self) -> int:
        return len(self._fingerprints)

    def id_of(self, namespace_fingerprint: bytes, description: bytes) -> int:
        """The id of a fingerprint, a new one if it was never met. `description` is the CBOR of its fields."""
        known = self._ids.get(namespace_fingerprint)
        if known is not None:
            return known
        if len(namespace_fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(namespace_fingerprint)}")
        identity = len(self._fingerprints)
        self._ids[namespace_fingerprint] = identity
        self._fingerprints.append(namespace_fingerprint)
        self._descriptions.append(description)
        return identity

    def id_of_model(self, model: ModelSpec) -> int:
        return self.id_of(fingerprint(model), encode_fields(model))

    def find(self, namespace_fingerprint: bytes) -> int | None:
        return self._ids.get(namespace_fingerprint)

    def fingerprint_of(self, namespace: int) -> bytes:
        return self._fingerprints[namespace]

    def description_of(self, namespace: int) -> bytes:
        return self._descriptions[namespace]
