"""From a file to a `Trace`: which of three kinds of line it has, and what each means.

    ours       {"t": s, "in": tokens, "out": tokens, "ids": [block, ...]}
    Mooncake   {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, ...]}
    vLLM       [ts, [event, ...]] or {"ts": ts, "events": [event, ...]}: its batches of KV events (`vllm_events`)

A first line {"kvtier_trace": 1, "block_tokens": n, "block_bytes": n} says what a block is; without it `block_tokens`
is asked for, or 512. Blocks are named by whole numbers or texts. Ours may name its "session" (a text) and its "model"
(a text; else the first line's): one name under two models is two blocks. Hints may stand between requests
(`hint_lines`). Always: the first line decides for the whole file, and what is no such line is a TraceError with its
number; but a recording (one that begins with a header) may break off.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import TraceError
from kvtier.sim.hint_lines import HINT, HintLines
from kvtier.sim.packed import lines_of, stem_of
from kvtier.sim.trace import BLOCK_TOKENS, Numbers, Trace, TracedRequest
from kvtier.sim.vllm_events import EventChains

HEADER, MODEL = "kvtier_trace", "model"
VERSION = 1
OURS = ("t", "in", "out", "ids")
MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
KINDS = "Use kvtier's lines (t, in, out, ids), Mooncake's (timestamp, input_length, ...) or vLLM's batches of events."
BLOCK_TOKENS_MAX = 1 << 20
TIME_MAX = 1e15

Row = tuple[int, Any]  # line number, what the line says


class _Fields(NamedTuple):
    """What a kind of line calls its fields, and how many of its time units a second has."""

    at: str
    tokens_in: str
    tokens_out: str
    blocks: str
    per_second: float


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """Read a whole trace. block_tokens: of a file that does not say it itself. Raises TraceError."""
    rows = _rows(path)
    first = next(rows, None)
    block_bytes = model = None
    if first is not None and _is_header(first[1]):
        block_tokens, block_bytes = _header(path, *first)
        model = _model(path, *first)
        first = next(rows, None)
    if first is None:
        raise TraceError(str(path), None, "it holds no request", KINDS)
    number, line = first
    following = chain((first,), rows)
    hint_lines = HintLines()
    if isinstance(line, list) or (isinstance(line, dict) and "events" in line):
        requests, block_tokens = _of_events(path, following)
    else:
        block_tokens = block_tokens or BLOCK_TOKENS
        fields = _fields_of(path, number, line)
        requests = _of_lines(path, following, fields, block_tokens, hint_lines, model)
    if not requests:
        raise TraceError(str(path), None, "it holds no request", KINDS)
    return Trace(stem_of(path), block_tokens, block_bytes, requests, tuple(hint_lines.hints))


def _rows(path: Path) -> Iterator[Row]:
    recorded = False
    for number, line in lines_of(path):
        try:
            row = json.loads(line)
            recorded = recorded or _is_header(row)
            yield number, row
        except ValueError as error:
            if recorded and not line.endswith("\n"):
                return  # a recorder that is at work, or was killed, has not come to the end of it
            raise TraceError(str(path), number, f"it is no JSON ({error})", "Mend or remove the line.") from None
        except RecursionError:
            raise TraceError(str(path), number, "it is nested too deeply", "Mend or remove the line.") from None


# ---------------------------------------------------------------- the first line


def _is_header(line: Any) -> bool:
    return isinstance(line, dict) and HEADER in line


def _header(path: Path, number: int, line: dict[str, Any]) -> tuple[int, int | None]:
    if type(line[HEADER]) is not int or line[HEADER] != VERSION:
        problem = f"it has version {line[HEADER]!r}, and this kvtier reads version {VERSION}"
        raise TraceError(str(path), number, problem, "Use the kvtier that wrote it.")
    size = _count(path, number, line, "block_tokens", least=1)
    if size > BLOCK_TOKENS_MAX:
        raise TraceError(str(path), number, f"blocks of {size} tokens", f"Use at most {BLOCK_TOKENS_MAX}.")
    block_bytes = _count(path, number, line, "block_bytes", least=1) if "block_bytes" in line else None
    return size, block_bytes


def _model(path: Path, number: int, line: dict[str, Any]) -> str | None:
    """Whose blocks a line, or all that say nothing else, are about; None: it does not say."""
    model = line.get(MODEL)
    if model is not None and not isinstance(model, str):
        raise TraceError(str(path), number, f"{MODEL!r} is {model!r:.40}, and no text", "Mend or remove the line.")
    return model


def _fields_of(path: Path, number: int, line: Any) -> _Fields:
    if isinstance(line, dict) and MOONCAKE[3] in line:
        return _Fields(*MOONCAKE, per_second=1000.0)
    if isinstance(line, dict) and (OURS[3] in line or HINT in line):
        return _Fields(*OURS, per_second=1.0)
    raise TraceError(str(path), number, "it is no request", KINDS)


# ---------------------------------------------------------------- a request a line


def _of_lines(
    path: Path, rows: Iterator[Row], fields: _Fields, block_tokens: int, hint_lines: HintLines, usual: str | None
) -> list[TracedRequest]:
    """usual: the model of those that name none."""
    numbers = Numbers()
    requests: list[TracedRequest] = []
    for number, line in rows:
        if not isinstance(line, dict):
            raise TraceError(str(path), number, "it is no request", KINDS)
        try:
            if HINT in line:
                hint_lines.add(line, _time(path, number, line, fields.at) / fields.per_second)
                continue
            session = hint_lines.named(line, len(requests))
        except ValueError as error:
            raise TraceError(str(path), number, str(error), "Mend or remove the line.") from None
        tokens_in = _count(path, number, line, fields.tokens_in, least=1)
        tokens_out = _count(path, number, line, fields.tokens_out) if fields.tokens_out in line else 0
        at = _time(path, number, line, fields.at)
        names = _names(path, number, line, fields.blocks)
        if len(names) > -(-tokens_in // block_tokens):
            problem = f"{len(names)} blocks of {block_tokens} tokens are too many for {tokens_in} tokens"
            raise TraceError(str(path), number, problem, "Say how long a block is (--block-tokens).")
        model = _model(path, number, line) or usual
        blocks = [numbers[name if model == usual else (model, name)] for name in names]
        requests.append(TracedRequest(at / fields.per_second, tokens_in, tokens_out, blocks, session))
    return requests


def _names(path: Path, number: int, line: dict[str, Any], key: str) -> list[Any]:
    names = line.get(key)
    if not isinstance(names, list) or not {*map(type, names)} <= {int, str}:
        problem = f"{key!r} is no list of block names"
        raise TraceError(str(path), number, problem, "Name blocks by whole numbers or texts.")
    if len(set(names)) != len(names):
        problem = f"{key!r} names a block twice"
        raise TraceError(str(path), number, problem, "A block's name must tell what lies before it: hash the prefix.")
    return names


def _count(path: Path, number: int, line: dict[str, Any], key: str, least: int = 0) -> int:
    value = line.get(key)
    if type(value) is not int or not least <= value < 1 << 62:
        problem = f"{key!r} is missing" if key not in line else f"{key!r} is {value!r:.40}"
        raise TraceError(str(path), number, problem, f"Give a whole number from {least} on.")
    return value


def _time(path: Path, number: int, line: dict[str, Any], key: str) -> float:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < TIME_MAX:
        problem = f"{key!r} is missing" if key not in line else f"{key!r} is {value!r:.40}"
        raise TraceError(str(path), number, problem, "Give the time since the start, 0 or more.")
    return float(value)


# ---------------------------------------------------------------- batches of events


def _of_events(path: Path, rows: Iterator[Row]) -> tuple[list[TracedRequest], int]:
    chains = EventChains()
    for number, line in rows:
        try:
            chains.add(line)
        except ValueError as error:
            raise TraceError(
                str(path), number, str(error), "Log vLLM's KV event batches as JSON, one a line."
            ) from None
    return chains.requests(), chains.block_tokens
