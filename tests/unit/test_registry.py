"""A set of choices that explains itself."""

import pytest

from kvtier.errors import UsageError
from kvtier.registry import Registry, suggestion


def test_a_suggestion_is_a_sentence_for_any_word():
    """A slip is answered with an empty list, or with a traceback of the comparison."""
    assert suggestion("lrv", ["lru", "arc"]) == "Did you mean 'lru'?"
    assert suggestion("?", ["lru", "arc"]) == "Known: arc, lru."
    assert suggestion("lru", []) == "There is none to choose."


@pytest.mark.parametrize("wrong", ["lrv", "", 5, None, ["lru"]])
def test_what_is_not_there_is_refused(wrong):
    """Asking for what is no name gives a traceback of the dictionary."""
    registry = Registry("policy", {"lru": 1})
    with pytest.raises(KeyError, match="unknown policy"):
        registry.get(wrong)
    assert registry.get("lru") == 1
    with pytest.raises(KeyError, match="There is none to choose"):
        Registry("policy", {}).get("lru")


def test_a_name_is_taken_once():
    """A second registration replaces the first for everybody."""
    registry = Registry("policy", {"lru": 1})
    for wrong in ("lru", "two words", 5):
        with pytest.raises(UsageError):
            registry.add(wrong, 2)
    assert list(registry) == ["lru"]
