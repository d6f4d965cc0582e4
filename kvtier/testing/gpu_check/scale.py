"""How much is measured: the sizes and counts of one run. Units are in the names."""

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Scale:
    """FULL takes minutes on a card, QUICK less than one."""

    rounds: int
    vmm_granules: int
    copy_bytes: int  # per measured copy, at most
    copy_pieces: int  # per measured copy, at most
    block_bytes: tuple[int, ...]
    fragment_bytes: tuple[int, ...]  # of a foreign cache
    submit_pieces: int
    heads: tuple[int, int]  # of queries, of KV
    head_dims: tuple[int, ...]
    sequences: int
    kv_tokens: int  # of the longest sequence
    decode_head_dim: int
    decode_sequences: int
    decode_kv_tokens: int
    decode_steps: int  # per round, with and without demotion each
    resize_bytes: int
    reader_slots: int
    reader_bytes: int  # per slot; what one slot of the resized cache holds
    settle_s: float  # how long a reader runs alone, to compare with
    layers: int  # of the model in `roundtrip` and `engine`
    prompts: int
    prompt_blocks: int


FULL = Scale(
    rounds=7,
    vmm_granules=256,
    copy_bytes=256 * MIB,
    copy_pieces=16384,
    block_bytes=tuple(4 * KIB << n for n in range(11)),  # 4 KiB to 4 MiB
    fragment_bytes=(1 * KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 24 * KIB, 28 * KIB, 32 * KIB, 64 * KIB),
    submit_pieces=1024,
    heads=(32, 8),
    head_dims=(64, 96, 128, 192, 256),
    sequences=4,
    kv_tokens=1024,
    decode_head_dim=128,
    decode_sequences=32,
    decode_kv_tokens=4096,
    decode_steps=100,
    resize_bytes=8 * GIB,
    reader_slots=64,
    reader_bytes=2 * MIB,
    settle_s=0.5,
    layers=8,
    prompts=8,
    prompt_blocks=32,
)

QUICK = Scale(
    rounds=3,
    vmm_granules=64,
    copy_bytes=64 * MIB,
    copy_pieces=4096,
    block_bytes=(16 * KIB, 64 * KIB, 1 * MIB, 4 * MIB),
    fragment_bytes=(2 * KIB, 8 * KIB, 28 * KIB, 64 * KIB),
    submit_pieces=1024,
    heads=(32, 8),
    head_dims=(64, 128),
    sequences=4,
    kv_tokens=512,
    decode_head_dim=128,
    decode_sequences=16,
    decode_kv_tokens=2048,
    decode_steps=30,
    resize_bytes=8 * GIB,
    reader_slots=64,
    reader_bytes=2 * MIB,
    settle_s=0.2,
    layers=2,
    prompts=4,
    prompt_blocks=16,
)

SCALES = {"full": FULL, "quick": QUICK}
