"""What callers pass, checked before it reaches the engine's thread: a mistake must not look like a bug of ours.

Pure functions; each returns the value in its plain type or raises UsageError naming the argument. Always: whatever the
value is, nothing else is raised, not even by showing it. A truth value is no number, nor is a text that reads like one.
"""

import operator
from collections.abc import Iterator
from reprlib import Repr
from typing import Any, TypeVar

from kvtier.cache.ranks import PRIORITY_MAX, PRIORITY_MIN
from kvtier.cache.sessions import NAME_BYTES_MAX
from kvtier.config.units import SECONDS_MAX
from kvtier.engine.hints import Advice, rank_of
from kvtier.errors import UsageError
from kvtier.types import BlockKey

T = TypeVar("T")
Name = TypeVar("Name", bound=str | None)
INTEGER_MAX = 1 << 53  # floats count so far
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def instance(name: str, value: Any, kind: type[T]) -> T:
    """A value of this type. Of a text or bytes the plain content: a type derived from them may compare as it likes."""
    if type(value) is kind:
        return value
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {shown(value)}; pass a {kind.__name__}")
    empty: Any = kind() if kind in (str, bytes) else None
    return value if empty is None else kind.__add__(empty, value)  # type: ignore[operator]


def optional(name: str, value: Any, kind: type[T]) -> T | None:
    """A value of this type, or None."""
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{name} is {shown(value)}; pass a {kind.__name__} or None")
    return None if value is None else instance(name, value, kind)


def session_name(name: Name) -> Name:
    """What a session is called, if anything, within the length in which thousands of names can be remembered."""
    if name is not None and len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise UsageError(f"session {shown(name)} has more than {NAME_BYTES_MAX} bytes in UTF-8: use a shorter name")
    return name


def one_of(name: str, value: T, kinds: tuple[type, ...]) -> T:
    """A value of one of these types."""
    if not isinstance(value, kinds):
        raise UsageError(f"{name} is {shown(value)}; pass one of {', '.join(kind.__name__ for kind in kinds)}")
    return value


def integer(name: str, value: Any, at_least: int = 0, at_most: int = INTEGER_MAX) -> int:
    """An integer of any kind, numpy's included."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except Exception:  # noqa: BLE001  it is the value's own code that runs
        number = None
    if number is None:
        raise UsageError(f"{name} is {shown(value)}; pass an integer")
    if number < at_least:
        raise UsageError(f"{name}={shown(number)}: use {at_least} or more")
    if number > INTEGER_MAX:
        raise UsageError(f"{name} has {number.bit_length()} bits: use 2**53 at most")
    if number > at_most:
        raise UsageError(f"{name}={number}: use {at_most} at most")
    return number


def limit(name: str, value: Any) -> int | None:
    """An upper limit or None; one below zero (`len([]) - 1`) is zero."""
    return None if value is None else max(0, integer(name, value, at_least=-1))


def seconds(name: str, value: Any) -> float:
    """A number of seconds of any kind, not negative, and no more than a thread can sleep at once."""
    try:
        number = None if isinstance(value, (bool, str, bytes, bytearray)) else float(value)
    except OverflowError:
        raise UsageError(f"{name} is more than a float holds: use {SECONDS_MAX:g} seconds at most") from None
    except Exception:  # noqa: BLE001  it is the value's own code that runs
        number = None
    if number is None:
        raise UsageError(f"{name} is {shown(value)}; pass seconds")
    if not 0 <= number <= SECONDS_MAX:
        raise UsageError(f"{name}={number!r}: use 0 or more seconds, and {SECONDS_MAX:g} (30 years) at most")
    return number


def advice(ends: Any, returns_in_s: Any, priority: Any, pin: Any, ttl_s: Any) -> Advice:
    """What is said of a session: that it ends, or anything else, and for how long a rank holds.

    Beside the other one, priority=0 and pin=False say nothing. Raises UsageError for two that contradict each other.
    """
    said: dict[str, Any] = {
        "priority": None if priority is None else integer("priority", priority, PRIORITY_MIN, PRIORITY_MAX),
        "pin": optional("pin", pin, bool),
        "returns_in_s": None if returns_in_s is None else seconds("returns_in_s", returns_in_s),
        "ttl_s": None if ttl_s is None else seconds("ttl_s", ttl_s),
    }
    said = {name: value for name, value in said.items() if value is not None}
    over, rank = instance("ends", ends, bool), rank_of(said.get("priority"), said.get("pin"))
    for one, other in _contradicting({"ends": True} | said if over else said, rank):
        raise UsageError(f"{one} and {other} contradict each other: say one of them")
    if not over and rank is None and "returns_in_s" not in said:
        raise UsageError("a hint says either ends=True, or any of returns_in_s, priority and pin")
    if "ttl_s" in said and rank is None:
        raise UsageError("ttl_s says how long a priority or a pin holds; give one of them")
    return Advice(over, said.get("returns_in_s"), rank, said.get("ttl_s"))


def _contradicting(said: dict[str, Any], rank: int | None) -> Iterator[tuple[str, str]]:
    """Two of these that cannot both be meant."""
    names = [f"{name}={value}" for name, value in said.items()]
    if "ends" in said:
        yield from ((names[0], other) for other in names[1:])
    elif said.get("pin") and said.get("priority", 0) < 0:
        yield names[0], names[1]
    elif "ttl_s" in said and rank == 0:  # there is nothing that could be over
        yield names[0], names[-1]


def slot_pairs(pairs: Any) -> list[tuple[int, BlockKey]]:
    """(slot, key) pairs."""
    checked: list[tuple[int, BlockKey]] = []
    try:
        given = list(pairs)
    except Exception:  # noqa: BLE001  it is the value's own code that runs
        raise UsageError(f"pairs is {shown(pairs)}; pass (slot, key) pairs") from None
    for pair in given:
        try:
            slot, key = pair
        except Exception:  # noqa: BLE001
            raise UsageError(f"pairs holds {shown(pair)}; pass (slot, key) pairs") from None
        checked.append((integer("slot", slot), BlockKey(instance("key", key, bytes))))
    return checked


def shown(value: object) -> str:
    """A value for a message: short, whatever it is."""
    try:
        return _REPR.repr(value)
    except ValueError:  # an integer of more digits than Python spells out
        return f"a {type(value).__name__} beyond all measure"
