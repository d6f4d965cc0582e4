"""Loading: what a right configuration becomes, and what a wrong one is told."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import Config, GpuTierConfig, HostTierConfig, LimitsConfig, LmdbTierConfig, load_config
from kvtier.errors import ConfigError, UsageError
from kvtier.policies import POLICIES
from kvtier.types import GroupSpec, ModelSpec

MODEL = {
    "name": "tiny",
    "weights_epoch": "v1",
    "layers": 2,
    "kv_heads": 3,
    "head_dim": 64,
    "dtype": "float32",
    "block_tokens": 16,
}
GROUP = {"kind": "full", "layers": 2, "kv_heads": 3, "head_dim": 64}
STRIDE_BYTES = 2 * 2 * 16 * 3 * 64 * 4
WHOLE: dict[str, Any] = {
    "model": MODEL,
    "tiers": [
        {"type": "gpu", "capacity": "1MiB"},
        {"type": "host", "capacity": "2MiB"},
        {"type": "lmdb", "path": "data", "capacity": "4MiB", "min_free": "1GiB"},
    ],
    "prefetch": {"lookahead_requests": 4, "budget": 0.5},
    "limits": {"load_deadline": "250ms", "queue": "64MiB"},
}


def load(raw: dict[str, Any], **options: Any) -> Config:
    return load_config(raw, **({"environ": {}} | options))


def changed(*changes: tuple[list[Any], Any]) -> dict[str, Any]:
    """WHOLE with values set at places; ... (Ellipsis) takes the key out."""
    raw: Any = copy.deepcopy(WHOLE)
    for where, value in changes:
        node = raw
        for step in where[:-1]:
            node = node[step]
        if value is ...:
            del node[where[-1]]
        else:
            node[where[-1]] = value
    return raw


def refused(raw: dict[str, Any], **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(raw, **options)
    return caught.value


def test_a_whole_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of the YAML would reach the engine changed, or not at all."""
    monkeypatch.chdir(tmp_path)
    config = load(WHOLE)
    group = GroupSpec("full", (0, 1), 3, 64, "float32", 16)
    assert config.model == ModelSpec("tiny", "v1", (group,))
    assert config.tiers == (
        GpuTierConfig(capacity_bytes=1 << 20),
        HostTierConfig(capacity_bytes=2 << 20),
        LmdbTierConfig(path=tmp_path / "data", capacity_bytes=4 << 20, min_free_bytes=1 << 30),
    )
    assert [tier.name for tier in config.tiers] == ["gpu", "host", "lmdb"]
    assert (config.prefetch.lookahead_requests, config.prefetch.budget) == (4, 0.5)
    assert config.limits == LimitsConfig(load_deadline_s=0.25, queue_bytes=64 << 20)


def test_bare_on_and_off() -> None:
    """YAML reads `off` as false: the user's word would be refused, or taken for another."""
    host = load(changed((["tiers", 1, "pin"], True), (["tiers", 1, "hugepages"], False))).tiers[1]
    assert isinstance(host, HostTierConfig)
    assert (host.pin, host.hugepages) == ("on", "off")


def test_defaults() -> None:
    """A short file would not do what the documentation promises."""
    config = load(changed((["prefetch"], ...), (["limits"], ...), (["model", "block_tokens"], ...)))
    assert config.model.block_tokens == 16
    gpu, host, lmdb = config.tiers
    assert isinstance(gpu, GpuTierConfig)
    assert isinstance(host, HostTierConfig)
    assert isinstance(lmdb, LmdbTierConfig)
    assert (gpu.device, gpu.policy, gpu.low_watermark, gpu.high_watermark) == ("auto", "lru", 0.1, 0.2)
    assert (host.pin, host.hugepages) == ("auto", "auto")
    assert (lmdb.durability, lmdb.payload, lmdb.verify) == ("batch", "slab", True)
    assert (config.prefetch.lookahead_requests, config.prefetch.budget) == (8, 0.25)
    assert (config.limits.load_deadline_s, config.limits.queue_bytes) == (0.5, 256 << 20)


