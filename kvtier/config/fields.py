"""The kinds of value that a configuration has, and how pydantic's complaints become ours.

Owns no state. Every field of `schema` is annotated with one of these kinds and carries an example, so that each
problem can be told with the value, what is wrong with it, and what to write instead.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo

from kvtier.config.units import Rejected, bounded_seconds, parse_bytes, parse_fraction, parse_rate, parse_seconds
from kvtier.config.wear import WearConfig, parse_wear
from kvtier.errors import ConfigError
from kvtier.registry import suggestion

COUNT_MAX = 65536  # layers, heads, tokens: far above any model, far below what would exhaust memory

WRITTEN = {"source": "text"}  # the validation context of values that people wrote

M = TypeVar("M", bound="Section")
T = TypeVar("T")


class Section(BaseModel):
    """A mapping of the YAML. Code may use the field names, the YAML only the aliases (`capacity`)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, arbitrary_types_allowed=True
    )


def validated(cls: type[M], raw: object, path: str, problems: list[ConfigError]) -> M | None:
    """The section as an object, or None after adding what is wrong with it to `problems`."""
    if not isinstance(raw, dict):
        problems.append(ConfigError(path, f"{raw!r} is not a mapping", f"Write keys such as {_first_keys(cls)}."))
        return None
    try:
        return cls.model_validate(raw, by_alias=True, by_name=False, context=WRITTEN)
    except ValidationError as error:
        told = [dict(found) for found in error.errors(include_url=False)]
        # A default made of other values has nothing to add when one of those is wrong.
        problems.extend(_told(cls, path, found) for found in told if found["type"] != "default_factory_not_called")
        return None


def keys_of(cls: type[Section]) -> dict[str, str]:
    """YAML key -> an example of its value."""
    return {yaml_key(cls, name): str((field.examples or [""])[0]) for name, field in cls.model_fields.items()}


def yaml_key(cls: type[Section], name: str) -> str:
    """The YAML's name of a field."""
    alias = cls.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else name


def _told(cls: type[Section], path: str, found: Mapping[str, Any]) -> ConfigError:
    key = str(found["loc"][0])
    place = f"{path}.{key}" if path else key
    example = keys_of(cls).get(key, "")
    if found["type"] == "extra_forbidden":
        return ConfigError(place, f"unknown key {key!r}", suggestion(key, keys_of(cls)))
    if found["type"] == "missing":
        return ConfigError(place, "is missing", f"Add `{key}: {example}` or the like.")
    reason = found.get("ctx", {}).get("error")
    if isinstance(reason, Rejected):
        return ConfigError(place, reason.problem, reason.remedy)
    return ConfigError(place, f"{found['input']!r}: {found['msg']}", f"Write for instance `{key}: {example}`.")


def _first_keys(cls: type[Section]) -> str:
    return ", ".join(list(keys_of(cls))[:3])


# ---------------------------------------------------------------- kinds of value


def _count(least: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 10:
            value = int(value)  # an override is always a text
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= COUNT_MAX:
            raise Rejected(f"{value!r} is not a number from {least} to {COUNT_MAX}", "Write a whole number.")
        return value

    return parse


def _text(value: object) -> str:
    if isinstance(value, str) and value.strip():
        if not _has_utf8(value):
            raise Rejected(f"{value!r} holds what is no character", "Write it in UTF-8.")
        return value
    if value is None or isinstance(value, (str, list, dict)):
        raise Rejected(f"{value!r} is not a text", "Write a word or a text.")
    raise Rejected(f"{value!r} was read as a {type(value).__name__}", f"Put it in quotes: '{value}'.")


def _has_utf8(text: str) -> bool:
    try:
        return text.encode() is not None
    except UnicodeEncodeError:  # bytes of the command line that were no UTF-8
        return False


def _name(value: object) -> str:
    text = _text(value)
    if not (text.isascii() and text.replace("_", "a").replace("-", "a").isalnum() and len(text) <= 64):
        raise Rejected(f"{text!r} cannot label a metric", "Use up to 64 letters, digits, - and _.")
    return text


def _path(value: object) -> Path:
    text = str(value) if isinstance(value, Path) else _text(value)
    if "\0" in text:
        raise Rejected(f"{text!r} is not a path", "Leave out the NUL character.")
    return Path(text)


def _flag(value: object) -> bool:
    named = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, str):
        value = named.get(value.strip().lower(), value)
    if not isinstance(value, bool):
        raise Rejected(f"{value!r} is neither true nor false", "Write true or false.")
    return value


