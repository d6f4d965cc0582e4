"""Lifetime: whether something may still be used, here and now.

Owns: one flag and the process id. What was carried across a fork shares memory and files with the parent, which
knows nothing of the child; hence everything refuses there, and closing does nothing.
"""

import os

from kvtier.errors import ClosedError


class Lifetime:
    """From its making to `end`, in the process that made it."""

    def __init__(self, what: str) -> None:
        """`what` names the thing in messages, such as ``the slab of tier host``."""
        self._what = what
        self._pid = os.getpid()
        self._ended = False

    def expect(self) -> None:
        """Raises ClosedError once it has ended, and in a forked child."""
        if self._ended:
            raise ClosedError(f"{self._what} is closed")
        if self._pid != os.getpid():
            raise ClosedError(f"{self._what} belongs to the parent process; use the spawn start method")

    def end(self) -> bool:
        """True for the one caller that has to clean up: the first one, in the process of the making."""
        if self._ended or self._pid != os.getpid():
            return False
        self._ended = True
        return True
