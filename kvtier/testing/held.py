"""`Gate`: holds a running tier's verbs back until a test lets them go, to put transfers in an order of its choosing.

Patches the tier object, so that it also works on one that an engine has opened already. Units: calls. A test that
forgets to let go fails after `PATIENCE_S` instead of hanging.
"""

import threading
from collections.abc import Callable
from typing import Any

from kvtier.tiers.base import SupportsGroups, Tier

PATIENCE_S = 60.0
VERBS = ("read", "write")


class Gate:
    """Stands before `read` and `write` of a tier. Open at first."""

    def __init__(self, tier: Tier) -> None:
        self._name = tier.name
        self._open = {verb: threading.Event() for verb in VERBS}
        self._arrived = {verb: threading.Semaphore(0) for verb in VERBS}
        self.calls = dict.fromkeys(VERBS, 0)
        for verb in VERBS:
            self._open[verb].set()
            setattr(tier, verb, self._gated(verb, getattr(tier, verb)))
        if isinstance(tier, SupportsGroups):
            setattr(tier, "write_together", self._gated("write", tier.write_together))  # noqa: B010

    def hold(self, verb: str) -> None:
        """Calls of `verb` ("read" or "write") wait from now on."""
        self._open[verb].clear()

    def let_go(self) -> None:
        """Everything held goes on, and nothing is held any more."""
        for gate in self._open.values():
            gate.set()

    def wait_for(self, verb: str) -> None:
        """Block until a call of `verb` has arrived, once per call."""
        assert self._arrived[verb].acquire(timeout=PATIENCE_S), f"no {verb} arrived at tier {self._name}"

    def _gated(self, verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def passing(argument: Any) -> Any:
            self.calls[verb] += 1
            self._arrived[verb].release()
            assert self._open[verb].wait(PATIENCE_S), f"a held {verb} of tier {self._name} was never let go"
            return call(argument)

        return passing
