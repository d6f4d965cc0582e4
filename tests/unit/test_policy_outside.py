"""A policy of another package that fails in a running cache: it is told by its name, in time."""

from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.config import Config
from kvtier.engine.sync import SyncCache
from kvtier.errors import InvariantError, PolicyFault
from kvtier.policies import POLICIES
from kvtier.policies.base import SupportsHints, SupportsSizes
from kvtier.policies.fifo import FIFO
from kvtier.policies.lru import LRU
from tests.cache_bench import config_for, prompt, serve


class TouchRaises(LRU):
    def touch(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("boom")


class HintRaises(LRU):
    def hint(self, *_: Any) -> int:
        raise KeyError("h")


class HintIsNone(LRU):
    def hint(self, *_: Any) -> Any:
        return None


class NamesTwice(LRU):
    def candidates(self, count: int, *arguments: Any, **more: Any) -> list[int]:
        return super().candidates(count, *arguments, **more)[:1] * 2


class NamesTooMany(LRU):
    def candidates(self, count: int, *arguments: Any, **more: Any) -> list[int]:
        return super().candidates(count + 1, *arguments, **more)


class IsNoList(LRU):
    def candidates(self, *arguments: Any, **more: Any) -> Any:
        return iter(super().candidates(*arguments, **more))


class Counts(LRU):
    def __len__(self) -> int:
        raise SystemExit(3)


def named(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def use(cache: SyncCache, config: Config) -> None:
    """Traffic for which blocks must leave, down to the disk and from there, and hints."""
    for number in range(200):
        keys = prompt(config, number, 3)
        lease = cache.reserve(cache.match(keys, "test", session="s"), 3)
        assert isinstance(lease, kvtier.Lease)
        cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True)))
        cache.release(lease)
        if number % 10 == 9:
            cache.flush()
            cache.hint("s", ends=True)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (TouchRaises, "`touch` raised RuntimeError: boom"),
        (HintRaises, "`hint` raised KeyError: 'h'"),
        (HintIsNone, "`hint` answered None"),
        (NamesTwice, "`candidates` answered"),
        (NamesTooMany, "`candidates` answered"),
        (IsNoList, "`candidates` answered"),
    ],
)
def test_who_fails_is_named(
    tmp_path: Path, kind: type, says: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache stops for ever on a bug of somebody else's, and says that it is one of ours."""
    config = config_for(tmp_path / "store", host=None, lmdb="1200KiB")
    tiers = list(config.tiers)
    tiers[place] = tiers[place].model_copy(update={"policy": named(kind)})
    config = Config(config.model, tuple(tiers), config.prefetch, config.limits)
    cache = kvtier.open_sync(config)
    with pytest.raises(InvariantError, match="kvtier stopped, for policy") as caught:
        use(cache, config)
    assert named(kind) in str(caught.value)
    assert says in str(caught.value)
    with pytest.raises(InvariantError, match="for policy"):
        cache.peek(prompt(config, 1, 1))
    assert any(named(kind) in text and "a bug" not in text for text in caplog.messages)
    cache.close()


def test_who_keeps_his_word_is_let_be(tmp_path: Path) -> None:
    """A policy of another package loses its order at a restart, or what it can do besides."""
    config = config_for(tmp_path / "store", host=None, disk={"policy": named(Plain)})
    for start in range(2):
        with kvtier.open_sync(config) as cache:
            for number in range(5):
                assert serve(cache, prompt(config, number, 2)).tokens_ready == 8 * start
            cache.flush()
            assert cache._engine.call(lambda core, now_s: core.check()) == []
    policy: Any = POLICIES.make(named(Plain), 4)
    assert isinstance(policy, SupportsHints)
    assert isinstance(policy, SupportsSizes)
    assert not isinstance(POLICIES.make("kvtier.policies.fifo:FIFO", 4), SupportsHints)
    assert not isinstance(FIFO(4), SupportsHints)
    assert len(policy) == 0


class Plain(LRU):
    """As good as any."""


def test_only_a_snapshot_may_be_refused() -> None:
    """A foreign policy stops the cache for a store whose order is another's."""
    policy = POLICIES.make(named(Plain), 4)
    with pytest.raises(ValueError, match="snapshot"):
        policy.restore(b"?")
    with pytest.raises(PolicyFault, match="`evict` raised"):
        policy.evict([7])
    with pytest.raises(PolicyFault, match="`__len__` raised SystemExit: 3"):
        len(POLICIES.make(named(Counts), 4))
