"""Precedence: command line over environment over file over default, each with its origin."""

from pathlib import Path

import pytest

from kvtier.config import Config, LmdbTierConfig, load_config
from kvtier.errors import ConfigError, UsageError

TEXT = """\
model: {name: m, weights_epoch: v1, layers: 2, kv_heads: 1, head_dim: 64, dtype: float32}
tiers:
  - {type: gpu, capacity: 1MiB}
  - type: host
    capacity: 2MiB
  - {type: lmdb, path: ./data, capacity: 4MiB}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "kvtier.yaml"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


def lmdb_of(config: Config) -> LmdbTierConfig:
    tier = config.tiers[-1]
    assert isinstance(tier, LmdbTierConfig)
    return tier


def test_precedence_and_origin(file: Path) -> None:
    """A value from the wrong source would win, or `--origin` would blame the wrong one."""
    path = "tiers[1].capacity"
    environ = {"KVTIER_TIERS__1__CAPACITY": "3MiB"}
    overrides = {path: "4MiB"}

    from_file = load_config(file, environ={})
    assert (from_file.tiers[1].capacity_bytes, from_file.origin(path)) == (2 << 20, f"{file}:5")
    from_environment = load_config(file, environ=environ)
    assert from_environment.tiers[1].capacity_bytes == 3 << 20
    assert from_environment.origin(path) == "environment KVTIER_TIERS__1__CAPACITY"
    from_caller = load_config(file, environ=environ, overrides=overrides)
    assert (from_caller.tiers[1].capacity_bytes, from_caller.origin(path)) == (
        4 << 20,
        "command line tiers[1].capacity",
    )
    assert from_caller.origin("limits.queue") == "default"


def test_overrides_reach_every_kind_of_value(file: Path) -> None:
    """Texts from the environment would be refused where the file may write numbers and flags."""
    config = load_config(
        file,
        environ={
            "KVTIER_MODEL__BLOCK_TOKENS": "32",
            "KVTIER_MODEL__HASH_SEED": "0",
            "KVTIER_TIERS__0__LOW_WATERMARK": "5%",
            "KVTIER_TIERS__2__VERIFY": "false",
            "KVTIER_PREFETCH__LOOKAHEAD_REQUESTS": "0",
            "KVTIER_LIMITS__LOAD_DEADLINE": "1m",
            "KVTIER_REQUIRE_ALL": "1",
            "PATH": "/bin",
        },
    )
    assert (config.model.block_tokens, config.model.hash_seed) == (32, "0")
    assert (config.tiers[0].low_watermark, lmdb_of(config).verify) == (0.05, False)
    assert (config.prefetch.lookahead_requests, config.limits.load_deadline_s) == (0, 60.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("KVTIER_TIERS_1_CAPACITY", "two underscores"),
        ("KVTIER_MODEL_NAME", "two underscores"),
        ("KVTIER_TIERS", "two underscores"),
        ("KVTIER_TEIRS__1__CAPACITY", "Did you mean 'tiers'?"),
        ("KVTIER_TIERS__7__CAPACITY", "has 3 entries"),
        ("KVTIER_TIERS__HOST__CAPACITY", "has 3 entries"),
        ("KVTIER_TIERS__1__CAPCITY", "Did you mean 'capacity'?"),
        ("KVTIER_TIERS__1__CAPACITY__X", "tiers\\[1\\].capacity is '2MiB'"),
        ("KVTIER_MODEL__", "no single value"),
    ],
)
def test_variables_that_would_be_ignored_are_refused(file: Path, name: str, says: str) -> None:
    """A mistyped variable would silently do nothing (Mooncake#1948's kind)."""
    with pytest.raises(ConfigError, match=says):
        load_config(file, environ={name: "1GiB"})


@pytest.mark.parametrize("path", ["", "tiers[1]capacity", "tiers[x].capacity", "tier[1].capacity", "limits", "a..b"])
def test_override_paths_are_checked(file: Path, path: str) -> None:
    """A mistyped --set would silently do nothing."""
    with pytest.raises(ConfigError):
        load_config(file, environ={}, overrides={path: "1GiB"})


def test_relative_paths(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store would move with the folder that the process happens to start in."""
    monkeypatch.chdir(tmp_path)
    assert lmdb_of(load_config("etc/kvtier.yaml", environ={})).path == tmp_path / "etc" / "data"
    override = {"tiers[2].path": "data"}
    assert lmdb_of(load_config(file, environ={}, overrides=override)).path == tmp_path / "data"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    override = {"tiers[2].path": "~/kv"}
    assert lmdb_of(load_config(file, environ={}, overrides=override)).path == tmp_path / "home" / "kv"


def test_origin_of_nothing(file: Path) -> None:
    """A mistyped path would get the answer `default`."""
    with pytest.raises(UsageError, match=r"Did you mean 'limits\.queue'"):
        load_config(file, environ={}).origin("limits.queu")
