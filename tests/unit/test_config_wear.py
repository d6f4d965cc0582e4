"""`wear` and `admission` in the YAML: what they become, and what is told of those that say nothing."""

from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.cmd_config import as_yaml
from kvtier.config import Config, HostTierConfig, LmdbTierConfig, load_config
from kvtier.config.wear import DAY_S, WearConfig
from kvtier.engine.gates import gate_of
from kvtier.errors import ConfigError
from kvtier.policies.admission import ADMISSIONS
from tests.unit.test_config_load import changed, load, refused

WEAR = ["tiers", 2, "wear"]


def wear_of(value: Any, **options: Any) -> WearConfig | None:
    disk = load(changed((WEAR, value)), **options).tiers[2]
    assert isinstance(disk, LmdbTierConfig)
    return disk.wear


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, None),
        ("500GiB/day", WearConfig(500 << 30)),
        (" 1.5 TB / day ", WearConfig(1_500_000_000_000)),
        ({"per_day": "5GB", "burst": "1h"}, WearConfig(5 * 10**9, burst_s=3600.0)),
        ({"dwpd": 1}, WearConfig(dwpd=1.0)),
        ({"dwpd": "0.3", "drive": "2TB", "burst": "30m"}, WearConfig(None, 0.3, 2 * 10**12, 1800.0)),
    ],
)
def test_a_budget_can_be_said_in_three_ways(value: Any, found: WearConfig | None) -> None:
    """A budget is read as another one than was meant."""
    assert wear_of(value) == found


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("500GiB", "per which time"),
        ("500GiB/week", "per which time"),
        ("much/day", "size"),
        ("0/day", "lets nothing be written"),
        (500, "no budget of writes"),
        ([], "no budget of writes"),
        ({}, "either dwpd or per_day"),
        ({"dwpd": 1, "per_day": "1TB"}, "either dwpd or per_day"),
        ({"dwdp": 1}, "Did you mean 'dwpd'?"),
        ({"per_day": "1TB", "drive": "2TB"}, "there is no dwpd"),
        ({"dwpd": 0}, "from 0.001"),
        ({"dwpd": -1}, "from 0.001"),
        ({"dwpd": 1, "drive": "0"}, "lets nothing be written"),
        ({"dwpd": 1, "burst": "0s"}, "saves nothing up"),
        ({"dwpd": 1, "burst": 60}, "which unit of time"),
    ],
)
def test_what_says_no_budget_is_told_with_a_remedy(value: Any, told: str) -> None:
    """A slip of the pen wears a disk out, or keeps it from being written; or is a traceback."""
    error = refused(changed((WEAR, value)))
    assert error.path == "tiers[2].wear"
    assert told in str(error)
    assert error.remedy


@pytest.mark.parametrize("value", ["500GiB/day", {"per_day": "5GB", "burst": "1h"}, {"dwpd": 1, "drive": "2TB"}])
def test_what_config_show_prints_loads_to_the_same(value: Any, tmp_path: Path) -> None:
    """`kvtier config show > kvtier.yaml` makes another configuration."""
    config = load(changed((WEAR, value)))
    file = tmp_path / "again.yaml"
    file.write_text(as_yaml(config))
    assert load_config(file, environ={}).tiers[2] == config.tiers[2]
    assert all(config.origin(path) for path in config.settings if ".wear" in path)


def test_one_value_of_a_budget_can_be_overridden() -> None:
    """A budget is one of the values that are tried out, and none of the ways in reaches it."""
    overrides = {"tiers[2].wear.dwpd": "0.5"}
    assert wear_of({"dwpd": 1, "drive": "2TB"}, overrides=overrides) == WearConfig(None, 0.5, 2 * 10**12)
    assert wear_of(None, overrides={"tiers[2].wear": "1TB/day"}) == WearConfig(10**12)


def test_the_rules_are_those_that_there_are() -> None:
    """A rule that the YAML takes is not there, or one that is there cannot be chosen."""
    for name in ADMISSIONS:
        config = load(changed((["tiers", 1, "admission"], name), (["tiers", 2, "admission"], name)))
        assert all(isinstance(t, HostTierConfig | LmdbTierConfig) and t.admission == name for t in config.tiers[1:])
    assert "Did you mean 'tinylfu'?" in str(refused(changed((["tiers", 2, "admission"], "tinyflu"))))
    assert refused(changed((["tiers", 0, "admission"], "always"))).path == "tiers[0].admission"
    assert refused(changed((["tiers", 1, "wear"], "1TB/day"))).path == "tiers[1].wear"


def config_with(**disk: Any) -> Config:
    return load(changed(*[(["tiers", 2, key], value) for key, value in disk.items()]))


def test_a_budget_becomes_a_gate() -> None:
    """A budget of one drive write a day is one of another drive, or is saved up for another time."""
    assert [gate_of(tier, 10) for tier in config_with().tiers] == [None, None, None]
    for wear, per_day in [({"dwpd": 2, "drive": "1TB"}, 2e12), ({"dwpd": 2}, 6e9), ("5GB/day", 5e9)]:
        gate = gate_of(config_with(wear=wear).tiers[2], 10, file_system_bytes=3 * 10**9)
        assert gate is not None
        assert gate.budget is not None
        assert gate.budget.bytes_per_day == gate.budget.burst_bytes == per_day
    hourly = gate_of(config_with(wear={"per_day": "24GB", "burst": "1h"}).tiers[2], 10)
    assert hourly is not None
    assert hourly.budget is not None
    assert hourly.budget.burst_bytes == pytest.approx(24e9 * 3600 / DAY_S)


def test_a_rule_alone_becomes_a_gate_without_a_budget() -> None:
    """A tier that only wants a rule is kept within a budget that nobody gave."""
    gate = gate_of(config_with(admission="second_access").tiers[2], 10)
    assert gate is not None
    assert gate.budget is None
    assert isinstance(gate.rule, ADMISSIONS.get("second_access"))  # type: ignore[arg-type]


def test_a_drive_that_is_not_here_cannot_be_simulated() -> None:
    """A simulation of another machine depends on the disk of this one, in silence."""
    from kvtier.sim.setup import Setup

    Setup(config_with(wear={"dwpd": 1, "drive": "2TB"}), 16).tiers()
    with pytest.raises(ConfigError, match="Add `drive: 2TB`"):
        Setup(config_with(wear={"dwpd": 1}), 16).tiers()
