"""`kvtier config show` and `kvtier config check`."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from kvtier.blocks.coding import Codings
from kvtier.blocks.namespace import fingerprint
from kvtier.blocks.spec import BlockSpec, block_specs
from kvtier.config import Config, load_config
from kvtier.config.codecs import coded_model
from kvtier.config.notes import slots_of
from kvtier.config.schema import LmdbTierConfig, TierConfig
from kvtier.config.sources import parse_path
from kvtier.config.units import readable_bytes
from kvtier.errors import ConfigError
from kvtier.tiers.lmdb.budget import split
from kvtier.types import ModelSpec


def show(file: Path, assignments: list[str], origin: bool, json_output: bool) -> int:
    """Print the values in force as YAML, or one a line with its origin. Returns the exit code."""
    config = load_config(file, overrides=parse_assignments(assignments))
    if json_output:
        record = as_record(config)
        if origin:
            record["origins"] = {path: setting.origin for path, setting in config.settings.items()}
        print(json.dumps(record, indent=2))
    elif origin:
        print("\n".join(_origin_lines(config)))
    else:
        print(as_yaml(config), end="")
    return 0


def check(file: Path, assignments: list[str], json_output: bool) -> int:
    """Load the file and print what its tiers would hold. Returns the exit code."""
    config = load_config(file, overrides=parse_assignments(assignments))
    facts = capacity_facts(config)
    if json_output:
        print(json.dumps({"ok": True, "file": str(file), **facts, "notes": config.notes}, indent=2))
        return 0
    print(f"{file}: ok")
    model = config.model
    print(f"model {model.name}, namespace {facts['namespace'][:16]}, weights epoch {model.weights_epoch}")
    for tier in facts["tiers"]:
        print(f"  {tier['name']:<8} {readable_bytes(tier['capacity_bytes']):>10}  {tier['tokens']:>12,} tokens at most")
    for note in config.notes:
        print(f"note: {note}")
    return 0


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """``PATH=VALUE`` texts as overrides. Raises ConfigError for one without a path or a value."""
    overrides = {}
    for text in assignments:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ConfigError("--set", f"{text!r} is not PATH=VALUE", "Write for instance tiers[1].capacity=8GiB.")
        overrides[path.strip()] = value.strip()
    return overrides


def as_record(config: Config) -> dict[str, Any]:
    """The configuration as plain data in its own units (bytes, seconds)."""
    return {
        "model": dataclasses.asdict(config.model),
        "tiers": [tier.model_dump(mode="json") for tier in config.tiers],
        "prefetch": config.prefetch.model_dump(mode="json"),
        "limits": config.limits.model_dump(mode="json"),
    }


def as_yaml(config: Config) -> str:
    """The configuration as a YAML file that loads to the same one."""
    tree: dict[str, Any] = {}
    for path, setting in config.settings.items():
        _place(tree, parse_path(path), setting.value)
    return yaml.safe_dump(_listed(tree), sort_keys=False, default_flow_style=None, width=110)


def capacity_facts(config: Config) -> dict[str, Any]:
    """What the tiers would hold: per tier the tokens whose blocks, of all groups, fill it.

    Raises ConfigError if a store's capacity is too small beside its index.
    """
    specs = block_specs(config.model)
    token_bytes = sum(spec.stride_bytes / config.model.groups[spec.group].block_tokens for spec in specs)
    return {
        "namespace": fingerprint(config.model).hex(),
        "token_bytes": token_bytes,
        "tiers": [
            {
                "name": tier.name,
                "capacity_bytes": tier.capacity_bytes,
                "tokens": _tokens_of(config.model, specs, tier, codings, f"tiers[{index}]"),
            }
            for index, (tier, codings) in enumerate(
                zip(config.tiers, coded_model(config.model, config.tiers), strict=True)
            )
        ],
    }


def _tokens_of(model: ModelSpec, specs: Sequence[BlockSpec], tier: TierConfig, codings: Codings, where: str) -> int:
    """How many tokens' whole blocks fit, coded as most of them are: slots take the largest block, a store has extents
    of each size beside its index."""
    spans = [model.groups[spec.group].block_tokens for spec in specs]
    span_tokens = math.lcm(*spans)  # in which every group has whole blocks
    if not isinstance(tier, LmdbTierConfig):
        slots = slots_of(tier, max(codings.slot_bytes(spec.block_bytes) for spec in specs))
        return slots // sum(span_tokens // span for span in spans) * span_tokens
    budget = split(tier.capacity_bytes, max(spec.block_bytes for spec in specs), where)
    extents = sum(
        Fraction(span_tokens // span, budget.extent_bytes // codings.slot_bytes(spec.block_bytes))
        for span, spec in zip(spans, specs, strict=True)
    )
    return int(budget.extents_max / extents) * span_tokens


def _origin_lines(config: Config) -> list[str]:
    texts = {path: s.value if isinstance(s.value, str) else json.dumps(s.value) for path, s in config.settings.items()}
    path_width, text_width = max(map(len, texts)), max(map(len, texts.values()))
    return [f"{path:<{path_width}}  {text:<{text_width}}  {config.origin(path)}" for path, text in texts.items()]


def _place(tree: dict[Any, Any], where: tuple[str | int, ...], value: object) -> None:
    for step in where[:-1]:
        tree = tree.setdefault(step, {})
    tree[where[-1]] = value


def _listed(tree: object) -> object:
    """Mappings whose keys are indexes become lists."""
    if not isinstance(tree, Mapping):
        return tree
    if all(isinstance(key, int) for key in tree):
        return [_listed(item) for item in tree.values()]
    return {key: _listed(item) for key, item in tree.items()}
