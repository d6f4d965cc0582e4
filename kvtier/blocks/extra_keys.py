"""What besides its tokens makes a block's content: adapter, images, salt.

The order of the parts and their spelling are vLLM 0.32's, so that equal prompts get equal keys in both
(`tests/data/vllm_hashes.json` holds its own answers). Units: tokens.
"""

from dataclasses import dataclass

from kvtier.errors import UsageError


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """An image, a sound... that stands for `length` tokens from `offset` on. `identifier` names its content."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """Everything of one request that changes its KV but is not a token.

    lora: name and path of the adapter. cache_salt: keeps tenants apart; it enters the first block only, and
    through the chain all later ones.
    """

    lora: tuple[str, str] | None = None
    items: tuple[MultiModalItem, ...] = ()
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for what would silently name something else."""
        lora = self.lora
        if lora is not None and not (isinstance(lora, tuple) and len(lora) == 2 and all(_is_text(x) for x in lora)):
            raise UsageError(f"lora is {lora!r}; pass the adapter's (name, path)")
        if not isinstance(self.items, tuple) or not all(isinstance(item, MultiModalItem) for item in self.items):
            raise UsageError(f"items is {self.items!r}; pass a tuple of MultiModalItem")
        if self.cache_salt is not None and not _is_text(self.cache_salt):
            raise UsageError(f"cache_salt is {self.cache_salt!r}; pass a text")

    def of_block(self, start: int, end: int) -> tuple[tuple[object, ...], ...] | None:
        """The extra keys of the block with tokens [start, end), or None if it has none."""
        parts: list[tuple[object, ...]] = []
        if self.lora is not None:
            parts.append(("lora", *self.lora))
        parts.extend(
            ("mm", item.identifier, item.offset - start)
            for item in self.items
            if item.offset < end and start < item.offset + item.length
        )
        if start == 0 and self.cache_salt:
            parts.append(("cache_salt", self.cache_salt))
        return tuple(parts) or None


def _is_text(value: object) -> bool:
    """A string that has a UTF-8 form: CBOR knows no other."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
