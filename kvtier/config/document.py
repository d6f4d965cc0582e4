"""A YAML file as plain data, with the line each value came from.

Owns no state. Stricter than YAML where leniency hides mistakes: a key given twice is an error, and so is anything
but one mapping of plain values at the top. Every problem is a ConfigError that names file, line and column.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvtier.errors import ConfigError

DOCUMENT_BYTES_MAX = 1 << 20
NODES_MAX = 100_000  # aliases that refer to aliases could otherwise grow without bound
DEPTH_MAX = 20
PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

Where = tuple[str | int, ...]  # the steps to a value: keys and list indexes


@dataclass(frozen=True)
class Document:
    """The data, and per value its line number (from 1)."""

    data: dict[str, Any]
    lines: dict[Where, int] = field(default_factory=dict)


def path_text(where: Where) -> str:
    """The steps as messages spell them: ``tiers[1].capacity``."""
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def read_document(path: Path) -> Document:
    """Read a YAML file. Raises ConfigError for whatever is wrong with it."""
    try:
        with path.open("rb") as file:
            raw = file.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            str(path), f"cannot be read: {error.strerror}", "Name an existing kvtier YAML file."
        ) from None
    if len(raw) > DOCUMENT_BYTES_MAX:
        raise ConfigError(str(path), "has more than 1 MiB", "Name a kvtier YAML file; they are a page long.")
    return parse_document(raw, str(path))


def parse_document(raw: bytes, name: str) -> Document:
    """Parse the content of a YAML file called `name`."""
    loader = None
    try:
        loader = yaml.SafeLoader(raw)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(name, "is empty", "It needs at least the sections model and tiers.")
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(name, "is not a mapping", "Write sections such as `model:` and `tiers:`.")
        walk = _Walk(loader, name)
        return Document(walk.mapping(root, ()), walk.lines)
    except yaml.YAMLError as error:
        raise _syntax_error(name, error) from None
    except RecursionError:
        raise ConfigError(name, "is nested too deeply", "A kvtier YAML file has four levels at most.") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Walk:
    """Turns nodes into plain data, noting lines and refusing what YAML would let pass."""

    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self.loader = loader
        self.name = name
        self.lines: dict[Where, int] = {}

    def value(self, node: yaml.Node, where: Where) -> Any:
        if len(self.lines) >= NODES_MAX or len(where) > DEPTH_MAX:
            raise self._error(node, "too many or too deeply nested values", "Write them out without aliases.")
        if isinstance(node, yaml.CollectionNode) and node.tag not in PLAIN_TAGS:
            raise self._error(node, f"the tag {node.tag!r} means nothing here", "Leave it out.")
        self.lines[where] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*where, index)) for index, item in enumerate(node.value)]
        try:
            return self.loader.construct_object(node)
        except ValueError as error:  # such as the date 2024-99-99
            raise self._error(node, f"{node.value!r}: {error}", "Put it in quotes if it is a text.") from None

    def mapping(self, node: yaml.MappingNode, where: Where) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key is not a word", "Write keys such as `capacity:`.")
            if key in result:
                first = self.lines[(*where, key)]
                problem = f"the key {path_text((*where, key))!r} is given twice, first in line {first}"
                raise self._error(key_node, problem, "Keep one of the two.")
            result[key] = self.value(value_node, (*where, key))
        return result

    def _error(self, node: yaml.Node, problem: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.name}:{node.start_mark.line + 1}", problem, remedy)


def _syntax_error(name: str, error: yaml.YAMLError) -> ConfigError:
    remedy = "Mend the YAML there; a missing space after a colon or a stray tab are the usual causes."
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        place = f"{name}, line {mark.line + 1}, column {mark.column + 1}"
        return ConfigError(place, f"not valid YAML: {error.problem or error.context}", remedy)
    return ConfigError(name, f"not valid YAML: {str(error).splitlines()[0]}", "Save the file as UTF-8 text.")
