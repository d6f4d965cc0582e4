"""What vLLM's own KV cache manager decides, step by step, as JSON lines. Run it with a Python that has vLLM 0.32:

    python -m tests.compat.oracle_manager KIND SEED STEPS BLOCKS BLOCK_TOKENS         prints one log
    python -m tests.compat.oracle_manager --write FOLDER KIND_SEED_STEPS_BLOCKS_BLOCKTOKENS ...

No engine and no GPU: the manager is driven as the scheduler drives it, with random requests. The log holds the calls
as well as the answers, so a second manager replays it without a random generator in common. Always: the same
arguments give the same bytes (PYTHONHASHSEED must not be set: vLLM would start its hash chain from it).

The kinds `full` and `fullswa` (`oracle_plain`) are kept as they were first written: a request is computed at once,
an event has no group, a refused decode ends its request. All other kinds (`oracle_kinds`) are written as follows.

First line    {"init": KIND, "config": {...}, "null_block": 0, SNAPSHOT}
  config      blocks_total, hash_tokens (a block hash covers so many), tokens_max (of a request), tokens_in_flight,
              caching, eagle (a draft model reads hidden states), retention_tokens (null: keep all), watermark (share
              of the pool), groups: [{kind, block_tokens, eagle, and where it applies window, retained_tokens,
              chunk_tokens, mode, speculative_blocks, encoder_tokens_max}]. The scheduler's block is the least common
              multiple of the groups' block_tokens.
Then one line per operation, {"op": NAME, fields, results, SNAPSHOT}. A step starts before each, unless the line says
"same_step": true. Block ids come per group.
  new         id tokens salt lora ([name, path]|null) mm ([[identifier, offset, length]...]) and an admission
  resume      id and an admission, of a request that was refused before (still waiting) or that was preempted
    admission fields: ext (tokens that a connector loads behind the hit), drafts (lookahead tokens), compute (tokens
              of this step; the others follow in chunks), encoder_tokens, must_fit (the whole sequence), reserved
              (blocks left to others). Results: hit (tokens), hit_blocks, boundary (of a shared prefix, which the
              request keeps from here on), new (blocks, null if refused: the request holds nothing and waits).
              The hit is looked up, recorded in the statistics even if the request is then refused, and allocated.
              With ext: first load_blocks (null if refused) for the loaded tokens alone, with must_fit and reserved,
              without drafts, and not cached yet; after_load_alloc (`cached` at that moment); then the loaded tokens
              are cached and count as computed; then `compute` tokens and the drafts are allocated, still as a
              waiting request, without must_fit and reserved. If that is refused: new null and "freed": true.
  chunk       id compute. Result: new; if null the request is preempted: "freed": true
  decode      id tokens (appended, then allocated) drafts (lookahead). Result: new; null comes with "freed": true
  preempt     id. Its blocks are freed, nothing of it is computed any more, and it waits
  free        id. The request ends; one that waits holds nothing
  evict       blocks (of the cache only, in this order)
  reset       ok (false as long as blocks are held)
  "freed" outside of a chunk: the blocks are freed and the request ends.
SNAPSHOT      table {id: blocks of each running request}, free (in order of reuse), nfree, refs {block: holders, if
              any; the null block's is a mere count of touches}, cached {block: first 6 bytes of its hash}, events,
              and copies [[source, target]...] if the operation asked for any. Both ends of a copy are held until it
              ran; they are let go (source, target, source, ...) before the snapshot.
  events      BlockStored:GROUP:PARENT|-:TOKENS:HASH,HASH...  BlockRemoved:GROUP:HASH  AllBlocksCleared, a hash being
              its last 8 bytes as a number. A block that goes with several hashes tells the first one first, then the
              others as they came (`oracle_pool`).
Last line     {"stats": {requests, queries, hits, preempted_requests, preempted_queries, preempted_hits}}, in tokens.

Left out, for vLLM raises or asserts: a cross-attention group with caching (it has no lookup), chunked local attention
with eagle or with groups of another block size, one group alone whose hashes cover less than its block, retention
other than 0 without a sliding window or a mamba group, or by no multiple of the scheduler's block. Not modelled:
context parallelism, checkpoints inside a Mamba prefill, tokens in flight, events for blocks that were only reused.
"""

import argparse
import lzma
import os
import pathlib
import sys

from tests.compat.oracle_coverage import counts, rows_of


def main():
    parser = argparse.ArgumentParser(description="Log what vLLM's KV cache manager decides.")
    parser.add_argument("--write", metavar="FOLDER", type=pathlib.Path)
    parser.add_argument("names", nargs="+", help="KIND SEED STEPS BLOCKS BLOCK_TOKENS, or with --write such names")
    asked = parser.parse_args()
    if "PYTHONHASHSEED" in os.environ:
        parser.error("unset PYTHONHASHSEED: vLLM starts its hash chain from it")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in asked.names if asked.write else ["_".join(asked.names)]:
        text = "".join(line + "\n" for line in log(name))
        if asked.write:
            (asked.write / f"{name}.jsonl.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
        else:
            sys.stdout.write(text)
        met = counts(rows_of(text))
        print(f"{name}:", *(f"{what}={count}" for what, count in met.items()), file=sys.stderr)


def log(name):
    """The lines of the log of that name."""
    from tests.compat import oracle_plain, oracle_steps  # they import vLLM, which reads the environment

    kind, *numbers = name.split("_")
    run = oracle_plain.run if kind in oracle_plain.KINDS else oracle_steps.run
    return run(kind, *map(int, numbers))


if __name__ == "__main__":
    main()
