"""Rules: what holds for all groups of a model alike. Owns nothing; frozen. Units: tokens."""

from dataclasses import dataclass

from kvtier.cache.request import Request


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for all groups of a model.

    hash_tokens: per hash. step_tokens: the least common multiple of all block sizes. align_tokens: a hit's length is a
    multiple of it. retention_tokens: groups that need few of the blocks before a hit keep what a hit at each multiple
    needs; None: at each `align_tokens`; 0: at none but the ends of prompts. drafting: the engine uses EAGLE or the
    like. drafts: some group drops the last block of a hit for it.
    """

    hash_tokens: int
    step_tokens: int
    align_tokens: int
    tokens_max: int
    tokens_in_flight: int
    retention_tokens: int | None = None
    drafting: bool = False
    drafts: bool = False
    caching: bool = True

    def resume_positions(self, request: Request) -> list[int]:
        """Where a later request with this prompt, or with a longer one, can begin."""
        prompt, step = request.prompt_tokens, self.step_tokens
        ends = [prompt - 1]
        if self.drafts:
            ends = [max((prompt - 1) // step * step - step, 0), max(prompt // step * step - step, 0)]
        return [*ends, request.shared_prefix_tokens] if request.shared_prefix_tokens else ends
