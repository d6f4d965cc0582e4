"""The logs that `replay` reads: their lines, what a file's name says, and the fields that a line may have.

Owns no state. Always: what cannot be read is refused with the file and its line. Units: lines, counted from 1.
"""

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_ADMISSION = ("ext", "drafts", "compute", "encoder_tokens", "must_fit", "reserved", "same_step")
# By operation: the fields that say what to do. All others are results, and are compared.
INPUTS = {
    "new": ("op", "id", "tokens", "salt", "lora", "mm", *_ADMISSION),
    "resume": ("op", "id", *_ADMISSION),
    "chunk": ("op", "id", "compute", "same_step"),
    "decode": ("op", "id", "drafts", "same_step"),  # and the tokens
    "preempt": ("op", "id", "same_step"),
    "free": ("op", "id", "same_step"),
    "evict": ("op", "blocks", "same_step"),
    "reset": ("op", "same_step"),
}
FIRST_INPUTS = ("init", "config")
CONFIG_FIELDS = (
    "groups",
    "blocks_total",
    "hash_tokens",
    "tokens_max",
    "tokens_in_flight",
    "caching",
    "eagle",
    "retention_tokens",
    "watermark",
)
_GROUP_FIELDS: dict[str, tuple[str, ...]] = {
    "full": (),
    "mla": (),
    "sliding_window": ("window", "retained_tokens"),
    "chunked_local": ("chunk_tokens",),
    "cross": ("encoder_tokens_max",),
    "mamba": ("mode", "speculative_blocks"),
}


class NoLogError(Exception):
    """The file is none that can be replayed; the text says why."""


class Fields(Row):
    """The fields of one object of a log, which says what it misses."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"the field {name!r} is missing")


@dataclass(frozen=True, slots=True)
class LogName:
    """KIND_SEED_STEPS_BLOCKS_BLOCKTOKENS: what is needed of it."""

    steps: int
    blocks_total: int
    block_tokens: int

    @classmethod
    def of(cls, path: Path) -> "LogName | None":
        """None for a name of another form."""
        parts = path.name.split(".")[0].split("_")
        if len(parts) != 5 or not all(part.isascii() and part.isdigit() for part in parts[1:]):
            return None
        return cls(*map(int, parts[2:]))


def rows_of(path: Path) -> Iterator[Fields]:
    """The lines of a log. Raises NoLogError, and OSError for a file that cannot be opened."""
    number = 0
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                yield _row(path, number, line)
        except (lzma.LZMAError, EOFError) as error:
            raise NoLogError(f"{path}: after line {number}: {error}") from error


def config_of(path: Path, first: Row) -> Fields:
    """The manager's configuration, from the first line, or from the file's name for the kinds that leave it to that."""
    if "config" in first:
        if not isinstance(first["config"], dict):
            raise ValueError(f"config is {first['config']!r}, not an object")
        return Fields(first["config"])
    name, init = LogName.of(path), first["init"]
    if init not in ("full", "full+swa") or name is None:
        raise NoLogError(f"{path}: name it KIND_SEED_STEPS_BLOCKS_BLOCKTOKENS.jsonl, or give its first line a 'config'")
    groups = [{"kind": "full", "block_tokens": name.block_tokens, "eagle": False}]
    if init == "full+swa":
        groups.append(groups[0] | {"kind": "sliding_window", "window": 2 * name.block_tokens})
    return Fields(
        groups=groups,
        blocks_total=name.blocks_total,
        hash_tokens=name.block_tokens,
        tokens_max=1024,
        tokens_in_flight=None,
        caching=True,
        eagle=False,
        retention_tokens=None,
        watermark=0.0,
    )


def unread_of_config(config: Row) -> list[str]:
    """Fields of a configuration that a replay would pass over, each as a sentence."""
    unread = [f"config.{name}" for name in config if name not in CONFIG_FIELDS]
    for index, group in enumerate(config["groups"]):
        known = ("kind", "block_tokens", "eagle", *_GROUP_FIELDS.get(group["kind"], ()))
        unread += [f"config.groups[{index}].{name}" for name in group if name not in known]
    return [f"{name} is no setting of a manager" for name in unread]


def _row(path: Path, number: int, line: bytes) -> Fields:
    try:
        row = json.loads(line.decode().strip())
    except json.JSONDecodeError as error:
        raise NoLogError(f"{path}: line {number} is no JSON: {error.msg} at column {error.colno}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise NoLogError(f"{path}: line {number} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise NoLogError(f"{path}: line {number} is no object")
    return Fields(row)
