"""`cache.sequence_view` on host memory: what is refused, and what a tier with views takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.engine.managed_cache import open_managed
from kvtier.errors import ConfigError, OutOfMemory, UsageError
from tests.sequence_views import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    DIM,
    HEADS,
    LAYERS,
    MODEL,
    cache,
    config_for,
    keys_of,
    lease_of,
)

__all__ = ["cache"]


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as told:
        config_for(**changes)
    assert told.value.path == "tiers[0].sequence_views"
    return str(told.value)


def test_configurations_that_cannot_have_views_are_refused_with_numbers() -> None:
    """Views show garbage, or the mistake is found far from where it was made."""
    assert "layout layer_token_major" in refusal(model={"layout": "layer_token_major"})
    text = refusal(model={"block_tokens": 12})
    assert "6144 bytes is not whole pages of 4096" in text
    assert "block_tokens: 8 or" in text
    groups = [
        {"kind": "full", "layers": layers, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"} for layers in (2, 4)
    ]
    mixed = {name: MODEL[name] for name in ("name", "weights_epoch", "block_tokens", "layout")} | {"groups": groups}
    with pytest.raises(ConfigError, match="blocks of 4096 and 8192 bytes"):
        kvtier.load_config({"model": mixed, "tiers": [{"type": "gpu", "capacity": "64KiB", "sequence_views": True}]})
    with pytest.raises(ConfigError, match="neither true nor false"):
        config_for(gpu={"sequence_views": "perhaps"})


def test_groups_of_equal_blocks_have_views_each() -> None:
    """The second group's view shows the blocks of the first, or none."""
    groups = [
        {"kind": "full", "layers": [layer], "kv_heads": HEADS, "head_dim": 2 * DIM, "dtype": "float32"}
        for layer in (0, 1)
    ]
    mixed = {name: MODEL[name] for name in ("name", "weights_epoch", "block_tokens", "layout")} | {"groups": groups}
    with kvtier.open_sync(
        {"model": mixed, "tiers": [{"type": "gpu", "capacity": "64KiB", "sequence_views": True}]}
    ) as cache:
        lease = lease_of(cache, keys_of(cache, 1, 3))
        for group in (0, 1):
            for slot in lease.slots(group):
                cache.kv(group, group)["v"][slot] = slot
        for group in (0, 1):
            view = cache.sequence_view(lease, group)
            assert [int(view.kv(group)["v"][i * BLOCK_TOKENS, 0, 0]) for i in range(3)] == [*lease.slots(group)]
            with pytest.raises(UsageError, match="no layer"):
                view.kv(1 - group)


def test_a_configuration_made_by_hand_is_tested_when_it_is_opened() -> None:
    """Who makes a Config in code gets views of other tokens."""
    gpu, host = config_for().tiers
    small = replace(config_for(gpu={"sequence_views": False}, model={"block_tokens": 12}), tiers=(gpu, host))
    with pytest.raises(ConfigError, match=r"tiers\[0\].sequence_views: a block of 6144 bytes .* 2 times"):
        kvtier.open_sync(small)
    layered = config_for(gpu={"sequence_views": False}, model={"layout": "layer_token_major"})
    with kvtier.open_sync(replace(layered, tiers=(gpu, host))) as cache:
        lease = lease_of(cache, keys_of(cache, 1, 2))
        with pytest.raises(UsageError, match="layout token_major"):
            cache.sequence_view(lease)


def test_a_managers_pages_have_none() -> None:
    """The key is accepted where it does nothing."""
    with pytest.raises(ConfigError, match="sequence_views"):
        open_managed(config_for(), tokens_max=64)


def test_what_cannot_be_viewed_is_told(cache: Any) -> None:
    """A mistake looks like a bug, or shows another's memory."""
    lease = lease_of(cache, keys_of(cache, 1, 2))
    view = cache.sequence_view(lease)
    for wrong in (
        lambda: cache.sequence_view(view),
        lambda: cache.sequence_view(lease, 1),
        lambda: cache.sequence_view(lease, "0"),
        lambda: view.kv(LAYERS),
        lambda: view.kv("k"),
    ):
        with pytest.raises(UsageError):
            wrong()
    with kvtier.open_sync(config_for(gpu={"sequence_views": False})) as other:
        with pytest.raises(UsageError, match="another cache"):
            cache.sequence_view(foreign := lease_of(other, keys_of(other, 1, 2)))
        with pytest.raises(UsageError, match="sequence_views: true"):
            other.sequence_view(foreign)


def test_more_blocks_than_the_machine_maps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with too many views fails in its next allocation, whatever that is for."""
    monkeypatch.setattr("kvtier.allocator.host_memory.mappings_max", lambda: 16)
    with kvtier.open_sync(config_for()) as cache:
        lease = lease_of(cache, keys_of(cache, 1, 5))
        view = cache.sequence_view(lease)
        with pytest.raises(OutOfMemory, match="5 blocks more than the 5 shown exceed the 8"):
            cache.sequence_view(lease)
        view.close()
        cache.sequence_view(lease)


def test_mappings_are_joined_where_slots_follow_each_other() -> None:
    """A tier or a view takes a mapping for each slot, and a process has 65530."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:kvtier-gpu")

    before = mappings()
    with kvtier.open_sync(config_for()) as cache:
        assert mappings() == before + 1
        lease = lease_of(cache, keys_of(cache, 1, 5))
        assert lease.slots() == (1, 2, 3, 4, 5)
        cache.sequence_view(lease)
        assert mappings() == before + 2
        cache.top_tier.sequences.show((1, 3, 5, 2))
        assert mappings() == before + 6


def test_the_default_way_is_as_it_was() -> None:
    """A tier without views pays for them with small granules."""
    size = {"capacity": "1MiB", "capacity_max": "1MiB"}
    with kvtier.open_sync(config_for(gpu=size | {"sequence_views": False})) as cache:
        assert cache.top_tier.geometry.granule_bytes == 16 << 10
        assert cache.top_tier.sequences is None


def test_a_granule_is_a_slot_of_any_size() -> None:
    """Slots straddle granules, or a tier has fewer than its memory holds."""
    size = {"capacity": "1MiB", "capacity_max": "1MiB"}
    with kvtier.open_sync(config_for(gpu=size, model={"block_tokens": 24})) as cache:
        assert cache.top_tier.geometry.granule_bytes == 3 * BLOCK_BYTES
        assert cache.stats()["tiers"]["gpu"]["slots_free"] == (1 << 20) // (3 * BLOCK_BYTES) - 1
        keys = kvtier.hash_blocks(range(48), cache.config.model)
        lease = cache.reserve(cache.match(keys, "req"), 2)
        for slot in lease.slots():
            cache.kv(0, 1)["k"][slot] = slot
        assert cache.sequence_view(lease).kv(1)["k"][:, 1, 15].tolist() == [1.0] * 24 + [2.0] * 24
