"""Random requests that share prefixes: variations of one text, repeats and continuations of earlier prompts."""

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.compat.oracle_pool import request_of

VOCABULARY = 1000
BASE_BLOCKS = 16
PROMPT_BLOCKS = 14
ADAPTERS = {"red": "/adapters/red", "blue": "/adapters/blue"}


class Prompts:
    """Draws what a request asks: {tokens, salt, lora, mm}."""

    def __init__(self, draw, block_tokens, tokens_max, identities):
        self.draw, self.block_tokens, self.identities = draw, block_tokens, identities
        self.prompt_max = min(PROMPT_BLOCKS * block_tokens, tokens_max - 4)
        self.base = self._tokens(BASE_BLOCKS * block_tokens)
        self.images = [["cat", 3, block_tokens], ["dog", max(2 * block_tokens + 1, block_tokens + 3), 2 * block_tokens]]
        self.earlier = []

    def next(self):
        chance = self.draw.random()
        if self.earlier and chance < 0.15:
            prompt = self.draw.choice(self.earlier)
        elif self.earlier and chance < 0.35:
            prompt = self._continued(self.draw.choice(self.earlier))
        else:
            prompt = self._varied()
        self.earlier.append(prompt)
        return prompt

    def _continued(self, prompt):
        more = self.draw.randrange(1, 4 * self.block_tokens)
        return prompt | {"tokens": (prompt["tokens"] + self._tokens(more))[: self.prompt_max]}

    def _varied(self):
        length = self.draw.randrange(1, self.prompt_max + 1)
        if self.draw.random() < 0.3:
            length += -length % self.block_tokens
        common = self.draw.randrange(length + 1)
        tokens = self.base[:common] + self._tokens(length - common)
        return {"tokens": tokens, "salt": None, "lora": None, "mm": []} | self._identity(length)

    def _identity(self, length):
        if not self.identities:
            return {}
        lora = self.draw.choice([None, None, None, *ADAPTERS])
        images = [image for image in self.images if image[1] + image[2] <= length]
        return {
            "salt": self.draw.choice([None, None, None, "s"]),
            "lora": lora and [lora, ADAPTERS[lora]],
            "mm": images[: self.draw.randrange(3)],
        }

    def _tokens(self, count):
        return [self.draw.randrange(VOCABULARY) for _ in range(count)]


def request_from(id, prompt, hash_tokens):
    """vLLM's request for what was drawn."""
    lora, number = prompt["lora"], {name: i for i, name in enumerate(ADAPTERS, 1)}
    return request_of(
        id,
        prompt["tokens"],
        hash_tokens,
        cache_salt=prompt["salt"],
        lora_request=lora and LoRARequest(lora_name=lora[0], lora_int_id=number[lora[0]], lora_path=lora[1]),
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for name, offset, length in prompt["mm"]
        ],
    )