WRONG: list[tuple[str, list[Any], Any, str]] = [
    # path told, place changed, value, what is said
    ("tier", ["tier"], [], "Did you mean 'tiers'?"),
    ("model", ["model"], [], "is not a mapping"),
    ("model.name", ["model", "name"], ..., "is missing"),
    ("model.name", ["model", "name"], 1.5, "quotes"),
    ("model.name", ["model", "name"], " ", "not a text"),
    ("model.layer", ["model", "layer"], 2, "Did you mean 'layers'?"),
    ("model.layers", ["model", "layers"], ..., "is missing"),
    ("model.layers", ["model", "layers"], 0, "from 1 to"),
    ("model.layers", ["model", "layers"], 10**9, "from 1 to"),
    ("model.layers", ["model", "layers"], True, "from 1 to"),
    ("model.kv_heads", ["model", "kv_heads"], -3, "from 1 to"),
    ("model.head_dim", ["model", "head_dim"], "wide", "from 1 to"),
    ("model.block_tokens", ["model", "block_tokens"], 0, "from 1 to"),
    ("model.dtype", ["model", "dtype"], "float31", "Did you mean 'float32'?"),
    ("model.dtype", ["model", "dtype"], ..., "is missing"),
    ("model.layout", ["model", "layout"], "token_mayor", "Did you mean 'token_major'?"),
    ("model.hash", ["model", "hash"], "sha256", "pickle differently.*Use sha256_cbor"),
    ("model.hash", ["model", "hash"], "xxhash", "pickle differently.*Use xxhash_cbor"),
    ("model.hash", ["model", "hash"], "md5", "unknown hash 'md5'"),
    ("model.hash_seed", ["model", "hash_seed"], 0, "quotes: '0'"),
    ("model.weights_epoch", ["model", "weights_epoch"], 2, "quotes: '2'"),
    ("model.weights_epoch", ["model", "weights_epoch"], ..., "model.weights is not given"),
    ("model.weights", ["model", "weights"], "a\0b", "NUL"),
    ("model.codec", ["model", "codec"], "int9", "unknown codec"),
    ("model.tensor_parallel", ["model", "tensor_parallel"], 0, "from 1 to"),
    ("model.groups", ["model", "groups"], [], "not a list of groups"),
    ("model.layers", ["model", "groups"], [GROUP], "in each of model.groups"),
    ("tiers", ["tiers"], ..., "is missing"),
    ("tiers", ["tiers"], [], "not a list of tiers"),
    ("tiers", ["tiers"], {"gpu": 1}, "not a list of tiers"),
    ("tiers[1]", ["tiers", 1], "host", "not a mapping"),
    ("tiers[1].type", ["tiers", 1, "type"], ..., "Known: gpu, host, lmdb"),
    ("tiers[1].type", ["tiers", 1, "type"], "hots", "Did you mean 'host'?"),
    ("tiers[1].type", ["tiers", 1, "type"], [], "not a type"),
    ("tiers[1].capacity", ["tiers", 1, "capacity"], ..., "is missing"),
    ("tiers[1].capacity", ["tiers", 1, "capacity"], "4G", "GiB"),
    ("tiers[1].capacity", ["tiers", 1, "capacity"], 0, "is nothing"),
    ("tiers[1].capcity", ["tiers", 1, "capcity"], "1GiB", "Did you mean 'capacity'?"),
    ("tiers[1].capacity_bytes", ["tiers", 1, "capacity_bytes"], 1 << 30, "Did you mean 'capacity'?"),
    ("tiers[1].policy", ["tiers", 1, "policy"], "lur", "Did you mean 'lru'?"),
    ("tiers[1].pin", ["tiers", 1, "pin"], "onn", "Did you mean 'on'?"),
    ("tiers[1].name", ["tiers", 1, "name"], "gpu", "also the name of tiers\\[0\\]"),
    ("tiers[1].name", ["tiers", 1, "name"], "a b", "label a metric"),
    ("tiers[0].device", ["tiers", 0, "device"], "cuad", "Did you mean 'cuda'?"),
    ("tiers[0].device", ["tiers", 0, "device"], "cuda:x", "Write cuda:0"),
    ("tiers[0].device", ["tiers", 0, "device"], "cuda:", "Write cuda:0"),
    ("tiers[0].device", ["tiers", 0, "device"], "host:1", "unknown device"),
    ("tiers[0].device", ["tiers", 0, "device"], 1, "unknown device"),
    (
        "tiers[0].capacity_max",
        ["tiers", 0, "capacity_max"],
        "512KiB",
        "512KiB of addresses.*capacity of 1MiB.*at least",
    ),
    ("tiers[1].capacity_max", ["tiers", 1, "capacity_max"], "4MiB", "unknown key"),
    ("tiers[0].low_watermark", ["tiers", 0, "low_watermark"], 0.2, "0 <= low < high < 1"),
    ("tiers[0].low_watermark", ["tiers", 0, "high_watermark"], 1.0, "0 <= low < high < 1"),
    ("tiers[0].high_watermark", ["tiers", 0, "high_watermark"], 2, "more than the whole"),
    ("tiers[0].low_watermark", ["tiers", 0, "low_watermark"], float("nan"), "not a fraction"),
    ("tiers[2].path", ["tiers", 2, "path"], ..., "is missing"),
    ("tiers[2].capacity", ["tiers", 2, "capacity"], ..., "until the disk is full"),
    ("tiers[2].payload", ["tiers", 2, "payload"], "inlin", "Did you mean 'inline'?"),
    ("tiers[2].durability", ["tiers", 2, "durability"], "bach", "Did you mean 'batch'?"),
    ("tiers[2].verify", ["tiers", 2, "verify"], "maybe", "true or false"),
    ("prefetch.budget", ["prefetch", "budget"], "150%", "more than the whole"),
    ("prefetch.budget", ["prefetch", "budget"], "2%", "0.02 of the 42 slots of host.*at least 3%, 0 to do without"),
    ("prefetch.lookahead_requests", ["prefetch", "lookahead_requests"], -1, "from 0 to"),
    ("prefetch", ["prefetch"], 8, "not a mapping"),
    ("limits.load_deadline", ["limits", "load_deadline"], 500, "which unit of time"),
    ("limits.load_deadline", ["limits", "load_deadline"], "0s", "no time at all"),
    ("limits.load_deadline", ["limits", "load_deadline"], "99999999h", "at most 277777h"),
    (
        "limits.prefill_tokens_per_s",
        ["limits", "prefill_tokens_per_s"],
        0,
        "from 0.001 to 1e.09. Write one such as 2500",
    ),
    ("limits.prefill_tokens_per_s", ["limits", "prefill_tokens_per_s"], "fast", "not a number"),
    ("limits.prefill_tokens_per_s", ["limits", "prefill_tokens_per_s"], True, "not a number"),
    ("limits.pin_quota", ["limits", "pin_quota"], "150%", "more than the whole"),
    ("trace.recrod", ["trace"], {"recrod": "x"}, "Did you mean 'record'"),
    ("trace.record", ["trace"], {"record": 7}, "in quotes"),
    ("trace.record", ["trace"], {"record": "a/b.jsonl.XZ"}, "Name it a/b.jsonl;"),
    ("trace.record", ["trace"], {"record": "b.zst"}, "says that it is packed"),
    ("trace.salt", ["trace"], {"salt": "x" * 65}, "65 bytes, and its hash takes 64"),
    ("trace.max", ["trace"], {"max": "4KiB"}, "less than 1MiB"),
    ("limits.queue", ["limits", "queue"], "4KiB", "less than 1 block of 48KiB.*at least 48KiB"),
    (
        "limits.queue",
        ["limits", "queue"],
        "4KiB",
        "2 layers x k and v x 16 tokens x 3 heads x dim 64 x 4 bytes of float32",
    ),
]


