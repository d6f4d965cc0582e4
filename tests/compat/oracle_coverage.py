"""Which branches a log met. Needs no vLLM."""

import json
from collections import Counter

ALLOCATING = ("new", "resume", "chunk", "decode")


def rows_of(text):
    """The operations of a log, without its first and last line."""
    return [json.loads(line) for line in text.splitlines()[1:-1]]


def counts(rows):
    """How often a log met what only full pools and shared prefixes bring about."""
    return {
        "rows": len(rows),
        "hits": sum(row.get("hit", 0) > 0 for row in rows),
        "refusals": sum(row["op"] in ALLOCATING and row["new"] is None for row in rows),
        "preemptions": sum(row["op"] == "preempt" or (row["op"] == "chunk" and "freed" in row) for row in rows),
        "resumed": sum(row["op"] == "resume" and row["new"] is not None for row in rows),
        "loads": sum(row.get("load_blocks") is not None for row in rows),
        "evictions": sum(event.startswith("BlockRemoved") for row in rows for event in row["events"]),
        "duplicates": _duplicates([event for row in rows for event in row["events"]]),
        "boundaries": sum(row.get("boundary", 0) > 0 for row in rows),
        "copies": sum(len(row.get("copies", ())) for row in rows),
        "same_step_refusals": sum("same_step" in row and row["new"] is None for row in rows),
        "resets": sum(row["op"] == "reset" and row["ok"] for row in rows),
    }


def _duplicates(events):
    """How many blocks were cached under a hash that another block of their group had. Plain logs name no group: 0."""
    found, cached = 0, Counter()
    for event in events:
        name, *parts = event.split(":")
        if name == "BlockStored" and len(parts) == 4:
            group, _, _, hashes = parts
            for block_hash in filter(None, hashes.split(",")):
                found += cached[group, block_hash] > 0
                cached[group, block_hash] += 1
        elif name == "BlockRemoved" and len(parts) == 2:
            cached[tuple(parts)] -= 1
        elif name == "AllBlocksCleared":
            cached.clear()
    return found
