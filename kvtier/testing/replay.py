"""Replays what another KV cache manager was asked, and compares what ours decides with what that one did.

    python -m kvtier.testing.replay FILE.jsonl [...]

A log is JSON lines, or the same packed with xz: first the manager's configuration, then one operation a line with its
results and what could be seen of the manager afterwards: block tables, free blocks in order, references, names and
events; last the statistics. The file's name says KIND_SEED_STEPS_BLOCKS_BLOCKTOKENS; for the kinds `full` and `fullswa`
the configuration follows from it, other logs hold theirs (tests/compat/oracle_manager.py describes all fields). A log
that ends early, or has a field that nothing is done with, is a mismatch. The last line printed is `mismatches: N`, of
the files that could be replayed; the exit code is 1 if N > 0, and 2 if some file is no log.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from kvtier.allocator.block_pool import NULL_BLOCK
from kvtier.blocks.extra_keys import ExtraKeys, MultiModalItem
from kvtier.cache.coordinator import Hit
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.request import Request
from kvtier.cache.specs import ChunkedLocal, CrossAttention, FullAttention, Group, Mamba, Mla, SlidingWindow, Spec
from kvtier.errors import KvtierError
from kvtier.events import BlockEvent, BlockRemoved, BlocksStored
from kvtier.registry import suggestion
from kvtier.testing.replay_log import (
    FIRST_INPUTS,
    INPUTS,
    Fields,
    LogName,
    NoLogError,
    Row,
    config_of,
    rows_of,
    unread_of_config,
)

SHOWN_MAX = 5  # mismatches printed per file


def replay(path: Path | str) -> list[str]:
    """What differs, in sentences. Raises NoLogError for what is no log."""
    path = Path(path)
    rows = iter(rows_of(path))
    first = next(rows, None)
    if first is None or "init" not in first:
        raise NoLogError(f"{path}: the first line has no 'init'")
    found: list[str] = []
    number, operations, ended = 1, 0, 0
    try:
        config = config_of(path, first)
        player = _Player(config, rich="config" in first)
        found += [f"line 1: {text}" for text in unread_of_config(config)]
        found += [f"line 1: {text}" for text in player.compare({"null_block": NULL_BLOCK}, first, FIRST_INPUTS)]
        for number, row in enumerate(rows, start=2):
            if ended:
                found.append(f"line {number}: there is more after the stats of line {ended}, which end a log")
            if "stats" in row:
                ended = number
                differences = player.compare(player.stats(), row, ())
            else:
                operations += 1
                differences = player.compare(player.play(row), row, player.inputs_of(row["op"]))
            found += [f"line {number}: {text}" for text in differences]
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError, KvtierError) as error:
        text = str(error) if isinstance(error, ValueError | KvtierError) else f"{type(error).__name__}: {error}"
        if not found:
            raise NoLogError(f"{path}: line {number}: {text}") from error
        return [*found, f"line {number}: cannot go on: {text}"]
    return found + _cut(path, number, operations, ended)


def main(arguments: list[str]) -> int:
    """Replay each file; returns the exit code. Raises SystemExit for --help and for arguments that are none."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.testing.replay",
        description="Replay the logs of another KV cache manager, and count what ours decides differently.",
        epilog="Exit code: 0 no mismatch, 1 mismatches, 2 a file that cannot be replayed. The last line is the total.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.jsonl", help="a log, plain or packed with xz (.xz)")
    total, broken = 0, False
    for name in parser.parse_args(arguments).files:
        try:
            found = replay(name)
        except (NoLogError, OSError) as error:
            print(error, file=sys.stderr)
            broken = True
            continue
        total += len(found)
        for text in found[:SHOWN_MAX]:
            print(f"{name}: {text}")
        print(f"{name}: {len(found)} mismatches")
    print(f"mismatches: {total}")
    return 2 if broken else min(total, 1)


def _cut(path: Path, number: int, operations: int, ended: int) -> list[str]:
    """What is missing at the end of a log: its stats, or operations that its name promises."""
    found = [] if ended else [f"line {number}: the last line has no stats: the log is cut"]
    name = LogName.of(path)
    if name is not None and name.steps != operations:
        found.append(f"line {number}: {operations} operations, but the file's name says {name.steps}")
    return found


