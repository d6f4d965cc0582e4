"""The shipped policies keep the contract of `kvtier.testing.policies`."""

import pytest

from kvtier.policies import POLICIES
from kvtier.policies.base import PolicyMaker
from kvtier.testing.policies import PolicyContract


class TestLRU(PolicyContract):
    @pytest.fixture
    def make(self) -> PolicyMaker:
        return POLICIES.get("lru")


class TestARC(PolicyContract):
    @pytest.fixture
    def make(self) -> PolicyMaker:
        return POLICIES.get("arc")


def test_every_policy_is_enrolled() -> None:
    """A policy is offered to users that was never held to the contract."""
    assert {f"Test{name.upper()}" for name in POLICIES} <= set(globals())
