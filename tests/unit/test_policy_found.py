"""Policies of other packages, by module and class or by entry point."""

import importlib.metadata

import pytest

from kvtier.policies import POLICIES, found
from kvtier.policies.lru import LRU
from kvtier.registry import POLICY_ENTRY_POINTS


def test_a_class_anywhere() -> None:
    """`policy: package.module:Class` in the YAML finds nothing."""
    assert POLICIES.get("kvtier.policies.lru:LRU") is LRU
    assert "kvtier.policies.lru:LRU" not in POLICIES


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.at.all:LRU", "No module named 'nowhere'"),
        ("kvtier.policies.lru:Lru", "Write package.module:Class"),
        ("kvtier.policies.lru:_ORDER", "no class"),
        (":LRU", "Write package.module:Class"),
        ("kvtier.policies.lru:", "Write package.module:Class"),
        ("hit_densty", "Did you mean 'hit_density'"),
    ],
)
def test_what_cannot_be_found_says_why(name: str, says: str) -> None:
    """A traceback of somebody's import instead of what to write."""
    with pytest.raises(KeyError, match=says):
        POLICIES.get(name)


def test_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's policy could not be chosen by its name, or would take the place of a shipped one."""
    points = [
        importlib.metadata.EntryPoint("mine", "kvtier.policies.lru:LRU", POLICY_ENTRY_POINTS),
        importlib.metadata.EntryPoint("arc", "kvtier.policies.lru:LRU", POLICY_ENTRY_POINTS),
    ]
    monkeypatch.setattr(found, "entry_points", lambda group: points)
    assert POLICIES.get("mine") is LRU
    assert POLICIES.get("arc") is not LRU
    with pytest.raises(KeyError, match="Did you mean 'mine'"):
        POLICIES.get("mines")


def test_a_name_that_is_none() -> None:
    """A number in the YAML would end in an error about strings."""
    with pytest.raises(KeyError, match="unknown policy 7"):
        POLICIES.get(7)  # type: ignore[arg-type]
