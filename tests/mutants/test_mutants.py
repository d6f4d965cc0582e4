"""The explorer against bugs that are planted on purpose: it would be worth little if it saw none."""

from pathlib import Path

import pytest

from tests.mutants import table
from tests.mutants.draw import FILES, drawn
from tests.mutants.mutant import Mutant
from tests.mutants.trial import PACKAGE, trial

DOCS = Path(__file__).parents[2] / "docs" / "testing.md"
DRAWS = 20

by_name = pytest.mark.parametrize("mutant", table.MUTANTS, ids=lambda mutant: mutant.name)


@by_name
def test_a_mutant_still_applies(mutant):
    """The code has moved on, and the bug that is said to be caught is planted nowhere."""
    source = (PACKAGE / mutant.file).read_text("utf-8")
    planted = mutant.planted_in(source)
    assert planted != source
    compile(planted, mutant.file, "exec")


@by_name
def test_the_documentation_has_every_mutant(mutant):
    """The table in docs/testing.md leaves out a bug, or speaks of another file or fault."""
    assert f"| {mutant.name} | `{mutant.file}` | {mutant.why} | " in DOCS.read_text("utf-8")


def test_a_mutant_without_a_place_is_refused():
    """A bug whose text is gone, or is there twice, is planted in the wrong place or not at all."""
    for source in ("", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match="occurs"):
            Mutant("m", "f.py", "x = 1", "x = 2", "").planted_in(source)


def test_a_number_draws_the_same_mutant_and_it_compiles():
    """A drawn mutant cannot be seen again, or breaks the syntax and not the logic."""
    sources = {file: (PACKAGE / file).read_text("utf-8") for file in FILES}
    mutants = [drawn(number, sources) for number in range(DRAWS)]
    assert mutants == [drawn(number, sources) for number in range(DRAWS)]
    assert len({mutant.why for mutant in mutants}) > 4
    for mutant in mutants:
        compile(mutant.planted_in(sources[mutant.file]), mutant.file, "exec")


@pytest.mark.soak
@by_name
def test_the_explorer_catches(mutant):
    """A whole kind of bug could be in the engine and no seed would show it."""
    verdict = trial(mutant)
    assert verdict.seed is not None, f"{mutant.name}: {verdict.said}"
