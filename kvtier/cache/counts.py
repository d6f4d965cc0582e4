"""Numbers and flags that callers hand in: what they must be, and what the error says otherwise. Owns nothing."""

from collections.abc import Iterable
from typing import TypeVar

from kvtier.errors import UsageError

T = TypeVar("T")


def expect_count(name: str, value: object, least: int) -> None:
    """Raises UsageError unless `value` is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise UsageError(f"{name} is {value!r}; give a whole number from {least} on")


def expect_flag(name: str, value: object) -> None:
    """Raises UsageError unless `value` is True or False."""
    if type(value) is not bool:
        raise UsageError(f"{name} is {value!r}; give True or False")


def expect_share(name: str, value: object) -> None:
    """Raises UsageError unless `value` is a number from 0 to less than 1."""
    if type(value) not in (int, float) or not 0 <= value < 1:  # type: ignore[operator]
        raise UsageError(f"{name} is {value!r}; give a share from 0 to less than 1")


def expect_list(name: str, values: Iterable[T]) -> list[T]:
    """The values as a list. Raises UsageError for what cannot be one."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{name} is {values!r}; give a list")
    return list(values)
