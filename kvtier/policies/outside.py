"""`Outside`: a policy of another package, told by its name when it fails.

It would end a cache as a bug of nobody knows whom. Every verb is passed on; what it raises, and an answer that cannot
be one, is a `PolicyFault` that says which policy, which verb and what. Shipped policies go without: that costs some
tenths of a microsecond a call.

Owns nothing. Always: it has the verbs that the policy has, the optional ones (`SupportsHints`, `SupportsSizes`) too.
Units: handles.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from kvtier.errors import PolicyFault
from kvtier.policies.base import Policy, SupportsHints, SupportsSizes

METHODS = tuple(name for name in vars(Policy) if name == "__len__" or not name.startswith("_"))
OPTIONAL = tuple(name for kind in (SupportsHints, SupportsSizes) for name in vars(kind) if not name.startswith("_"))


class Outside:
    """`policy` is the policy itself, `name` what the configuration calls it."""

    def __init__(self, name: str, policy: Policy) -> None:
        self.name = name
        self.policy = policy
        for verb in (*METHODS, *OPTIONAL):
            if verb != "__len__" and callable(own := getattr(policy, verb, None)):
                setattr(self, verb, partial(self._ask, verb, own))

    def __len__(self) -> int:
        return int(self._ask("__len__", self.policy.__len__))

    def _ask(self, verb: str, own: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        try:
            answer = own(*arguments, **more)
            right = _is_answer(verb, answer, *arguments)
        except (Exception, SystemExit) as error:  # somebody else's code: whatever it is, it is told
            if verb == "restore" and isinstance(error, ValueError):
                raise  # as a policy says that a snapshot is none of its own
            raise PolicyFault(self.name, verb, f"raised {told(error)}") from error
        if not right:
            raise PolicyFault(self.name, verb, f"answered {answer!r:.60}")
        return answer


def _is_answer(verb: str, answer: Any, count: int = 0, *_: Any) -> bool:
    """What can be seen of an answer without knowing who is there."""
    if verb == "candidates":
        return isinstance(answer, list) and len(answer) in (0, count) and len({*answer}) == len(answer)
    return verb not in ("__len__", "hint") or isinstance(answer, int)


def told(error: BaseException) -> str:
    """What somebody else's code raised, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
