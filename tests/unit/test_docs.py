"""What the documents say of the configuration is so."""

import pathlib
import re

import yaml

import kvtier
from kvtier.config.schema import TIER_TYPES, LimitsConfig, ModelSection, PrefetchConfig, TraceConfig

ROOT = pathlib.Path(__file__).parents[2]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
TABLES = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", CONFIGURATION, re.DOTALL | re.M))


def keys_of(section):
    """Key in the YAML -> default, of a section of the schema."""
    fields = section.model_fields
    return {str(field.validation_alias or name): field.get_default() for name, field in fields.items()}


def rows(title):
    """Key -> the cells behind it, of a table."""
    lines = re.findall(r"^\| (`.*?) \|$", TABLES[title], re.M)
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return {key: rest for first, *rest in cells for key in re.findall(r"`(.*?)`", first)}


def test_the_example_is_a_valid_configuration(tmp_path):
    """The YAML in the reference is refused."""
    (text,) = re.findall(r"```yaml\n(.*?)```", CONFIGURATION, re.DOTALL)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"w" * 100)
    (tmp_path / "kvtier.yaml").write_text(text)
    config = kvtier.load_config(tmp_path / "kvtier.yaml", environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert [tier.type for tier in config.tiers] == [tier["type"] for tier in yaml.safe_load(text)["tiers"]]


def test_every_key_is_in_the_reference_and_no_other():
    """A key exists that nobody can know of, or one is promised that does not exist."""
    assert set(rows("model")) - {"auto"} == set(keys_of(ModelSection))
    assert set(rows("tiers")) == {key for kind in TIER_TYPES.values() for key in keys_of(kind)}
    told = {key.rpartition(".")[2] for key in rows("prefetch, limits, trace")}
    assert told == set(keys_of(PrefetchConfig)) | set(keys_of(LimitsConfig)) | set(keys_of(TraceConfig))


def test_the_defaults_told_are_those_in_force():
    """A default was changed, and the reference was not."""
    told = rows("model")
    assert told["block_tokens"][0] == str(keys_of(ModelSection)["block_tokens"])
    for key in ("weights_epoch", "layout", "hash", "codec"):
        assert told[key][0] == f"`{keys_of(ModelSection)[key]}`", key
    told = rows("tiers")
    for kind, section in TIER_TYPES.items():
        defaults = keys_of(section)
        for key in ("policy", "device", "pin", "hugepages", "durability", "payload"):
            if key in defaults:
                assert told[key][1] == f"`{defaults[key]}`", (kind, key)
        marks = f"{defaults['low_watermark']:.2f}, {defaults['high_watermark']:.2f}"
        assert told["low_watermark"][1] == marks
    told = rows("prefetch, limits, trace")
    assert told["prefetch.lookahead_requests"][0] == str(keys_of(PrefetchConfig)["lookahead_requests"])
    assert told["prefetch.budget"][0] == str(keys_of(PrefetchConfig)["budget"])
    assert told["limits.load_deadline"][0] == f"{keys_of(LimitsConfig)['load_deadline'] * 1000:.0f}ms"
    assert told["limits.queue"][0] == f"{keys_of(LimitsConfig)['queue'] >> 20}MiB"
    assert told["limits.pin_quota"][0] == str(keys_of(LimitsConfig)["pin_quota"])
    assert told["trace.max"][0] == f"{keys_of(TraceConfig)['max'] >> 30}GiB"


def test_every_link_leads_somewhere():
    """A document names one that does not exist."""
    for document in (ROOT / "docs").rglob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_every_counter_is_explained():
    """`stats()` shows numbers that nobody can interpret."""
    told = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "counters.md").read_text()))
    tiers = [{"type": "gpu", "capacity": "64KiB"}, {"type": "host", "capacity": "64KiB"}]
    model = {"name": "m", "weights_epoch": "v1", "layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    with kvtier.open_sync({"model": model, "tiers": tiers}) as cache:
        stats = cache.stats()
    assert (set(stats) | set(stats["tiers"]["gpu"])) - {"tiers"} <= told
