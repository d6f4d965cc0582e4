"""Codecs in the configuration: which tiers may have which, what follows from them, and who said so."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import kvtier
from kvtier.blocks.coding import CODECS, Coding, Codings
from kvtier.cli.cmd_config import as_yaml, capacity_facts
from kvtier.config import Config
from kvtier.config.codecs import codecs_of, identity_of
from kvtier.config.schema import HostTierConfig, LmdbTierConfig
from kvtier.errors import ConfigError
from kvtier.types import GroupSpec, StoreKey, block_key, store_key

MODEL = {"name": "m", "weights_epoch": "v1", "layers": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}


def load(host: str | None = None, lmdb: str | None = None, gpu: str | None = None, **model: Any) -> Config:
    """None: the tier says nothing. Blocks of 64 KiB."""
    tiers: list[dict[str, Any]] = [
        {"type": "gpu", "capacity": "1MiB"},
        {"type": "host", "capacity": "4MiB"},
        {"type": "lmdb", "capacity": "32MiB", "path": "/nowhere/store"},
    ]
    for tier, codec in zip(tiers, (gpu, host, lmdb), strict=True):
        tier |= {} if codec is None else {"codec": codec}
    return kvtier.load_config({"model": MODEL | model, "tiers": tiers})


@pytest.mark.parametrize(
    ("host", "lmdb", "codecs", "identity"),
    [
        (None, None, ["none", "none", "none"], "none"),
        ("int8", None, ["none", "int8", "int8"], "int8"),
        ("fp8", "fp8", ["none", "fp8", "fp8"], "fp8"),
        (None, "int8", ["none", "none", "int8"], "int8"),
        ("none", "exp4", ["none", "none", "exp4"], "none"),
    ],
)
def test_what_follows_from_the_tiers(host: str | None, lmdb: str | None, codecs: list[str], identity: str) -> None:
    """Coded blocks are coded again below, or lossy ones carry the name of exact ones."""
    config = load(host, lmdb)
    assert [tier.codec for tier in config.tiers] == codecs
    assert config.model.codec == identity
    assert load(host, lmdb, codec=identity).model == config.model, "to say what follows is allowed"
    assert kvtier.load_config(yaml.safe_load(as_yaml(config))) == config, "what is shown loads to the same"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gpu": "int8"}, r"tiers\[0\].codec: codec 'int8' is not for the tier that attention reads.*Put it on a host"),
    ({"host": "exp4"}, r"tiers\[1\].codec: codec 'exp4' makes blocks of no fixed size.*Use it on the lmdb tier"),
    ({"host": "int4"}, r"tiers\[1\].codec: unknown codec 'int4'. Did you mean 'int8'"),
    ({"host": "int8", "lmdb": "fp8"}, r"tiers\[2\].codec: fp8 below tiers\[1\], whose blocks come down as int8"),
    ({"host": "int8", "lmdb": "exp4"}, r"tiers\[2\].codec: exp4 below.*Leave it out, or write int8"),
    ({"host": "int8", "lmdb": "none"}, r"tiers\[2\].codec: none below"),
    ({"host": "int8", "codec": "fp8"}, r"model.codec: fp8, and tiers\[1\].codec is int8. Leave it out"),
    ({"lmdb": "int8", "codec": "none"}, r"model.codec: none, and tiers\[2\].codec is int8"),
    ({"lmdb": "exp4", "codec": "int8"}, r"model.codec: int8, and no tier has a lossy codec"),
    ({"codec": "exp4"}, r"model.codec: unknown codec 'exp4'"),
    (
        {"host": "fp8", "dtype": "float8_e4m3"},
        r"tiers\[1\].codec: fp8 codes float32, float16, bfloat16, not float8_e4m3",
    ),
    ({"lmdb": "exp4", "dtype": "float8_e5m2"}, r"tiers\[2\].codec: exp4 codes .* not float8_e5m2. Use none"),
    ({"lmdb": "int8", "head_dim": 63}, r"tiers\[2\].codec: int8 needs an even head_dim.*63. Use none or exp4"),
    ({"lmdb": "int8", "head_dim": 2}, r"tiers\[2\].codec: with rows of 2 values int8 makes blocks no smaller"),
]


@pytest.mark.parametrize(("said", "told"), WRONG)
def test_what_cannot_work_is_told(said: dict[str, Any], told: str) -> None:
    """A codec is taken that ends in wrong bytes, or is refused without a way out."""
    with pytest.raises(ConfigError, match=told) as caught:
        load(**said)
    assert str(caught.value).count("\n") == 0, "one mistake is told once"


def test_memory_that_is_read_in_place_is_not_coded() -> None:
    """Kernels read codes as KV."""
    gpu = {"type": "gpu", "device": "cuda", "capacity": "1MiB", "access": "uva"}
    host = {"type": "host", "capacity": "4MiB", "codec": "int8"}
    with pytest.raises(ConfigError, match=r"tiers\[1\].codec: int8, and kernels read this tier in place"):
        kvtier.load_config({"model": MODEL, "tiers": [gpu, host]})


def test_the_group_that_cannot_be_coded_is_named() -> None:
    """In a hybrid model one looks for the mistake in the wrong group."""
    groups = [{"layers": 4, "kv_heads": 2, "head_dim": 64}, {"kind": "mla", "layers": 4, "head_dim": 63}]
    shape = dict.fromkeys(("layers", "kv_heads", "head_dim"), None)
    with pytest.raises(ConfigError, match=r"tiers\[1\].codec: int8 needs an even head_dim.* in group 1 of the model"):
        load("int8", groups=groups, **shape)


def test_origins(tmp_path: Path) -> None:
    """`config show --origin` says of a codec that nobody wrote that it is the default."""
    file = tmp_path / "kvtier.yaml"
    tiers = [{"type": "gpu", "capacity": "1MiB"}, {"type": "host", "capacity": "4MiB", "codec": "int8"}]
    tiers.append({"type": "lmdb", "capacity": "32MiB", "path": "store"})
    file.write_text(yaml.safe_dump({"model": MODEL, "tiers": tiers}))
    config = kvtier.load_config(file, environ={})
    line = file.read_text().splitlines().index("  codec: int8") + 1
    assert config.origin("tiers[1].codec") == f"{file}:{line}"
    assert config.origin("tiers[2].codec") == config.origin("model.codec") == f"tiers[1].codec ({file}:{line})"
    assert config.origin("tiers[0].codec") == "default"
    overridden = kvtier.load_config(file, overrides={"tiers[1].codec": "fp8"}, environ={})
    assert overridden.model.codec == "fp8"
    assert overridden.origin("model.codec") == "tiers[1].codec (command line tiers[1].codec)"


def test_hand_made_tiers_inherit_too() -> None:
    """A configuration made in code codes blocks twice."""
    host = HostTierConfig(capacity_bytes=1 << 22, codec="int8")
    silent = LmdbTierConfig(path=Path("/nowhere"), capacity_bytes=1 << 25)
    said = LmdbTierConfig(path=Path("/nowhere"), capacity_bytes=1 << 25, codec="none")
    assert codecs_of([host, silent]) == ["int8", "int8"]
    assert codecs_of([host, said]) == ["int8", "none"]
    assert identity_of([silent]) == "none"


def test_capacities_count_coded_blocks() -> None:
    """`config check` tells half of what a coded tier holds, or a smaller tier is said to be one that holds less."""
    plain, coded = ([tier["tokens"] for tier in capacity_facts(load(*codecs))["tiers"]] for codecs in ((), ("int8",)))
    assert coded[0] == plain[0]
    assert coded[1] > 1.7 * plain[1]
    assert coded[2] > 1.6 * plain[2]
    exp4 = capacity_facts(load(None, "exp4"))["tiers"][2]["tokens"]
    assert 1.1 * plain[2] < exp4 < coded[2]


def test_a_codec_in_vain_is_said() -> None:
    """Who turns exp4 on for tiny blocks wonders why nothing shrinks."""
    (note,) = load(None, "exp4", layers=1).notes
    assert note.startswith("tiers[2].codec: exp4 saves no page of a block of this model")
    assert load(None, "exp4").notes == ()


def test_codings_ask_the_group_of_the_key() -> None:
    """A block is coded in rows of another group."""
    groups = [GroupSpec("full", (0,), 2, 64, "bfloat16", 16), GroupSpec("mla", (1,), 1, 576, "float32", 16)]
    codings = Codings("int8", groups)

    def key(group: int) -> StoreKey:
        return store_key(3, block_key(b"h" * 32, group))

    assert codings.coding(key(0)) == Coding("int8", "bfloat16", 64)
    assert codings.coding(key(1)) == Coding("int8", "float32", 576)
    assert codings.coding(key(1), "exp4") == Coding("exp4", "float32", 576)
    assert codings.coding(key(2)) is None
    assert codings.room_bytes(1 << 16) == Coding("int8", "bfloat16", 64).room_bytes(1 << 16), (
        "the largest of all groups"
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("raw_bytes", [1, 100, 127, 4096, 65_536, 1 << 26])
def test_a_room_is_never_longer_than_the_block(codec: str, raw_bytes: int) -> None:
    """A codec makes a tier hold less, or a length that it cannot code is told as one that it can."""
    coding = Coding(codec, "bfloat16", 64)
    assert coding.room_bytes(raw_bytes) <= max(raw_bytes, 16 + raw_bytes)
    if coding.codes(raw_bytes):
        assert coding.room_bytes(raw_bytes) < raw_bytes
        assert coding.decodes(raw_bytes)
    assert coding.codes(100) is False
