"""What encoders may compute in a step and keep in their cache, from the limits of model and scheduler.

Owns no state; all records are frozen. Always: the largest item that the model takes fits into one step and into the
cache, whatever the limits say. Equal to vLLM 0.32's compute_mm_encoder_budget and MultiModalBudget.
Units:   embeddings, tokens, items, requests. A budget counts a token of an item as one embedding: the most it can be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from kvtier.cache.counts import expect_count, expect_flag
from kvtier.cache.encoder_items import EncoderItem, expect_items
from kvtier.errors import UsageError


@dataclass(frozen=True, slots=True)
class Modality:
    """What a model says of its images, or sounds...: the largest item, and how many a prompt may have.

    items_max 0: prompts bring embeddings that were computed elsewhere. They need the cache and no encoder.
    """

    item_tokens_max: int
    items_max: int

    def __post_init__(self) -> None:
        """Raises UsageError for numbers that are no counts."""
        expect_count("item_tokens_max", self.item_tokens_max, 0)
        expect_count("items_max", self.items_max, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLimits:
    """What the scheduler says.

    encode_embeddings_max, cache_embeddings_max: per step, and kept; less than the largest item is raised to it.
    step_tokens_max: tokens of all requests in a step. prompt_tokens_max: of one request with its answer.
    split_items: whether the tokens of one item may be computed in several steps; chunked_prefill: those of a prompt.
    """

    encode_embeddings_max: int
    cache_embeddings_max: int
    step_tokens_max: int
    prompt_tokens_max: int
    requests_max: int
    split_items: bool = True
    chunked_prefill: bool = True

    def __post_init__(self) -> None:
        """Raises UsageError for numbers that are no counts."""
        for name in (
            "encode_embeddings_max",
            "cache_embeddings_max",
            "step_tokens_max",
            "prompt_tokens_max",
            "requests_max",
        ):
            expect_count(name, getattr(self, name), 1)
        expect_flag("split_items", self.split_items)
        expect_flag("chunked_prefill", self.chunked_prefill)


@dataclass(frozen=True, slots=True)
class EncoderBudget:
    """compute_embeddings: for one step. cache_embeddings: the capacity of the cache; both 0 without any modality.

    items_per_prompt, items_per_batch: the most that the encoder can be given at once, by modality; those without an
    encoder are left out.
    """

    compute_embeddings: int
    cache_embeddings: int
    items_per_prompt: Mapping[str, int]
    items_per_batch: Mapping[str, int]

    @classmethod
    def of(cls, modalities: Mapping[str, Modality], limits: EncoderLimits) -> Self:
        """Raises UsageError if items may not be split and the largest is longer than a step, and for other types."""
        if not isinstance(limits, EncoderLimits):
            raise UsageError(f"limits is {limits!r}; pass EncoderLimits")
        if not isinstance(modalities, Mapping) or not all(isinstance(one, Modality) for one in modalities.values()):
            raise UsageError(f"modalities is {modalities!r}; pass a mapping of names to Modality")
        if not modalities:
            return cls(0, 0, {}, {})
        largest = max(modalities, key=lambda name: modalities[name].item_tokens_max)
        tokens_max = modalities[largest].item_tokens_max
        if not limits.split_items and tokens_max > limits.step_tokens_max:
            text = f"a {largest} takes up to {tokens_max} tokens and may not be split, a step has"
            raise UsageError(f"{text} {limits.step_tokens_max}; raise step_tokens_max, or set split_items")
        compute_embeddings = max(limits.encode_embeddings_max, tokens_max)
        cache_embeddings = max(limits.cache_embeddings_max, tokens_max)
        at_once = min(compute_embeddings, cache_embeddings)
        items = {name: _items(one, limits, at_once) for name, one in modalities.items() if one.items_max > 0}
        per_prompt = {name: prompt for name, (prompt, _) in items.items()}
        per_batch = {name: batch for name, (_, batch) in items.items()}
        return cls(compute_embeddings, cache_embeddings, per_prompt, per_batch)

    def admit(self, items: Sequence[EncoderItem]) -> None:
        """Raises UsageError if a prompt has an item that never fits, and would so wait for ever."""
        expect_items(items)
        for item in items:
            for embeddings, what in ((self.compute_embeddings, "a step"), (self.cache_embeddings, "a cache")):
                if item.embeddings > embeddings:
                    text = f"{item.embeddings} embeddings never fit in {what} of {embeddings}"
                    raise UsageError(f"item {item.identifier!r}: {text}; send a smaller item, or raise the limit")


def _items(modality: Modality, limits: EncoderLimits, at_once: int) -> tuple[int, int]:
    """The most items per prompt and per batch, if a step encodes `at_once` embeddings."""
    tokens_max = modality.item_tokens_max
    if tokens_max == 0:
        return 0, 0
    per_prompt = max(1, min(modality.items_max, limits.prompt_tokens_max // tokens_max))
    requests = limits.requests_max
    if not limits.chunked_prefill:  # then a step takes whole prompts only
        requests = min(requests, limits.step_tokens_max // tokens_max)
    return per_prompt, max(1, min(at_once // tokens_max, requests * per_prompt))
