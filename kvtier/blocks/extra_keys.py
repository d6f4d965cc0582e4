"""What besides its tokens makes a block's content: adapter, images, salt.

The order of the parts and their spelling are vLLM 0.32's, so that equal prompts get equal keys in both
(`tests/data/vllm_hashes.json` holds its own answers). Units: tokens.
"""

from dataclasses import dataclass


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