@pytest.mark.parametrize(("path", "where", "value", "says"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_what_is_wrong_is_told(path: str, where: list[Any], value: Any, says: str) -> None:
    """A mistake would pass, or be told without its place, its value or its remedy."""
    error = refused(changed((where, value)))
    assert error.path == path
    assert error.problem
    assert error.remedy
    assert re.search(says, str(error))
    assert "pydantic" not in str(error)


def test_field_names_are_no_keys() -> None:
    """A file could use names that are not documented, and that may change."""
    error = refused(changed((["tiers", 0], {"type": "gpu", "capacity_bytes": 1 << 20})))
    assert [line.split(":")[0] for line in str(error).splitlines()] == ["tiers[0].capacity", "tiers[0].capacity_bytes"]


def test_all_problems_are_told_at_once() -> None:
    """Mending a file would take one start per mistake."""
    error = refused(
        changed((["model", "dtype"], "f"), (["tiers", 1, "capacity"], "x"), (["limits", "queue"], -1), (["more"], 1))
    )
    lines = str(error).splitlines()
    assert [line.split(":")[0] for line in lines] == ["more", "model.dtype", "tiers[1].capacity", "limits.queue"]
    assert error.path == "more"


@pytest.mark.parametrize(
    ("types", "path"),
    [
        (["host", "gpu"], "tiers[1].type"),
        (["gpu", "lmdb", "host"], "tiers[2].type"),
        (["gpu", "gpu"], "tiers[1].type"),
        (["host", "lmdb"], "tiers[0].type"),
    ],
)
def test_the_fastest_tier_comes_first(types: list[str], path: str) -> None:
    """Blocks would be demoted to a faster tier, or there would be none for attention to read."""
    entry: dict[str, Callable[[], dict[str, Any]]] = {
        "gpu": lambda: {"type": "gpu", "capacity": "1MiB"},
        "host": lambda: {"type": "host", "capacity": "1MiB"},
        "lmdb": lambda: {"type": "lmdb", "capacity": "1MiB", "path": "d"},
    }
    assert refused(changed((["tiers"], [entry[kind]() for kind in types]))).path == path


@pytest.mark.parametrize("types", [["gpu"], ["gpu", "host"], ["gpu", "lmdb"]])
def test_lower_tiers_are_optional(types: list[str]) -> None:
    """A smaller set-up than the full one would not start."""
    tiers = [tier for tier in WHOLE["tiers"] if tier["type"] in types]
    assert [tier.type for tier in load(changed((["tiers"], tiers))).tiers] == types


def test_sizes_that_cannot_help_are_refused_with_numbers() -> None:
    """A tier would hold nothing, or only churn (dynamo PR#6506, sglang PR#26449)."""
    least = 2 * STRIDE_BYTES
    small = refused(changed((["tiers", 0, "capacity"], least - 1)))
    assert small.path == "tiers[0].capacity"
    assert "95.99KiB is less than 2 blocks of 48KiB" in small.problem
    assert "96KiB" in small.remedy
    load(changed((["tiers", 0, "capacity"], least)))

    fifth = -(-(1 << 20) // 5)
    churn = refused(changed((["tiers", 1, "capacity"], fifth - 1)))
    assert churn.path == "tiers[1].capacity"
    assert "holds 204.79KiB, less than the 204.81KiB that demotion keeps copied below gpu" in churn.problem
    assert "(high_watermark 0.2 of 1MiB)" in churn.problem
    assert "at least 204.81KiB" in churn.remedy
    load(changed((["tiers", 1, "capacity"], fifth), (["prefetch"], ...)))


def test_what_works_less_well_than_it_reads_is_noted() -> None:
    """A tier that holds little of its own, or watermarks without effect, would be found out by measuring."""
    assert load(WHOLE).notes == ()
    [smaller] = load(changed((["tiers", 1, "capacity"], "512KiB"))).notes
    assert smaller.startswith("tiers[1].capacity: host holds 512KiB, less than the 1MiB of gpu above it")
    [coarse] = load(changed((["tiers", 0, "capacity"], "288KiB"))).notes
    assert coarse.startswith(
        "tiers[0].high_watermark: of 5 slots of gpu, low_watermark 0.1 and high_watermark 0.2 both"
    )


def test_a_whole_pages_stride_is_explained() -> None:
    """The user could not see why a block takes more than its segments."""
    odd = refused(changed((["model", "head_dim"], 63), (["limits", "queue"], "4KiB")))
    assert "x 4 bytes of float32 = 48384 bytes, in whole pages)" in odd.problem
    assert "1 block of 48KiB" in odd.problem


def test_the_gpu_range_defaults_to_its_capacity() -> None:
    """`resize` would have no room to grow, or a tier reserve addresses that nobody asked for."""
    (gpu, *_), (grown, *_) = load(WHOLE).tiers, load(changed((["tiers", 0, "capacity_max"], "8MiB"))).tiers
    assert isinstance(gpu, GpuTierConfig)
    assert isinstance(grown, GpuTierConfig)
    assert (gpu.capacity_max_bytes, grown.capacity_max_bytes) == (1 << 20, 8 << 20)
    assert load(WHOLE).settings["tiers[0].capacity_max"].value == "1MiB"
    wrong = refused(changed((["tiers", 0, "capacity"], "x")))
    assert "capacity_max" not in str(wrong)


def test_every_policy_can_be_configured() -> None:
    """A policy that exists could not be chosen, or one that is chosen would not exist."""
    for tier in range(3):
        for policy in POLICIES:
            assert load(changed((["tiers", tier, "policy"], policy))).tiers[tier].policy == policy
    refusal = refused(changed((["tiers", 0, "policy"], "none of them")))
    assert refusal.remedy == f"Known: {', '.join(sorted(POLICIES))}."


def test_hybrid_groups() -> None:
    """A hybrid model's layers would be lost, doubled, or take another group's shape."""
    shape = {key: value for key, value in MODEL.items() if key not in ("layers", "kv_heads", "head_dim")}
    groups = [GROUP, {"kind": "mla", "layers": 1, "head_dim": 576, "dtype": "bfloat16", "block_tokens": 64}]
    config = load(changed((["model"], shape | {"groups": groups})))
    assert config.model.groups == (
        GroupSpec("full", (0, 1), 3, 64, "float32", 16),
        GroupSpec("mla", (2,), 1, 576, "bfloat16", 64),
    )
    listed = [GROUP | {"layers": [0, 2]}, GROUP | {"layers": [1, 3]}]
    assert [g.layers for g in load(changed((["model"], shape | {"groups": listed}))).model.groups] == [
        (0, 2),
        (1, 3),
    ]


@pytest.mark.parametrize(
    ("group", "path", "says"),
    [
        ({"kind": "mamba"}, "model.groups[1].kind", "not in this version"),
        ({"kind": "ful"}, "model.groups[1].kind", "Did you mean 'full'?"),
        ({"layers": [0]}, "model.groups[1].layers", "layer 0 is listed twice"),
        ({"layers": [5, 5]}, "model.groups[1].layers", "layer 5 is listed twice"),
        ({"layers": [-1]}, "model.groups[1].layers", "not the index"),
        ({"layers": []}, "model.groups[1].layers", "neither"),
        ({"layers": 0}, "model.groups[1].layers", "neither"),
        ({"kind": "mla"}, "model.groups[1].kv_heads", "one latent"),
        ({"head": 1}, "model.groups[1].head", "unknown key"),
        ({"kv_heads": None}, "model.groups[1].kv_heads", "is missing"),
    ],
)
def test_wrong_groups(group: dict[str, Any], path: str, says: str) -> None:
    """A hybrid model's shape would be guessed."""
    shape = {key: value for key, value in MODEL.items() if key not in ("layers", "kv_heads", "head_dim")}
    error = refused(changed((["model"], shape | {"groups": [GROUP, GROUP | group]})))
    assert error.path == path
    assert says in str(error)


def test_a_group_needs_a_dtype() -> None:
    """The bytes per element would be guessed."""
    shape = {"name": "m", "weights_epoch": "v1", "groups": [GROUP]}
    assert refused(changed((["model"], shape))).path == "model.groups[0].dtype"


def test_auto_epoch_reads_the_weights(tmp_path: Path) -> None:
    """Other weights would find the old weights' blocks."""
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "a.bin").write_bytes(b"a")
    raw = changed((["model", "weights_epoch"], "auto"), (["model", "weights"], str(tmp_path / "w")))
    first = load(raw).model.weights_epoch
    assert first.startswith("auto-")
    (tmp_path / "w" / "a.bin").write_bytes(b"b")
    assert load(raw).model.weights_epoch != first


def test_a_store_among_the_weights_is_refused(tmp_path: Path) -> None:
    """The store's own writes would change the epoch, and every start would forget what it holds."""
    (tmp_path / "a.bin").write_bytes(b"a")
    raw = changed(
        (["model", "weights_epoch"], "auto"),
        (["model", "weights"], str(tmp_path)),
        (["tiers", 2, "path"], str(tmp_path / "data")),
    )
    assert refused(raw).path == "tiers[2].path"


def test_the_callers_mapping_is_left_alone() -> None:
    """Loading twice from one mapping would give two configurations."""
    raw = copy.deepcopy(WHOLE)
    load(raw, overrides={"tiers[1].capacity": "3MiB", "limits.queue": "1GiB"})
    assert raw == WHOLE


def test_hand_made_configurations() -> None:
    """Engine builders and tests could not make a configuration without YAML."""
    config = Config(model=load(WHOLE).model, tiers=(GpuTierConfig(capacity_bytes=1 << 20),))
    assert config.limits.load_deadline_s == 0.5
    with pytest.raises(UsageError, match="no setting"):
        config.origin("limits.queue")


@pytest.mark.parametrize("source", [None, 5, [], b"kvtier.yaml"])
def test_what_is_no_configuration_is_refused(source: object) -> None:
    """A slip of the pen would end in a traceback of pathlib."""
    with pytest.raises(ConfigError, match="no configuration"):
        load_config(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("speed", [70000, "70000", 2500.5, 0.25, 1e9])
def test_any_speed_of_prefill_is_taken_and_shown_as_it_is(speed: Any) -> None:
    """Only whole numbers up to 65536 count, and a fast engine's governor declines what would pay."""
    config = load(changed((["limits", "prefill_tokens_per_s"], speed)))
    assert config.limits.prefill_tokens_per_s == float(speed)
    shown = config.settings["limits.prefill_tokens_per_s"].value
    assert load(changed((["limits", "prefill_tokens_per_s"], shown))).limits == config.limits


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e10, True])
def test_a_deadline_made_in_code_is_checked_too(seconds: float) -> None:
    """A configuration made by hand stops the engine at its first wait."""
    with pytest.raises(ValueError, match="load_deadline"):
        LimitsConfig(load_deadline_s=seconds)
    assert LimitsConfig(load_deadline_s=2).load_deadline_s == 2.0


def test_a_policy_of_another_package_is_named_by_its_place(tmp_path: Path) -> None:
    """A user's own policy cannot be chosen, or a wrong name of one is a traceback."""
    import kvtier

    for name in (
        "tests.unit.test_lru:LRU",
        "kvtier.policies.lru:LRU",
        "no.such.module:Policy",
        "kvtier.policies.lru:No",
    ):
        assert load(changed((["tiers", 0, "policy"], name))).tiers[0].policy == name
    for name in ("lru:", ":LRU", "a b:C", "1.x:y"):
        assert "unknown policy" in str(refused(changed((["tiers", 0, "policy"], name))))
    config = {"model": MODEL, "tiers": [{"type": "gpu", "capacity": "8MiB", "policy": "kvtier.policies.lru:LRU"}]}
    with kvtier.open_sync(config) as cache:
        assert cache.check() == []
    for name, told in (("no.such.module:Policy", "No module named"), ("kvtier.policies.lru:No", "cannot be imported")):
        config["tiers"][0]["policy"] = name  # type: ignore[index]
        with pytest.raises(ConfigError, match=told) as caught:
            kvtier.open_sync(config)
        assert caught.value.path == "tiers[0].policy"
