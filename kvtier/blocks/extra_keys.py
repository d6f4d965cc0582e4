"""What besides its tokens makes a block's content: adapter, images, salt, embeddings, and what others register.

The order of the parts and their spelling are vLLM 0.32's, so that equal prompts get equal keys in both
(`tests/data/` holds its own answers): ("lora", name, path), one ("mm", identifier, offset) per item in the block,
("cache_salt", salt), ("prompt_embeds", digest), then those of registered producers in order of registration.
Units: tokens.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from kvtier.blocks.embeddings import PromptEmbeddings
from kvtier.errors import UsageError
from kvtier.registry import Registry, suggestion

ExtraKey = tuple[object, ...]
Producer = Callable[[Any, int, int], Iterable[ExtraKey]]

PRODUCERS: Registry[Producer] = Registry("extra-key producer", {})


def register_extra_keys(name: str, producer: Producer) -> None:
    """Let requests carry data that changes their KV, under `name` in `ExtraKeys.data`.

    producer(data, start, end): a pure function; returns the tuples to append for the block with tokens [start, end).
    Without any, an empty list. Tuples hold what the hash's encoding can spell: integers, texts, bytes, None, tuples.
    Raises UsageError for a name that is taken.
    """
    if not callable(producer):
        raise UsageError(f"producer is {producer!r}; pass a function of (data, start, end)")
    PRODUCERS.add(name, producer)


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """An image, a sound... that stands for `length` tokens from `offset` on. `identifier` names its content."""

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first token behind it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """Everything of one request that changes its KV but is not a token.

    lora: name and path of the adapter. items: by offset, without overlap. cache_salt: keeps tenants apart; it enters
    the first block only, and through the chain all later ones. It is not empty: vLLM's Request takes "" for no salt,
    and a tenant with an empty name would share with everybody. prompt_embeds: [tokens, hidden size], a numpy array or
    torch tensor. data: for registered producers, by name.
    """

    lora: tuple[str, str] | None = None
    items: tuple[MultiModalItem, ...] = ()
    cache_salt: str | None = None
    prompt_embeds: Any = None
    data: Mapping[str, object] = field(default_factory=dict, hash=False)
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _lora_key: tuple[ExtraKey, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises UsageError for what would silently name something else."""
        lora = self.lora
        if lora is not None and not (isinstance(lora, tuple) and len(lora) == 2 and all(_is_text(x) for x in lora)):
            raise UsageError(f"lora is {lora!r}; pass the adapter's (name, path)")
        if self.cache_salt is not None and not _is_text(self.cache_salt):
            raise UsageError(f"cache_salt is {self.cache_salt!r}; pass a text")
        if self.cache_salt == "":
            raise UsageError("cache_salt is empty, which keeps nobody apart; pass None for no salt, or a text")
        _check_items(self.items)
        if self.prompt_embeds is not None and not isinstance(self.prompt_embeds, PromptEmbeddings):
            object.__setattr__(self, "prompt_embeds", PromptEmbeddings(self.prompt_embeds))
        object.__setattr__(self, "data", _checked_data(self.data))
        object.__setattr__(self, "_ends", tuple(item.end for item in self.items))
        object.__setattr__(self, "_lora_key", (("lora", *lora),) if lora else ())

    def of_block(self, start: int, end: int) -> tuple[ExtraKey, ...] | None:
        """The extra keys of the block with tokens [start, end), or None if it has none."""
        parts = self._lora_key
        if self._ends and self._ends[-1] > start:
            parts += self._items_in(start, end)
        if start == 0 and self.cache_salt is not None:
            parts += (("cache_salt", self.cache_salt),)
        if self.prompt_embeds is not None:
            parts += (("prompt_embeds", self.prompt_embeds.digest(start, end)),)
        if self.data:
            parts += _produced(self.data, start, end)
        return parts or None

    def _items_in(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        found: list[ExtraKey] = []
        for index in range(bisect_right(self._ends, start), len(self.items)):
            item = self.items[index]
            if item.offset >= end:
                break
            found.append(("mm", item.identifier, item.offset - start))
        return tuple(found)


def _check_items(items: object) -> None:
    if not isinstance(items, tuple) or not all(isinstance(item, MultiModalItem) for item in items):
        raise UsageError(f"items is {items!r}; pass a tuple of MultiModalItem")
    for item in items:
        numbers = (item.offset, item.length)
        if not _is_text(item.identifier) or not all(type(n) is int and 0 <= n < 2**32 for n in numbers):
            raise UsageError(f"{item!r}: identifier is a text, offset and length are counts of tokens")
    for before, item in pairwise(items):
        if item.offset < before.end:
            raise UsageError(f"{item!r} begins before {before!r} ends; pass items by offset, without overlap")


def _checked_data(data: object) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise UsageError(f"data is {data!r}; pass a mapping from producers' names to their data")
    for name in data:
        if not isinstance(name, str) or name not in PRODUCERS:
            near = f"{suggestion(str(name), PRODUCERS)} " if list(PRODUCERS) else "None is: "
            remedy = "register_extra_keys(name, producer) makes one known."
            raise UsageError(f"no extra-key producer {name!r} is registered. {near}{remedy}")
    return MappingProxyType(dict(data))


def _produced(data: Mapping[str, object], start: int, end: int) -> tuple[ExtraKey, ...]:
    parts: list[ExtraKey] = []
    for name in PRODUCERS:
        if name in data:
            made = _keys_of(name, data[name], start, end)
            if not all(isinstance(key, tuple) for key in made):
                raise UsageError(f"extra-key producer {name!r} gave {made!r}; it returns tuples, each a key")
            parts.extend(made)
    return tuple(parts)


def _keys_of(name: str, data: object, start: int, end: int) -> tuple[ExtraKey, ...]:
    """What a producer of a stranger gives, or an error that names it."""
    try:
        made = PRODUCERS.get(name)(data, start, end)
        if isinstance(made, Iterable):
            return tuple(made)
    except Exception as error:  # a stranger's code chooses what it raises, in the call or in its generator
        text = f"extra-key producer {name!r} failed for tokens {start} to {end}: {error!r}"
        raise UsageError(f"{text}; mend it, or what data[{name!r}] holds") from error
    raise UsageError(f"extra-key producer {name!r} gave {made!r}; it returns tuples, each a key, or an empty list")


def _is_text(value: object) -> bool:
    """A string that has a UTF-8 form: CBOR knows no other."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
