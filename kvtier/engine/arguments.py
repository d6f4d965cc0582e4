"""What callers pass, checked before it reaches the engine's thread: a mistake must not look like a bug of ours.

Pure functions; each returns the value in its plain type or raises UsageError naming the argument.
"""

import math
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

from kvtier.errors import UsageError
from kvtier.types import BlockKey

T = TypeVar("T")
INTEGER_MAX = 1 << 53  # floats count so far
SECONDS_MAX = 1e12  # 30,000 years


def instance(name: str, value: Any, kind: type[T]) -> T:
    """A value of this type."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {value!r}; pass a {kind.__name__}")
    return value


def integer(name: str, value: Any, at_least: int = 0) -> int:
    """An integer of any kind, numpy's included."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}; pass an integer") from None
    if number < at_least:
        raise UsageError(f"{name}={number}: use {at_least} or more")
    if number > INTEGER_MAX:
        raise UsageError(f"{name} has {number.bit_length()} bits: use 2**53 at most")
    return number


def limit(name: str, value: Any) -> int | None:
    """An upper limit or None; one below zero (`len([]) - 1`) is zero."""
    return None if value is None else max(0, integer(name, value, at_least=-1))


def seconds(name: str, value: Any) -> float:
    """A finite number of seconds, not negative."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {value!r}; pass seconds") from None
    except OverflowError:
        number = math.inf
    if not 0 <= number <= SECONDS_MAX:
        raise UsageError(f"{name}={number!r}: use 0 or more seconds, and {SECONDS_MAX:g} at most")
    return number


def slot_pairs(pairs: Any) -> list[tuple[int, BlockKey]]:
    """(slot, key) pairs."""
    checked: list[tuple[int, BlockKey]] = []
    if not isinstance(pairs, Iterable):
        raise UsageError(f"pairs is {pairs!r}; pass (slot, key) pairs")
    for pair in pairs:
        try:
            slot, key = pair
        except (TypeError, ValueError):
            raise UsageError(f"pairs holds {pair!r}; pass (slot, key) pairs") from None
        checked.append((integer("slot", slot), BlockKey(instance("key", key, bytes))))
    return checked
