"""Whoever uses the command wrongly is told in the way that was asked for, by every verb."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvtier.cli.main import app


def verbs_of(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs_of(command, *before, name)
        else:
            yield *before, name


VERBS = list(verbs_of(get_command(app)))
WRONG = [
    ("inspect", "store", "--sample", "-1"),
    ("inspect", "store", "--sample", "many"),
    ("inspect",),
    ("inspect", "store", "another"),
    ("bench", "host", "--rounds", "0"),
    ("simulate", "trace", "--colour", "red"),
    ("config", "praise"),
    ("praise",),
    ("--praise",),
]


def check(arguments: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*arguments, "--json"])
    assert told.exit_code == 2
    (line,) = told.stdout.splitlines()
    answer = json.loads(line)
    assert answer.keys() == {"error"}
    assert told.stderr.endswith(f"Error: {answer['error']}\n")
    in_words = CliRunner().invoke(app, [*arguments])
    assert in_words.exit_code == 2
    assert in_words.stdout == ""


def test_these_are_the_verbs() -> None:
    """A verb would be tested by nobody."""
    assert {("inspect",), ("bench", "engine"), ("config", "show"), ("simulate",), ("gc",)} <= {*VERBS}
    assert len(VERBS) == len({*VERBS}) >= 12


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_tells_programs_of_an_option_that_it_has_not(verb: tuple[str, ...]) -> None:
    """A program that reads JSON finds nothing, and has no words for its log."""
    check((*verb, "--praise"))


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_whatever_is_wrong_is_told(arguments: tuple[str, ...]) -> None:
    """A value, a missing argument, one too many, or a verb that there is not."""
    check(arguments)


def test_an_option_without_its_value() -> None:
    """The JSON would be left out where the last option has none."""
    told = CliRunner().invoke(app, ["bench", "engine", "--json", "--keys"])
    assert json.loads(told.stdout)["error"] in told.stderr


def test_what_only_looks_like_an_option_asks_for_nothing() -> None:
    """A file of that name would bring JSON to people."""
    told = CliRunner().invoke(app, ["inspect", "--", "store", "--json"])
    assert told.exit_code == 2
    assert told.stdout == ""


def test_help_is_no_error() -> None:
    """Help for a program would be half of it JSON."""
    for arguments in ([], ["config"], ["inspect", "--json", "--help"], ["--version"]):
        assert '"error"' not in CliRunner().invoke(app, arguments).stdout
