"""`Guarded`: a policy of another package, watched while it is simulated.

One that raises would end in a traceback, and one that names nobody, or those who are not there, in a cache that holds
more than it has room for, and in figures of that. Shipped policies are tested, and go unwatched: that would cost as
much as they do.

Owns: which handles the policy was told of, and which of them left. Always: what it does against its contract is a
UsageError that names it. Units: handles, blocks.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from kvtier.errors import UsageError
from kvtier.policies import POLICIES
from kvtier.policies.base import Access, Hint, Policy, SupportsHints
from kvtier.policies.outside import Outside, told

REMEDY = "Mend it; kvtier.testing.policies.PolicyContract tests what a policy has to keep."


def policy_of(name: str, blocks: int) -> Policy:
    """A policy by its name, watched if it is not ours. Raises UsageError for one that there is not."""
    try:
        policy = POLICIES.make(name, blocks)
    except KeyError as error:
        raise UsageError(str(error.args[0])) from error
    if not isinstance(policy, Outside):
        return policy
    policy = policy.policy  # watched here, more closely
    return GuardedHints(name, policy) if isinstance(policy, SupportsHints) else Guarded(name, policy)


class Guarded:
    """A `Policy` that passes on what it is told and asked, and looks at the answers."""

    def __init__(self, name: str, policy: Policy) -> None:
        self._name = name
        self._policy = policy
        self._here: set[int] = set()
        self._left: set[int] = set()  # by its own choice: it may remember them

    def __len__(self) -> int:
        return len(self._here)

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        self._ask("touch", handles, access, size_class)
        if access in (Access.FILL, Access.MOVED):
            self._here.update(handles)
            self._left.difference_update(handles)
        self._recount("touch")

    def candidates(
        self, count: int, pinned: Container[int] = (), size_class: int | None = None, incoming: int | None = None
    ) -> list[int]:
        named = self._ask("candidates", count, pinned, size_class, incoming)
        if not isinstance(named, list):
            raise self._wrong("candidates", f"answered {named!r:.60}, and no list")
        if not named and (pinned != () or size_class is not None or count > len(self._here)):
            return []
        if len(named) != count or len({*map(repr, named)}) != count:
            raise self._wrong("candidates", f"named {named!r:.60} where {count} of {len(self._here)} have to leave")
        if not all(type(handle) is int and handle in self._here and handle not in pinned for handle in named):
            raise self._wrong("candidates", f"named {named!r:.60}, not all of whom are there and may leave")
        return named

    def evict(self, handles: Sequence[int], incoming: int | None = None) -> None:
        self._ask("evict", handles, incoming)
        self._here.difference_update(handles)
        self._left.update(handles)
        self._recount("evict")

    def forget(self, handles: Sequence[int]) -> None:
        self._ask("forget", handles)
        self._here.difference_update(handles)
        self._left.difference_update(handles)
        self._recount("forget")

    def remembers(self, handle: int) -> bool:
        return bool(self._ask("remembers", handle))

    def ghosts(self) -> list[int]:
        return self._ghosts("ghosts")

    def forgotten(self) -> list[int]:
        given_up = self._ghosts("forgotten")
        self._left.difference_update(given_up)
        return given_up

    def resize(self, blocks: int) -> None:
        self._ask("resize", blocks)

    def snapshot(self) -> bytes:
        state = self._ask("snapshot")
        if not isinstance(state, bytes):
            raise self._wrong("snapshot", f"answered {state!r:.60}, and no bytes")
        return state

    def restore(self, state: bytes, renamed: Mapping[int, int] | None = None) -> None:
        raise UsageError("a simulation begins with empty tiers, and restores no order")

    def check(self) -> list[str]:
        findings: list[str] = self._ask("check")
        return findings

    def _ghosts(self, verb: str) -> list[int]:
        handles = self._ask(verb)
        if not isinstance(handles, list) or not all(handle in self._left for handle in handles):
            raise self._wrong(verb, f"answered {handles!r:.60}, and no list of those who left")
        return handles

    def _recount(self, verb: str) -> None:
        residents = self._ask("__len__")
        if residents != len(self._here):
            raise self._wrong(verb, f"left it with {residents} residents where there are {len(self._here)}")

    def _ask(self, verb: str, *arguments: Any) -> Any:
        try:
            return getattr(self._policy, verb)(*arguments)
        except (Exception, SystemExit) as error:  # somebody else's code: whatever it is, it is told
            raise self._wrong(verb, f"raised {told(error)}") from error

    def _wrong(self, verb: str, problem: str) -> UsageError:
        return UsageError(f"policy {self._name!r}: its `{verb}` {problem}. {REMEDY}")


class GuardedHints(Guarded):
    """As above, of one that can use hints."""

    def hint(self, handles: Sequence[int], hint: Hint) -> int:
        used = self._ask("hint", handles, hint)
        if not isinstance(used, int):
            raise self._wrong("hint", f"answered {used!r:.60}, and not how many it was of use for")
        return used
