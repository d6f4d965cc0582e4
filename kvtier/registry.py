"""A named set of choices that explains itself when asked for one it does not have."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from kvtier.errors import UsageError

T = TypeVar("T")
POLICY_ENTRY_POINTS = "kvtier.policies"  # by which other packages declare theirs


def suggestion(word: str, known: Iterable[str]) -> str:
    """A sentence naming the known word nearest to `word`, or all of them, or that there are none."""
    known = sorted(known)
    if not known:
        return "There is none to choose."
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."


class Registry(Generic[T]):
    """Maps names to things of one kind, such as policies."""

    def __init__(self, kind: str, entries: dict[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def add(self, name: str, entry: T) -> None:
        """Add a choice, for the life of the process. Raises UsageError for a name that is taken or no word."""
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
            raise UsageError(f"{name!r} cannot name a {self.kind}; use letters, digits, - and _")
        if name in self._entries:
            raise UsageError(f"there is a {self.kind} {name!r} already; take another name")
        self._entries[name] = entry

    def get(self, name: str) -> T:
        """Raises KeyError whose text names the nearest choice."""
        if not isinstance(name, str) or name not in self._entries:
            raise KeyError(f"unknown {self.kind} {name!r}. {suggestion(str(name), self._entries)}")
        return self._entries[name]
