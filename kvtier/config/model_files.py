"""The fields of a model's description, read with their place, so that every complaint says where and what to write.

Owns no state. A description is a mapping: a Hugging Face `config.json`, or words of our own (`cache/models/layers`).
`read_model_file` is the only I/O; everything that decides takes the `ModelFields` it returns, or that were made of a
mapping. Always: a field that is null counts as absent. Units: whole numbers, as written.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

COUNT_MAX = (1 << 31) - 1  # of heads, dimensions, tokens: beyond any model
LAYERS_MAX = 1 << 16  # each costs an object
_SHOWN_MAX = 80  # characters of a wrong value
_PATH_SHOWN_MAX = 400
_WRITE_ALL = "Add it; `AutoConfig.from_pretrained(...).to_dict()` of transformers gives every field."


@dataclass(frozen=True)
class ModelFields:
    """One mapping. `place` stands before a field's name in errors: a file, a dotted path, or nothing.

    add: what to do about a field that is missing.
    """

    content: Mapping[str, Any]
    place: str = ""
    add: str = _WRITE_ALL

    def has(self, name: str) -> bool:
        return self.content.get(name) is not None

    def count(self, *names: str, most: int = COUNT_MAX) -> int:
        """The first of these fields that is there, a number from 1 on. Raises ConfigError also when none is."""
        for name in names:
            if self.has(name):
                return self._whole(name, self.content[name], 1, most)
        raise self.error(names[0], "is missing", self.add)

    def maybe_count(self, *names: str) -> int | None:
        """Like `count`, but None when there is none. 0 is how some files write: not used."""
        for name in names:
            if self.has(name):
                return self._whole(name, self.content[name], 0) or None
        return None

    def index(self, name: str) -> int:
        """A number from 0 on."""
        if not self.has(name):
            raise self.error(name, "is missing", self.add)
        return self._whole(name, self.content[name], 0)

    def indexes(self, name: str) -> list[int] | None:
        """A list of numbers from 0 on, or None."""
        items = self._items(name)
        return None if items is None else [self._whole(f"{name}[{i}]", item, 0) for i, item in enumerate(items)]

    def texts(self, name: str) -> list[str] | None:
        items = self._items(name)
        if items is not None and not all(isinstance(item, str) for item in items):
            raise self.error(name, f"{shown(items)} holds what is no text", "Write a list of words.")
        return None if items is None else list(items)

    def text(self, name: str) -> str | None:
        value = self.content.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"{shown(value)} is no text", "Write a word.")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.content.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"{shown(value)} is neither true nor false", "Write true or false.")
        return default if value is None else value

    def nested(self, name: str) -> "ModelFields | None":
        """The mapping under this name, or None."""
        value = self.content.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, f"{shown(value)} is not a mapping", "Write its fields by name.")
        return None if value is None else replace(self, content=value, place=self.path_of(name))

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ModelFields":
        """The same fields, and those of `defaults` where a name is not there at all."""
        return replace(self, content={**defaults, **self.content})

    def path_of(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def error(self, name: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError(self.path_of(name), problem, remedy)

    def _items(self, name: str) -> Sequence[Any] | None:
        value = self.content.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            raise self.error(name, f"{shown(value)} is not a list", "Write a list, one entry for each layer.")
        return value

    def _whole(self, name: str, value: object, least: int, most: int = COUNT_MAX) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"{shown(value)} is no number from {least} to {most}", "Write a whole number.")
        return value


def read_model_file(path: str | Path) -> ModelFields:
    """The fields of a `config.json`, or of the one in a folder. Raises ConfigError when there is none to read."""
    if isinstance(path, str) and path.lstrip()[:1] in ("{", "["):
        remedy = "Pass json.loads(...) of it, or the path of a config.json."
        raise ConfigError("description", f"{shown(path)} is the text of a description, not a path", remedy)
    file, place = Path(path), _on_one_line(str(path))
    remedy = "Name the config.json of a model, or the folder that holds it."
    try:
        if file.is_dir():
            file = file / "config.json"
            place = _on_one_line(str(file))
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(place, f"cannot be read: {error.strerror}", remedy) from error
    except ValueError as error:  # a null byte, or half a character
        raise ConfigError(place, "is no path", remedy) from error
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(place, f"is not JSON: {error}", remedy) from error
    if not isinstance(fields, dict):
        raise ConfigError(place, "is not a mapping of fields", remedy)
    return ModelFields(fields, place)


def shown(value: object) -> str:
    """What was written, in one short line."""
    return _on_one_line(repr(value), _SHOWN_MAX)


def _on_one_line(text: str, most: int = _PATH_SHOWN_MAX) -> str:
    plain = text if text.isprintable() else " ".join(repr(text)[1:-1].replace("\\n", " ").split())
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."
