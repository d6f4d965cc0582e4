"""What naming blocks costs beside vLLM's own code, in one process, interleaved: ratios of median CPU times.

python benchmarks/hashing.py [--rounds 21] [--json]      needs vLLM 0.32 in the same environment

Rows, each with sha256_cbor and xxhash_cbor, blocks of 16 tokens, ids drawn evenly from 0 .. 262143:
    prompt    1000 blocks: a new `HashChain` and its first update, against `get_request_block_hasher` on a request that
              exists already (its construction is not counted against vLLM)
    appended  one block more, 2000 times: `update` of a list that grew by 16, against the hasher on a request that did
    decoded   the same tokens, one at a time: `append` and `update`, against `Request.append_output_token_ids`
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from kvtier.blocks.chain import HashChain

BLOCK_TOKENS = 16
VOCABULARY = 262144
PROMPT_BLOCKS = 1000
APPENDED_BLOCKS = 2000

Run = Callable[[], tuple[float, list[bytes]]]  # CPU seconds, and the hashes as proof of equal work


def main() -> None:
    """Measure, check that both sides gave the same hashes, print."""
    parser = argparse.ArgumentParser(description="what naming blocks costs beside vLLM's own code")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["PYTHONHASHSEED"] = "0"  # the xxhash pair has a random root without it
    rows = [measure(name, *pair, options.rounds) for name, pair in pairs().items()]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'':28}{'kvtier us/block':>18}{'vLLM us/block':>16}{'ratio':>8}")
    for row in rows:
        print(f"{row['name']:28}{row['kvtier_us']:18.2f}{row['vllm_us']:16.2f}{row['ratio']:8.2f}")


def pairs() -> dict[str, tuple[Run, Run, int]]:
    """Name -> (ours, vLLM's, blocks named)."""
    found: dict[str, tuple[Run, Run, int]] = {}
    ids = random.Random(7).choices(range(VOCABULARY), k=BLOCK_TOKENS * APPENDED_BLOCKS)
    prompt = ids[: BLOCK_TOKENS * PROMPT_BLOCKS]
    for hash_name in ("sha256_cbor", "xxhash_cbor"):
        found[f"prompt, {hash_name}"] = our_prompt(hash_name, prompt), their_prompt(hash_name, prompt), PROMPT_BLOCKS
        ours, theirs = our_growth(hash_name, ids), their_growth(hash_name, ids)
        found[f"appended, {hash_name}"] = ours, theirs, APPENDED_BLOCKS
        ours, theirs = our_decode(hash_name, ids), their_decode(hash_name, ids)
        found[f"decoded, {hash_name}"] = ours, theirs, APPENDED_BLOCKS
    return found


def measure(name: str, ours: Run, theirs: Run, blocks: int, rounds: int) -> dict[str, Any]:
    """Median microseconds per block of either side; they take turns, so that both see the same machine."""
    assert ours()[1] == theirs()[1], f"{name}: the two sides named the blocks differently"
    took = [(ours()[0], theirs()[0]) for _ in range(rounds)]
    kvtier_us, vllm_us = (statistics.median(side) / blocks * 1e6 for side in zip(*took, strict=True))
    return {"name": name, "kvtier_us": kvtier_us, "vllm_us": vllm_us, "ratio": kvtier_us / vllm_us}


def our_prompt(hash_name: str, ids: list[int]) -> Run:
    """A chain made and fed once."""

    def run() -> tuple[float, list[bytes]]:
        begin = time.process_time()
        chain = HashChain(BLOCK_TOKENS, hash_name, "0")
        chain.update(ids)
        return time.process_time() - begin, list(chain.hashes)

    return run


def our_growth(hash_name: str, ids: list[int]) -> Run:
    """A chain fed with a list that grows by a block."""

    def run() -> tuple[float, list[bytes]]:
        chain, tokens = HashChain(BLOCK_TOKENS, hash_name, "0"), list[int]()
        begin = time.process_time()
        for at in range(0, len(ids), BLOCK_TOKENS):
            tokens.extend(ids[at : at + BLOCK_TOKENS])
            chain.update(tokens)
        return time.process_time() - begin, list(chain.hashes)

    return run


def our_decode(hash_name: str, ids: list[int]) -> Run:
    """A chain told of one token after the other."""

    def run() -> tuple[float, list[bytes]]:
        chain, tokens = HashChain(BLOCK_TOKENS, hash_name, "0"), list[int]()
        begin = time.process_time()
        for token in ids:
            tokens.append(token)
            chain.update(tokens)
        return time.process_time() - begin, list(chain.hashes)

    return run


def their_prompt(hash_name: str, ids: list[int]) -> Run:
    """vLLM's hasher on a request that exists already."""
    hasher = hasher_of(hash_name)
    request = request_of(ids)

    def run() -> tuple[float, list[bytes]]:
        begin = time.process_time()
        hashes = hasher(request)
        return time.process_time() - begin, hashes

    return run


def their_growth(hash_name: str, ids: list[int]) -> Run:
    """vLLM's hasher on a request whose list of all tokens grows by a block; nothing else of the request is counted."""
    hasher = hasher_of(hash_name)

    def run() -> tuple[float, list[bytes]]:
        request = request_of(ids[:0])
        tokens, hashes = request._all_token_ids, request.block_hashes
        begin = time.process_time()
        for at in range(0, len(ids), BLOCK_TOKENS):
            tokens.extend(ids[at : at + BLOCK_TOKENS])
            hashes.extend(hasher(request))
        return time.process_time() - begin, hashes

    return run


def their_decode(hash_name: str, ids: list[int]) -> Run:
    """vLLM's request, told of one token after the other."""
    hasher = hasher_of(hash_name)

    def run() -> tuple[float, list[bytes]]:
        request = request_of(ids[:0], hasher)
        begin = time.process_time()
        for token in ids:
            request.append_output_token_ids(token)
        return time.process_time() - begin, request.block_hashes

    return run


def hasher_of(hash_name: str) -> Any:
    """vLLM's block hasher, after its root is set."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    function = get_hash_fn_by_name(hash_name)
    inner = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, function)
    root = function(os.environ["PYTHONHASHSEED"])

    def hasher(request: Any) -> Any:
        kv_cache_utils.NONE_HASH = root  # one root per process there: each algorithm needs its own
        return inner(request)

    return hasher


def request_of(ids: list[int], hasher: Any = None) -> Any:
    """vLLM's request with a prompt."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=1)
    return Request("r", list(ids), sampling, None, block_hasher=hasher)


if __name__ == "__main__":
    main()
