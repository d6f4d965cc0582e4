"""Has the real vLLM name blocks, and writes down its answers: tests/data/vllm_hash_cases.json.

python tests/compat/oracle_hashes.py [OUT]      in an environment with vLLM 0.32 (CPU is enough)

Every case is a request that vLLM's own hasher is asked about twice: with all tokens at once, and grown token by token
after a short prompt (that of embeddings has one token per row). Both must agree. Kept are the last hash, which depends
on all before it, and their number. Embeddings are a formula of row and column whose values every element type holds
exactly: ((37 i) mod 101 - 50) / 8.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "data/vllm_hash_cases.json"
BORDERS = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**24 - 1, 2**24, 2**32 - 1, 0x1A0000, 0x19001A, 26, 0x1A1A, 512]
TOKENS = BORDERS + random.Random(32).choices(range(262144), k=228) + BORDERS[::-1]
HASHES = ("sha256_cbor", "xxhash_cbor", "sha256", "xxhash")
SIZES = (1, 4, 16, 24, 100)
HIDDEN = 4

LORA = {"lora": ["my-lora", "/adapters/x"]}
SALT = {"salt": "tenant-ä"}
ITEMS = {"items": [["cat", 2, 5], ["dog", 7, 3], ["film", 11, 150], ["cow", 161, 1], ["cat-2", 250, 8]]}
EMBEDS = {kind: {"embeds": {"dtype": kind, "rows": 130}} for kind in ("float32", "float16", "bfloat16")}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": LORA,
    "salt": SALT,
    "items": ITEMS,
    **EMBEDS,
    "all": LORA | SALT | ITEMS | EMBEDS["bfloat16"],
}


def main(out: Path) -> None:
    """Write every case."""
    cases = []
    for hash_name in HASHES:
        for block_tokens in SIZES:
            cases += [answered(hash_name, "vllm-none-hash", block_tokens, extra) for extra in EXTRAS]
        cases.append(answered(hash_name, "0", 16, "plain"))
    lines = ",\n".join(json.dumps(case) for case in cases)
    given = f'"hidden": {HIDDEN}, "tokens": {json.dumps(TOKENS)},\n"extras": {json.dumps(EXTRAS)}'
    out.write_text(f'{{{given},\n"cases": [\n{lines}\n]}}\n')
    print(f"{len(cases)} cases in {out}")


def answered(hash_name: str, seed: str, block_tokens: int, extra: str) -> dict[str, Any]:
    """One case with vLLM's answer."""
    hasher = hasher_of(hash_name, seed, block_tokens)
    rows = EXTRAS[extra].get("embeds", {}).get("rows")
    at_once = request_of(TOKENS[:rows], EXTRAS[extra], hasher)
    at_once.append_output_token_ids(TOKENS[rows:] if rows else [])
    whole = at_once.block_hashes
    growing = request_of(TOKENS[: rows or 3], EXTRAS[extra], hasher)
    for token in TOKENS[rows or 3 :]:
        growing.append_output_token_ids(token)
    assert growing.block_hashes == whole
    return {
        "hash": hash_name,
        "seed": seed,
        "block_tokens": block_tokens,
        "extra": extra,
        "blocks": len(whole),
        "last": whole[-1].hex(),
    }


def hasher_of(hash_name: str, seed: str, block_tokens: int) -> Any:
    """vLLM's hasher; the seed goes the way that vLLM has for it, by the environment."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    os.environ["PYTHONHASHSEED"] = seed
    function = get_hash_fn_by_name(hash_name)
    init_none_hash(function)
    return get_request_block_hasher(block_tokens, function)


def request_of(tokens: list[int], extra: dict[str, Any], hasher: Any) -> Any:
    """vLLM's request with these tokens as its prompt."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    lora = extra.get("lora")
    return Request(
        "r",
        list(tokens),
        SamplingParams(max_tokens=1),
        None,
        prompt_embeds=embeddings_of(extra.get("embeds")),
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for name, offset, length in extra.get("items", ())
        ],
        lora_request=None if lora is None else LoRARequest(lora[0], 1, lora[1]),
        cache_salt=extra.get("salt"),
        block_hasher=hasher,
    )


def embeddings_of(described: dict[str, Any] | None) -> Any:
    """A tensor [rows, HIDDEN], or None."""
    import torch

    if described is None:
        return None
    numbers = torch.arange(described["rows"] * HIDDEN)
    return ((numbers * 37 % 101 - 50) / 8).to(getattr(torch, described["dtype"])).reshape(-1, HIDDEN)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
