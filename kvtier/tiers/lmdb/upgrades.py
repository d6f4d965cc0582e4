"""Brings stores of older formats up to date, at the first opening for writing.

Owns the table of steps. Always: a step is one transaction, and its last row is a header with the step's target, so
that an interruption leaves a store of one format or of the other. A format that is neither read nor in the table is
refused: whoever wrote it knows more than we do.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import CorruptBlock, InvariantError
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.layout import HEADER_KEY, format_of

_log = logging.getLogger(__name__)


class Step(NamedTuple):
    """From one format to `target`. `change`: given the index as it is, all rows that are to be otherwise."""

    target: int
    change: Callable[[Index], Change]


UPGRADES: dict[int, Step] = {}  # by the format they begin with; 1 and 2 are the first that there were


def upgrade(folder: Path, index: Index) -> None:
    """Apply steps as long as there is one for the store's format. Raises lmdb.Error or OSError."""
    while (version := _format(index)) in UPGRADES:
        target, change = UPGRADES[version]
        _log.warning("%s: its format %d becomes format %d", folder, version, target)
        index.commit_growing(change(index), EVICT_RESERVE_BYTES)
        if _format(index) != target:
            raise InvariantError(f"a step from format {version} to {target} led to {_format(index)}")
        index.find_again()


def _format(index: Index) -> int:
    """What the header says; -1 for a store that has none, or none that can be read."""
    row = index.get("meta", HEADER_KEY)
    try:
        return -1 if row is None else format_of(row)
    except CorruptBlock:
        return -1
