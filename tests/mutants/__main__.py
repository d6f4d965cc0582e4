"""`python -m tests.mutants`: try the planted bugs, or newly drawn ones, and say which seed caught which.

Prints rows of a Markdown table. Exit codes: 0 all were caught, 1 one was not.
"""

import argparse
import re
import sys
from collections.abc import Iterator

from tests.mutants.draw import FILES, drawn
from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS
from tests.mutants.trial import PACKAGE, SEEDS, Verdict, trials

RANGE = r"\d+:\d+"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these of the table")
    parser.add_argument(
        "--draw", metavar="FIRST:STOP", help="draw these mutants from the sources instead, and show them"
    )
    parser.add_argument("--seeds", default=SEEDS, help=f"of the explorer (default: {SEEDS})")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at a time (default: 1)")
    options = parser.parse_args()
    unknown = {*options.names} - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))} in the table")
    for given in (options.seeds, options.draw):
        if given is not None and not (re.fullmatch(RANGE, given) and len(range(*map(int, given.split(":"))))):
            parser.error(f"{given!r} is no range; write 0:300")
    if options.jobs < 1:
        parser.error("--jobs: use 1 or more")
    mutants = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.draw:
        first, _, stop = options.draw.partition(":")
        sources = {file: (PACKAGE / file).read_text("utf-8") for file in FILES}
        mutants = [drawn(number, sources) for number in range(int(first), int(stop))]
    survivors = 0
    print("| planted bug | file | what goes wrong | first seed |\n|---|---|---|---|")
    for verdict in trials(mutants, options.seeds, options.jobs):
        print("\n".join(_lines(verdict, shown=bool(options.draw))), flush=True)
        survivors += verdict.seed is None
    return int(survivors > 0)


def _lines(verdict: Verdict, *, shown: bool) -> Iterator[str]:
    mutant: Mutant = verdict.mutant
    seed = "not caught" if verdict.seed is None else str(verdict.seed)
    yield f"| {mutant.name} | `{mutant.file}` | {mutant.why} | {seed} |"
    if shown:
        yield f"{mutant.old}\n  -->\n{mutant.new}\n{verdict.said}\n"


if __name__ == "__main__":
    sys.exit(main())
