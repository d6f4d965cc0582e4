"""TorchCopies: blocks between vLLM's tensors and the slots of kvtier's host slab, by torch's own indexing.

Always: a copy is whole when `begin` returns, on whatever device the tensors are. A slot is [rank][block of the chunk]
[layer]; see `Slab`. Units: bytes, vLLM's blocks, places (part p % parts of slot p // parts).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvtier.types import DONE, BatchDone


@dataclass(frozen=True)
class Slab:
    """One rank's part of kvtier's host slots. memory: all of them, int8; parts lie in each from `offset_bytes` on."""

    memory: torch.Tensor
    stride_bytes: int
    offset_bytes: int
    part_bytes: int
    parts: int


class TorchCopies:
    """`BlockCopies` for tensors [blocks, bytes of a layer]."""

    def __init__(self, layers: Sequence[torch.Tensor], slab: Slab) -> None:
        self._layers, self._slots = layers, list[torch.Tensor]()
        self._done: list[BatchDone] = []
        rows, offset = slab.memory.numel() // slab.stride_bytes, slab.offset_bytes
        for layer in layers:  # its part of every slot, [slots, blocks of a chunk, bytes]
            shape = (rows, slab.parts, layer.shape[1])
            self._slots.append(slab.memory.as_strided(shape, (slab.stride_bytes, slab.part_bytes, 1), offset))
            offset += layer.shape[1]
        self._parts = slab.parts

    def begin(self, move_id: int, kind: str, blocks: Sequence[int], places: Sequence[int]) -> None:
        ids, at = torch.tensor(blocks, dtype=torch.long), torch.tensor(places, dtype=torch.long)
        at_slots = at // self._parts, at % self._parts
        for layer, slots in zip(self._layers, self._slots, strict=True):
            if kind == "store":
                slots[at_slots] = layer[ids.to(layer.device)].to(slots.device)
            else:
                layer[ids.to(layer.device)] = slots[at_slots].to(layer.device)
        self._done.append(BatchDone(move_id, (DONE,) * len(blocks)))

    def finished(self) -> list[BatchDone]:
        done, self._done = self._done, []
        return done

    def join(self, move_ids: Iterable[int]) -> None:
        """Copies are whole already."""

    def close(self) -> None:
        """Nothing is under way."""
