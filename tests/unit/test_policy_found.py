"""Policies of other packages, by module and class or by entry point."""

import importlib.metadata
from pathlib import Path

import pytest

import kvtier
from kvtier.cli.simulate import asked
from kvtier.errors import ConfigError, UsageError
from kvtier.policies import POLICIES, found
from kvtier.policies.lru import LRU
from kvtier.registry import POLICY_ENTRY_POINTS
from tests.cache_bench import config_for


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
    assert POLICIES.known() == {*POLICIES, "mine"}
    with pytest.raises(UsageError, match="Did you mean 'mine'"):
        asked.policies_of(asked.Options(policies=["mins"]))
    with pytest.raises(UsageError, match="belady, fifo, hit_density, lfu, lru, mine"):
        asked.policies_of(asked.Options(policies=["quite another"]))
    assert asked.policies_of(asked.Options(policies=["mine,belady"])) == ["mine", "belady"]


@pytest.mark.parametrize("policy", ["builtins:list", "json:loads", "kvtier.policies.found:WRITE.upper"])
def test_what_is_no_policy(tmp_path: Path, policy: str) -> None:
    """A cache that is opened with one ends in a traceback of somebody else's code, or fails at its first eviction."""
    with pytest.raises(KeyError, match="Write package"):
        POLICIES.make(policy, 4)
    with pytest.raises(ConfigError, match="Install it, or use lru") as error:
        kvtier.open_sync(config_for(tmp_path / "store", host=None, disk={"policy": policy}))
    assert error.value.path == "tiers[1].policy"
    assert isinstance(POLICIES.make("lru", 4), LRU)


def test_a_name_that_is_none() -> None:
    """A number in the YAML would end in an error about strings."""
    with pytest.raises(KeyError, match="unknown policy 7"):
        POLICIES.get(7)  # type: ignore[arg-type]
