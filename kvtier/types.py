"""The records that pass between deciding code, executor and tiers.

Owns nothing; all records are frozen. Three kinds of name are kept apart by type: a `BlockHash` is content and
everything before it; a `BlockKey` adds the group; a `StoreKey` adds the namespace, and is the only name that
directory and tiers see.

Units: bytes, tokens, seconds. A *place* is where a copy lies inside one tier: a slot index in a memory tier, a
page number (offset / 4096) in a persistent one. The deciding code treats it as opaque.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

BlockHash = NewType("BlockHash", bytes)  # 1-64 bytes: 32 sha256, 16 xxh3_128, others opaque
BlockKey = NewType("BlockKey", bytes)  # BlockHash + group id, 4 bytes big-endian
StoreKey = NewType("StoreKey", bytes)  # namespace id, 4 bytes big-endian + BlockKey

HASH_BYTES_MAX = 64
GROUP_BYTES = 4
NAMESPACE_BYTES = 4
PAGE_BYTES = 4096  # alignment of slots on host and disk; O_DIRECT needs it


def block_key(block_hash: bytes, group: int) -> BlockKey:
    """Name a block of `group` by its hash."""
    return BlockKey(block_hash + group.to_bytes(GROUP_BYTES, "big"))


def hash_of(key: BlockKey) -> BlockHash:
    return BlockHash(key[:-GROUP_BYTES])


def group_of(key: BlockKey) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def store_key(namespace: int, key: BlockKey) -> StoreKey:
    """Qualify a block's key by its namespace's engine-local id (u32)."""
    return StoreKey(namespace.to_bytes(NAMESPACE_BYTES, "big") + key)


def namespace_of(key: StoreKey) -> int:
    return int.from_bytes(key[:NAMESPACE_BYTES], "big")


def block_key_of(key: StoreKey) -> BlockKey:
    return BlockKey(key[NAMESPACE_BYTES:])


def page_aligned(length_bytes: int) -> int:
    """Round up to whole pages: the stride of a slot that holds `length_bytes`."""
    return -(-length_bytes // PAGE_BYTES) * PAGE_BYTES


# ---------------------------------------------------------------- model


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers whose KV is kept together because they attend alike. One block holds `block_tokens` tokens of it.

    kind: ``full`` (a K and a V segment per layer) or ``mla`` (one latent segment per layer; `kv_heads` is 1).
    """

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What makes KV bytes of one model shareable; the namespace fingerprint is made of exactly this."""

    name: str
    weights_epoch: str
    groups: tuple[GroupSpec, ...]
    layout: str = "layer_token_major"
    hash: str = "sha256_cbor"
    hash_seed: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    codec: str = "none"  # a lossy codec changes the bytes, hence the identity

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the first group (every group's, unless the model is hybrid)."""
        return self.groups[0].block_tokens


# ---------------------------------------------------------------- tiers


class Status(Enum):
    """How one item of a batch ended."""

    DONE = "done"
    MISSING = "missing"  # not there (any more), or moved: generation differs
    CORRUPT = "corrupt"  # there, and its checksum does not match
    NO_ROOM = "no_room"  # capacity or min_free forbids it; a value, not a fault
    FAILED = "failed"  # the device or the network refused
    DEVICE_LOST = "device_lost"  # the tier's device is gone for good, and with it all it held


class Outcome(NamedTuple):
    """The end of one item. After a DONE write `place` and `generation` say where the copy lies.

    A tuple, for there is one for every block that moves, and a frozen dataclass takes four times as long to make.
    """

    status: Status
    place: int = 0
    generation: int = 0
    detail: str = ""

    @property
    def done(self) -> bool:
        return self.status is Status.DONE


DONE = Outcome(Status.DONE)


@dataclass(frozen=True, slots=True)
class ReadItem:
    """Bring one block into `into`, a writable view of a whole slot (page aligned, stride long)."""

    key: StoreKey
    place: int
    generation: int
    length_bytes: int
    into: memoryview
    codec: str = "none"  # in which form `into` wants it; `length_bytes` is the length of that


