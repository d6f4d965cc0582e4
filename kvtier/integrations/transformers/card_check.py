"""What the check for cards looks at in this integration: `generate()` through sessions, and the KV that they restore.

Owns no state. A small random Llama answers prompts alone, then through a session (cold), restored from host memory, and
restored from disk by a new cache. Finds: tokens that differ from those of the model alone, restored KV that differs by
a bit from what was kept, a prefix that is not restored, a session that had a problem.
It runs wherever torch does, also with model and slots in host memory; what it shows about a card it shows on one.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvtier
from kvtier.config import Config, load_config
from kvtier.integrations.transformers.identity import model_spec
from kvtier.integrations.transformers.session import PrefixSession
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.scale import MIB, Scale
from kvtier.types import page_aligned

BLOCK_TOKENS = 16
NEW_TOKENS = 8
VOCABULARY = 512
LAYERS, HEADS, HEAD_DIM = 4, 8, 64
BLOCK_BYTES = page_aligned(LAYERS * 2 * BLOCK_TOKENS * HEADS * HEAD_DIM * 4)
CAPACITY_UNIT_BYTES = 2 * MIB
Pasts = list[list[Any]]  # by prompt: K and V of each layer


@dataclass(frozen=True, slots=True)
class Place:
    """Where it runs. model: as torch names it; slots: as a configuration does. settle: waits for torch's work."""

    model: str
    slots: str
    settle: Callable[[], None]


def check(place: Place, scale: Scale, record: Record) -> None:
    """Serve the scale's prompts in all three ways, and compare."""
    model = _model(place)
    tokens = scale.prompt_blocks * BLOCK_TOKENS
    made = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, VOCABULARY, (1, tokens + 1), generator=made).to(place.model) for _ in range(scale.prompts)
    ]
    alone = [_generate(model, prompt) for prompt in prompts]
    with _configured(model, place, scale) as config:
        with kvtier.open_sync(config) as cache:
            desk = Desk(cache, model, place, record)
            cold = desk.serve(prompts, alone, "cold", 0)
            desk.compare(desk.serve(prompts, alone, "from host", tokens), cold, "from host")
        with kvtier.open_sync(config) as cache:
            desk = Desk(cache, model, place, record)
            desk.compare(desk.serve(prompts, alone, "from lmdb", tokens), cold, "from lmdb")


@dataclass(frozen=True, slots=True)
class Desk:
    """What one cache is asked."""

    cache: "kvtier.SyncCache"
    model: Any
    place: Place
    record: Record

    def serve(self, prompts: list[Any], alone: list[Any], when: str, tokens_wanted: int) -> Pasts:
        """Each prompt through a session. Returns the KV of what can be restored, as each session had it."""
        record, pasts, times_ms, from_below = self.record, [], [], 0
        for number, (prompt, answer) in enumerate(zip(prompts, alone, strict=True)):
            self.place.settle()
            start = time.perf_counter()
            with PrefixSession(self.cache, self.model, prompt) as session:
                self.place.settle()
                times_ms.append((time.perf_counter() - start) * 1e3)
                restored = session.tokens_restored
                from_below += restored - session.tokens_by_tier.get("gpu", 0)
                before = _kv(session.past, restored) if restored else []
                output = _generate(self.model, prompt, **session.generate_kwargs)
                pasts.append(before or _kv(session.past, prompt.shape[1] - 1))
            name = f"{when}, prompt {number}"
            record.expect(session.problem is None, f"{name}: {session.problem}")
            record.expect(restored == tokens_wanted, f"{name}: {restored} of {tokens_wanted} tokens were restored")
            record.expect(output.tolist() == answer.tolist(), f"{name}: other tokens than those of the model alone")
            self.cache.flush()
        record.expect(from_below > 0 or not tokens_wanted, f"{when}: nothing came from below the device")
        record.measured(f"entering a session, {when}", statistics.median(times_ms), "ms")
        record.measured(f"tokens that came from below, {when}", from_below)
        return pasts

    def compare(self, found: Pasts, cold: Pasts, when: str) -> None:
        same = sum(len(f) == len(c) and all(map(torch.equal, f, c)) for f, c in zip(found, cold, strict=True))
        differ = len(cold) - same
        self.record.expect(not differ, f"{when}: the KV of {differ} of {len(cold)} prompts is not what was kept")
        self.record.measured(f"prompts whose KV is bit for bit what was kept, {when}", f"{same} of {len(cold)}")


def _kv(past: Any, columns: int) -> list[Any]:
    return [part[:, :, :columns].clone() for k, v, _ in past for part in (k, v)]


def _generate(model: Any, prompt: Any, **options: Any) -> Any:
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def _model(place: Place) -> Any:
    """Random weights, of which a wide range makes different KV give different tokens."""
    torch.manual_seed(11)
    model: Any = LlamaForCausalLM  # `to` has types that nothing satisfies
    settings = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        pad_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    return model(settings).to(place.model).eval()


@contextmanager
def _configured(model: Any, place: Place, scale: Scale) -> Iterator[Config]:
    """The slots hold a third of all prompts' blocks, host memory and disk all of them."""
    blocks = scale.prompts * (scale.prompt_blocks + NEW_TOKENS // BLOCK_TOKENS + 1)
    slots = max(blocks // 3, scale.prompt_blocks + 2) + 2
    capacity_bytes = -(-slots * BLOCK_BYTES // CAPACITY_UNIT_BYTES) * CAPACITY_UNIT_BYTES
    below_bytes = 2 * blocks * BLOCK_BYTES + CAPACITY_UNIT_BYTES
    with tempfile.TemporaryDirectory(prefix="kvtier-gpu-check-") as folder:
        unsynced = {"durability": "none"}  # nothing outlives the check
        tiers = [
            {"type": "gpu", "device": place.slots, "capacity": capacity_bytes},
            {"type": "host", "capacity": below_bytes, "hugepages": "off"},
            {"type": "lmdb", "capacity": below_bytes + 64 * MIB, "path": str(Path(folder) / "store")} | unsynced,
        ]
        section = model_spec(model, name="gpu-check", weights_epoch="v1", block_tokens=BLOCK_TOKENS)
        limits = {"governor": False, "load_deadline": "60s"}  # all of it shall be restored, however slow that is
        yield load_config({"model": section, "tiers": tiers, "limits": limits}, environ={})
