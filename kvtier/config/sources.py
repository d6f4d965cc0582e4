"""Where a configuration's values come from: command line over environment over file over default.

Owns: one tree of plain data after the three written sources are laid over each other, and per value its origin.
A variable is called `KVTIER_` and the path in capitals with two underscores for each step down:
``tiers[1].capacity`` is ``KVTIER_TIERS__1__CAPACITY``. Overrides change or add single values; they cannot add a
tier or a group. Values stay the texts they were written as: the schema gives them meaning.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.config.document import Document, Where, path_text
from kvtier.errors import ConfigError
from kvtier.registry import suggestion

SECTIONS = ("model", "tiers", "prefetch", "limits", "trace")
PREFIX = "KVTIER_"
_STEP = re.compile(r"([A-Za-z_]+)((?:\[\d{1,3}\])*)")


@dataclass
class Sources:
    """The merged tree. `folder_of` says against which folder a relative path at some place is meant."""

    data: dict[str, Any]
    folder: Path
    origins: dict[Where, str] = field(default_factory=dict)
    _own_folder: set[Where] = field(default_factory=set)

    @classmethod
    def of_file(cls, document: Document, path: Path) -> "Sources":
        origins = {where: f"{path}:{line}" for where, line in document.lines.items()}
        return cls(document.data, path.absolute().parent, origins)

    @classmethod
    def of_mapping(cls, mapping: Mapping[str, Any]) -> "Sources":
        origins: dict[Where, str] = {}
        data = _plain(mapping, (), origins)
        assert isinstance(data, dict)
        return cls(data, Path.cwd(), origins)

    def override(self, where: Where, value: str, origin: str) -> None:
        """Set one value. Raises ConfigError when there is no such place."""
        node: Any = self.data
        for depth, step in enumerate(where[:-1]):
            if isinstance(node, dict) and isinstance(step, str):
                node = node.setdefault(step, {})
            else:
                node = self._item(node, where[: depth + 1], origin)
        last = where[-1]
        if isinstance(node, dict) and isinstance(last, str):
            node[last] = value
        else:
            self._item(node, where, origin)
            node[last] = value
        self.origins[where] = origin
        self._own_folder.add(where)

    def origin_of(self, where: Where) -> str:
        """Who gave the value: a file and line, a variable, the command line, the caller, or nobody."""
        return self.origins.get(where, "default")

    def resolve_path(self, path: Path, where: Where, problems: list[ConfigError]) -> Path:
        """The absolute path: `~` expands, the rest is relative to the file that says it, or else to the cwd."""
        try:
            path = path.expanduser()
        except RuntimeError:
            problems.append(ConfigError(path_text(where), f"{path}: no home folder", "Write the path in full."))
        return (Path.cwd() if where in self._own_folder else self.folder) / path

    def _item(self, node: Any, where: Where, origin: str) -> Any:
        step = where[-1]
        if isinstance(node, list) and isinstance(step, int) and step < len(node):
            return node[step]
        around = path_text(where[:-1])
        held = f"has {len(node)} entries" if isinstance(node, list) else f"is {node!r}"
        raise ConfigError(
            path_text(where),
            f"{origin} sets it, but {around} {held}",
            "Set values of what the file lists; indexes count from 0.",
        )


def environment_overrides(environ: Mapping[str, str]) -> list[tuple[Where, str, str]]:
    """The configuration's variables as (place, value, origin), in the order of their names."""
    found = []
    for name in sorted(environ):
        steps = name.removeprefix(PREFIX).lower().split("__")
        if not name.startswith(PREFIX):
            continue
        if len(steps) == 1:
            _refuse_single_underscores(name)
            continue
        where = tuple(int(step) if step.isascii() and step.isdigit() else step for step in steps)
        found.append((_known_section(where, name), environ[name], f"environment {name}"))
    return found


def argument_overrides(overrides: Mapping[str, str]) -> list[tuple[Where, str, str]]:
    """Command line overrides by path, such as ``{"tiers[1].capacity": "8GiB"}``."""
    return [
        (_known_section(parse_path(path), path), value, f"command line {path}") for path, value in overrides.items()
    ]


def parse_path(text: str) -> Where:
    """The steps of ``tiers[1].capacity``. Raises ConfigError for anything else."""
    where: list[str | int] = []
    for part in text.split("."):
        step = _STEP.fullmatch(part)
        if step is None:
            raise ConfigError(text, "is not the path of a value", "Write paths such as tiers[1].capacity.")
        where.append(step[1])
        where.extend(int(index) for index in re.findall(r"\d+", step[2]))
    return tuple(where)


def _known_section(where: Where, name: str) -> Where:
    if where[0] not in SECTIONS:
        raise ConfigError(name, f"there is no section {where[0]!r}", suggestion(str(where[0]), SECTIONS))
    if len(where) == 1 or "" in where:
        raise ConfigError(name, "names no single value", "Go on to one value, such as tiers[1].capacity.")
    return where


def _refuse_single_underscores(name: str) -> None:
    section = name.removeprefix(PREFIX).lower().split("_")[0]
    if section in SECTIONS:  # other variables with our prefix are not configuration
        raise ConfigError(
            name,
            "would be ignored: steps are divided by two underscores",
            f"Write it like {PREFIX}TIERS__1__CAPACITY or {PREFIX}MODEL__BLOCK_TOKENS.",
        )


def _plain(value: object, where: Where, origins: dict[Where, str]) -> object:
    """A copy in dicts and lists, so that overriding does not change what the caller passed."""
    if where:
        origins[where] = "argument"
    if isinstance(value, Mapping):
        return {key: _plain(item, (*where, key), origins) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*where, index), origins) for index, item in enumerate(value)]
    return value
