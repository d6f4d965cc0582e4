"""Part `dlpack`: `cache.kv()` in torch's hands, over a range of which only a part has memory.

Owns no state. Finds: a tensor that is a copy, or of another shape; bytes that torch writes and the tier does not hold;
a tensor made before a `resize` that does not reach the memory that was mapped by it.
"""

from typing import Any

import numpy as np

from kvtier.config import load_config
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.serving import Serving, model_of
from kvtier.testing.gpu_check.torch_cuda import torch_on

GROWTH = 4  # times: three quarters of the range have no memory at first
BLOCKS = 8


def measure(card: Card, record: Record) -> None:
    torch = torch_on(card)
    granule_bytes = card.driver.granule_bytes
    small = -(-(BLOCKS + 2) * _block_bytes(card) // granule_bytes) * granule_bytes
    tier = {"type": "gpu", "device": f"cuda:{card.number}", "capacity": small, "capacity_max": GROWTH * small}
    config = load_config({"model": model_of(card, 1), "tiers": [tier]}, environ={})
    with Serving(card, config) as serving:
        view = serving.cache.kv(0, 0)["k"]
        tensor = torch.from_dlpack(view)
        record.measured("view", str(tuple(tensor.shape)))
        record.measured("of which has memory", small // serving.stride_bytes, "slots")
        record.expect(tuple(tensor.shape) == tuple(view.shape), f"torch sees the shape {tuple(tensor.shape)}")
        record.expect(tensor.data_ptr() == serving.address, "torch has a copy, not the tier's memory")
        before = _written(torch, serving, tensor, 1)
        record.expect(before, "what torch writes into a slot is not what the tier holds")
        serving.cache.resize("gpu", GROWTH * small)
        won = (GROWTH - 1) * small // serving.stride_bytes - 2  # more than were free before
        record.expect(_written(torch, serving, tensor, 2, won), "a tensor does not reach what was mapped after it")


def _block_bytes(card: Card) -> int:
    model = model_of(card, 1)
    return int(2 * model["block_tokens"] * model["kv_heads"] * model["head_dim"] * 2)


def _written(torch: Any, serving: Serving, tensor: Any, seed: int, blocks: int = BLOCKS) -> bool:
    """Write leased slots with torch, through the tensor, and compare by copies of our own."""
    cuda, card = torch.cuda, serving.card
    stream = cuda.ExternalStream(card.stream.key)
    keys = serving.prompt(seed, blocks)
    equal = True
    with serving.leased(keys) as lease:
        for slot in lease.slots():
            wanted = np.random.default_rng(slot).standard_normal(tensor.shape[1:]).astype(np.float16)
            with cuda.stream(stream):
                tensor[slot] = torch.from_numpy(wanted).to(tensor.device)
            stream.synchronize()
            found = np.empty_like(wanted)
            card.get(serving.address + slot * serving.stride_bytes, found)
            equal &= np.array_equal(found, wanted)
    return equal
