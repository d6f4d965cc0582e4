"""What a program hears that used the command wrongly: the same JSON as of any other error.

Options and arguments are read before a verb runs, and typer tells of what is wrong with them in words, on stderr, with
exit code 2. Owns nothing. Always: whoever gave --json finds `{"error": ...}` on stdout as well, whichever verb it was.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

# click's, or that of the copy of it which later versions of typer have
_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
_WANTED = f"{__name__}.wanted"


class TellingGroup(TyperGroup):
    """The command itself: all verbs, also those in groups of their own, are read within its calls."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """As typer's: the command's own options are read."""
        wanted = _is_wanted(args)
        with _telling(wanted):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[_WANTED] = wanted
        return context

    def invoke(self, ctx: Any) -> Any:
        """As typer's: the verb's options are read, and it runs."""
        with _telling(ctx.meta[_WANTED]):
            return super().invoke(ctx)


def _is_wanted(args: Sequence[str]) -> bool:
    """What follows -- is no option, whatever it looks like."""
    options = args[: args.index("--")] if "--" in args else args
    return "--json" in options


@contextmanager
def _telling(wanted: bool) -> Iterator[None]:
    try:
        yield
    except _USAGE_ERROR as error:
        if wanted:
            print(json.dumps({"error": error.format_message()}))
        raise
