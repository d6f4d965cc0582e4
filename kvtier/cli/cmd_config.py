"""`kvtier config show` and `kvtier config check`."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvtier.blocks.namespace import fingerprint
from kvtier.blocks.spec import block_specs
from kvtier.config import Config, load_config
from kvtier.config.sources import parse_path
from kvtier.config.units import format_bytes
from kvtier.errors import ConfigError


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
        print(f"  {tier['name']:<8} {format_bytes(tier['capacity_bytes']):>10}  {tier['tokens']:>12,} tokens at most")
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
    """What the tiers would hold: per tier the tokens whose blocks, of all groups, fill it."""
    token_bytes = sum(
        spec.stride_bytes / config.model.groups[spec.group].block_tokens for spec in block_specs(config.model)
    )
    return {
        "namespace": fingerprint(config.model).hex(),
        "token_bytes": token_bytes,
        "tiers": [
            {
                "name": tier.name,
                "capacity_bytes": tier.capacity_bytes,
                "tokens": int(tier.capacity_bytes / token_bytes),
            }
            for tier in config.tiers
        ],
    }


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