class _Player:
    """Our manager, the requests of a log, and its operations by name."""

    def __init__(self, config: Row, rich: bool) -> None:
        self.rich = rich
        self.manager = KVCacheManager(
            [_group(group) for group in config["groups"]],
            config["blocks_total"],
            tokens_max=config["tokens_max"],
            tokens_in_flight=config["tokens_in_flight"],
            caching=config["caching"],
            eagle=config["eagle"],
            hash_tokens=config["hash_tokens"] if config["caching"] else None,
            retention_tokens=config["retention_tokens"],
            watermark=config["watermark"],
            events=True,
        )
        self.running: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.verbs: dict[str, Callable[[Row], Row]] = {
            "new": self._new,
            "resume": lambda row: self._admit(self._known(row, self.waiting, "waits"), row),
            "chunk": self._chunk,
            "decode": self._decode,
            "preempt": self._preempt,
            "free": self._free,
            "evict": self._evict,
            "reset": lambda row: {"ok": self.manager.reset()},
        }

    def play(self, row: Row) -> Row:
        """Do what the line says; the results under the names that the log has them."""
        if row["op"] not in INPUTS:
            raise ValueError(f"unknown operation {row['op']!r}. {suggestion(str(row['op']), INPUTS)}")
        if not row.get("same_step"):
            self.manager.begin_step()
        results = self.verbs[row["op"]](row)
        copies = self.manager.take_copies()
        self.manager.copied(copies)
        return results | ({"copies": [list(copy) for copy in copies]} if copies else {})

    def inputs_of(self, operation: str) -> tuple[str, ...]:
        """The fields that say what such an operation does."""
        if operation == "decode":
            return (*INPUTS["decode"], "tokens" if self.rich else "token")
        return INPUTS[operation]

    def stats(self) -> Row:
        stats = self.manager.take_stats()
        names = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
        return {"stats": {name: getattr(stats, name) for name in (names if self.rich else names[:3])}}

    def compare(self, results: Row, row: Row, inputs: tuple[str, ...]) -> list[str]:
        """Our results and state against the line's, whose other fields are `inputs`; and our own invariants."""
        ours = results if "stats" in row else results | self._snapshot()
        fields = [name for name in ours if name in row] + [name for name in ("copies", "freed") if name in row]
        found = [
            f"{name} is {ours.get(name)}, not {row[name]}"
            for name in dict.fromkeys(fields)
            if ours.get(name) != row[name]
        ]
        found += [f"{name} is {ours[name]}, not in the log" for name in ours if name not in row]
        unread = [name for name in row if name not in fields and name not in inputs]
        found += [f"{name} is in the log, but neither says what to do nor is compared" for name in unread]
        return found + self.manager.check()

    def _snapshot(self) -> Row:
        pool = self.manager.pool
        tables = {name: list(self.manager.block_ids(request)) for name, request in self.running.items()}
        return {
            "table": tables,
            "free": pool.free_blocks(),
            "nfree": pool.blocks_free,
            "refs": {str(block): count for block, count in enumerate(pool.refs) if count},
            "cached": self._cached(),
            "events": [_event_text(event, self.rich) for event in self.manager.take_events()],
        }

    def _cached(self) -> Row:
        return {str(block): name.hex()[:12] for block, name in enumerate(self.manager.pool.names.first) if name}

    # ------------------------------------------------------------ operations

    def _new(self, row: Row) -> Row:
        items = tuple(MultiModalItem(*item) for item in row.get("mm") or ())
        lora = tuple(row["lora"]) if row.get("lora") else None
        extra = ExtraKeys(lora=lora, items=items, cache_salt=row["salt"] or None)
        request = self.manager.request(row["id"], row["tokens"], extra=extra)
        self.waiting[row["id"]] = request
        return self._admit(request, row)

    def _admit(self, request: Request, row: Row) -> Row:
        """What a scheduler does for a request that waits."""
        manager = self.manager
        hit = manager.get_computed_blocks(request)
        manager.record_lookup(request, hit)
        results: Row = {"hit": hit.tokens, "hit_blocks": _ids(hit.groups)}
        if self.rich:
            request.shared_prefix_tokens = hit.boundary_tokens
            results["boundary"] = hit.boundary_tokens
        compute = row.get("compute", len(request.tokens) - hit.tokens - row["ext"])
        if row["ext"]:
            return results | self._load(request, hit, row, compute)
        new = manager.allocate_slots(
            request,
            compute,
            hit,
            lookahead_tokens=row.get("drafts", 0),
            encoder_tokens=row.get("encoder_tokens", 0),
            whole_must_fit=row.get("must_fit", False),
            reserved_blocks=row.get("reserved", 0),
        )
        if new is not None:
            self._run(request, hit.tokens + compute)
        return results | {"new": _ids(new)}

    def _load(self, request: Request, hit: Hit, row: Row, compute: int) -> Row:
        """Blocks for tokens that come from elsewhere, their names when they are there, then the first step."""
        manager, external = self.manager, row["ext"]
        loaded = manager.allocate_slots(
            request,
            0,
            hit,
            external_tokens=external,
            delay_naming=True,
            whole_must_fit=row.get("must_fit", False),
            reserved_blocks=row.get("reserved", 0),
        )
        results: Row = {"load_blocks": _ids(loaded), "after_load_alloc": self._cached(), "new": None}
        if not self.rich:
            manager.take_events()  # such a log was written by taking a snapshot here, whose events are in no line
        if loaded is None:
            return results
        manager.cache_blocks(request, hit.tokens + external)
        request.computed_tokens = hit.tokens + external
        new = manager.allocate_slots(request, compute, lookahead_tokens=row.get("drafts", 0))
        if new is None:
            manager.free(self.waiting.pop(request.request_id))
            return results | {"freed": True}
        self._run(request, request.computed_tokens + compute)
        return results | {"new": _ids(new)}

    def _run(self, request: Request, computed_tokens: int) -> None:
        request.running = True
        request.computed_tokens = computed_tokens
        self.running[request.request_id] = self.waiting.pop(request.request_id)

    def _chunk(self, row: Row) -> Row:
        request = self._known(row, self.running, "runs")
        new = self.manager.allocate_slots(request, row["compute"])
        if new is None:
            self._preempt(row)
            return {"new": None, "freed": True}
        request.computed_tokens += row["compute"]
        return {"new": _ids(new)}

    def _decode(self, row: Row) -> Row:
        request = self._known(row, self.running, "runs")
        tokens = row["tokens"] if self.rich else [row["token"]]
        request.append(tokens)
        new = self.manager.allocate_slots(request, len(tokens), lookahead_tokens=row.get("drafts", 0))
        if new is None:
            self.manager.free(self.running.pop(row["id"]))
            return {"new": None, "freed": True}
        request.computed_tokens = len(request.tokens)
        return {"new": _ids(new)}

    def _preempt(self, row: Row) -> Row:
        request = self._known(row, self.running, "runs")
        self.waiting[row["id"]] = self.running.pop(row["id"])
        self.manager.preempt(request)
        return {}

    def _free(self, row: Row) -> Row:
        if row["id"] in self.running:
            self.manager.free(self.running.pop(row["id"]))
        else:
            self._known(row, self.waiting, "runs or waits")
            del self.waiting[row["id"]]  # it holds nothing
        return {}

    def _known(self, row: Row, requests: dict[str, Request], state: str) -> Request:
        if row["id"] not in requests:
            raise ValueError(f"no request {row['id']!r} {state}")
        return requests[row["id"]]

    def _evict(self, row: Row) -> Row:
        self.manager.evict_blocks(row["blocks"])
        return {}