def one_of(
    kind: str,
    known: Iterable[str],
    refused: Mapping[str, tuple[str, str]] | None = None,
    elsewhere: str | None = None,
) -> BeforeValidator:
    """Accepts one of the words known by then. `refused` has words with a problem and a remedy of their own.

    elsewhere: a pattern of words that somebody else has to know.
    """

    def parse(value: object) -> str:
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # YAML reads off as false
        if not isinstance(word, str):
            raise Rejected(f"{value!r} is no {kind}", f"Known: {', '.join(known)}.")
        if word in known or (elsewhere and re.fullmatch(elsewhere, word, re.ASCII)):
            return word
        if refused and word in refused:
            problem, remedy = refused[word]
            raise Rejected(f"{kind} {word!r} {problem}", remedy)
        raise Rejected(f"unknown {kind} {word!r}", suggestion(word, known))

    return BeforeValidator(parse)


def not_yet(*words: str, use: str) -> dict[str, tuple[str, str]]:
    """Words that are announced but that this version cannot honour."""
    return dict.fromkeys(words, ("is not in this version", f"Use {use}."))


def _device(value: object) -> str:
    """`auto`, `host`, `cuda`, or one of several devices by its number: `cuda:1`."""
    word, colon, number = str(value).partition(":")
    if word == "cuda" and colon and (not number.isdecimal() or not number.isascii() or len(number) > 2):
        raise Rejected(f"{value!r} is no device", "Write cuda:0, cuda:1 and so on, or cuda for the first.")
    known = ("auto", "host", "cuda")
    if not isinstance(value, str) or (colon and word != "cuda") or word not in known:
        raise Rejected(f"unknown device {value!r}", suggestion(word, known))
    return value


def _some_bytes(value: object) -> int:
    size_bytes = parse_bytes(value)
    if size_bytes == 0:
        raise Rejected(f"{value!r} is nothing", "Write a size such as 512MiB.")
    return size_bytes


def _byte_rate(value: object) -> int:
    """Bytes a second, 0 for off."""
    if value is False or (isinstance(value, str) and value.strip().lower() == "off"):  # YAML reads off as false
        return 0
    if isinstance(value, str):
        value = value.strip().removesuffix("/s")
    try:
        return parse_bytes(value)
    except Rejected as error:
        raise Rejected(error.problem, "Write bytes a second such as 20MiB/s, or off.") from None


def _some_seconds(value: object, info: ValidationInfo) -> float:
    in_code = info.context is not WRITTEN  # there the name `..._s` says the unit
    if in_code and isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = bounded_seconds(value, value)
    else:
        seconds = parse_seconds(value)
    if seconds == 0:
        raise Rejected(f"{value!r} is no time at all", "Write a duration such as 500ms.")
    return seconds


def _or_none(parse: Callable[[object], T]) -> Callable[[object], T | None]:
    return lambda value: None if value is None else parse(value)


Count = Annotated[int, BeforeValidator(_count(1))]
CountOrZero = Annotated[int, BeforeValidator(_count(0))]
Bytes = Annotated[int, BeforeValidator(_some_bytes)]
ByteRateOrOff = Annotated[int, BeforeValidator(_byte_rate)]
BytesOrZero = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(_some_seconds)]
Fraction = Annotated[float, BeforeValidator(parse_fraction)]
Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, BeforeValidator(_name)]
PathText = Annotated[Path, BeforeValidator(_path)]
MaybeRate = Annotated[float | None, BeforeValidator(_or_none(parse_rate))]
MaybeCount = Annotated[int | None, BeforeValidator(_or_none(_count(1)))]
MaybeText = Annotated[str | None, BeforeValidator(_or_none(_text))]
MaybePath = Annotated[Path | None, BeforeValidator(_or_none(_path))]
MaybeWear = Annotated[WearConfig | None, BeforeValidator(parse_wear)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Device = Annotated[str, BeforeValidator(_device)]
