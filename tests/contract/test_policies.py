"""The shipped policies keep the contract of `kvtier.testing.policies`."""

import pytest

from kvtier.policies import POLICIES, hit_density
from kvtier.policies.base import PolicyMaker, SupportsHints
from kvtier.testing.policies import HintContract, PolicyContract

HINTED = {name for name in POLICIES if isinstance(POLICIES.get(name)(1), SupportsHints)}


class TestShipped(PolicyContract):
    @pytest.fixture(params=sorted({*POLICIES} - HINTED))
    def make(self, request: pytest.FixtureRequest) -> PolicyMaker:
        return POLICIES.get(request.param)


class TestHinted(HintContract):
    @pytest.fixture(params=sorted(HINTED))
    def make(self, request: pytest.FixtureRequest) -> PolicyMaker:
        return POLICIES.get(request.param)


class TestHitDensityThatLearns(HintContract):
    """The contract's few accesses would end before anything was learned."""

    @pytest.fixture
    def make(self, monkeypatch: pytest.MonkeyPatch) -> PolicyMaker:
        monkeypatch.setattr(hit_density, "_LEARN_EVERY_MIN", 20)
        return hit_density.HitDensity