def _group(group: Row) -> Group:
    """Of a log only the rules matter: each layer has one head of one number."""
    group = Fields(group)
    size, kind = group["block_tokens"], group["kind"]
    heads: Row = {"block_tokens": size, "kv_heads": 1, "head_dim": 1, "dtype": "float32"}
    spec: Spec
    if kind == "full":
        spec = FullAttention(**heads)
    elif kind == "mla":
        spec = Mla(block_tokens=size, latent_dim=1, dtype="float32")
    elif kind == "sliding_window":
        spec = SlidingWindow(**heads, window=group["window"], retained_tokens=group.get("retained_tokens", 0))
    elif kind == "chunked_local":
        spec = ChunkedLocal(**heads, chunk_tokens=group["chunk_tokens"])
    elif kind == "cross":
        spec = CrossAttention(**heads, encoder_tokens_max=group["encoder_tokens_max"])
    elif kind == "mamba":
        drafts = group["speculative_blocks"]
        spec = Mamba(
            block_tokens=size, shapes=((1,),), dtypes=("float32",), mode=group["mode"], speculative_blocks=drafts
        )
    else:
        raise ValueError(f"unknown kind of group {kind!r}")
    return Group(spec, eagle=group["eagle"])


def _ids(groups: tuple[list[int], ...] | None) -> list[list[int]] | None:
    return None if groups is None else [list(group) for group in groups]


def _event_text(event: BlockEvent, rich: bool) -> str:
    if isinstance(event, BlocksStored):
        hashes = ",".join(map(_number, event.hashes))
        parent = "-" if event.parent is None else _number(event.parent)
        return f"BlockStored:{event.group}:{parent}:{event.block_tokens}:{hashes}" if rich else f"BlockStored:{hashes}"
    if isinstance(event, BlockRemoved):
        return f"BlockRemoved:{event.group}:{_number(event.hash)}" if rich else f"BlockRemoved:{_number(event.hash)}"
    return "AllBlocksCleared:"


def _number(block_hash: bytes) -> str:
    """Logs have the last eight bytes of a hash, as a number."""
    return str(int.from_bytes(block_hash[-8:], "big"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