@dataclass(frozen=True, slots=True)
class WriteItem:
    """Keep one block. `source` is a whole slot; its first `length_bytes` are payload, the rest zeroes.

    A memory tier is told the `place`; a persistent tier chooses it and reports it in the outcome. `codec` says what the
    payload is coded with already.
    """

    key: StoreKey
    length_bytes: int
    source: memoryview
    place: int = 0
    codec: str = "none"


@dataclass(frozen=True, slots=True)
class EvictItem:
    """Forget one copy, unless its place has a newer occupant by now (`generation`)."""

    key: StoreKey
    place: int
    generation: int


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Items, evictions and policy state that a persistent tier applies in one transaction.

    `sidecar` rows are opaque to the tier: ``None`` deletes. Its outcome is NO_ROOM where the rest of the batch went
    well without it. A place freed by `evict` is reused only after the transaction that freed it is committed.
    """

    items: Sequence[WriteItem] = ()
    evict: Sequence[EvictItem] = ()
    sidecar: Mapping[bytes, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One copy that a persistent tier found when it was opened. `length_bytes`: as attention reads it, not as coded."""

    key: StoreKey
    place: int
    generation: int
    length_bytes: int
    stride_bytes: int = 0  # what it takes there, padding included; 0: its length in whole pages


# ---------------------------------------------------------------- transfers


@dataclass(frozen=True, slots=True)
class Transfer:
    """One planned move of one block between two tiers (indexes into the tier list, 0 is the fastest).

    `length_bytes` is that of the block as attention reads it, however its tiers code it.
    """

    handle: int
    key: StoreKey
    source_place: int
    source_generation: int
    target_place: int  # 0 when the target tier chooses the place
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Remap:
    """Memory that a tier gets or gives back, in granules of its address range.

    unused: the slots that touch what is unmapped; nobody uses them from now on. ready: how many granules of memory the
    tier holds when it is over that are mapped nowhere yet; what it has more than that goes back to the machine.
    sleep: all memory goes back, the null block's too; nobody uses any slot until a `map` that begins with its granules.
    One outcome: mapped and unmapped wholly or not at all; its place is how many granules are ready, maybe fewer.
    """

    map: tuple[int, ...] = ()
    unmap: tuple[int, ...] = ()
    unused: frozenset[int] = frozenset()
    ready: int = 0
    sleep: bool = False


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Layers of one group that are copied together: a stretch of each of its blocks."""

    group: int
    layers: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class TransferBatch:
    """Transfers with the same source and target, executed and reported together; half of it may fail.

    `evict` and `sidecar` belong to the target tier's transaction. With `source == target` nothing moves: the batch
    evicts, writes the sidecar, drops the namespace `drop` (an engine-local id), changes a tier's memory, or how much of
    its disk a persistent tier may take; or checks the copies in `scrub` where they lie.
    With `parts` somebody wants to hear when the copies are enqueued, and to wait for these parts one by one.
    """

    batch_id: int
    source: int
    target: int
    transfers: tuple[Transfer, ...]
    evict: tuple[EvictItem, ...] = ()
    drop: int | None = None
    sidecar: Mapping[bytes, bytes | None] = field(default_factory=dict)
    remap: Remap | None = None
    capacity_bytes: int | None = None
    parts: tuple[LayerPart, ...] = ()
    scrub: tuple[Transfer, ...] = ()

    @property
    def outcomes(self) -> int:
        """How many outcomes its acknowledgement has."""
        if self.drop is not None or self.remap is not None or self.capacity_bytes is not None:
            return 1
        return len(self.transfers) + len(self.evict) + len(self.scrub) + bool(self.sidecar)


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The terminal acknowledgement of a batch: one outcome per transfer, one per eviction, one for a sidecar that is
    not empty; or one for the drop, the remap or the capacity; or one per copy that was scrubbed."""

    batch_id: int
    outcomes: tuple[Outcome, ...]
