"""Where the slots of the fastest tier lie, and how tensors get out of them and into them.

Owns no bytes. Always: every call copies, so that nothing keeps looking at a slot that someone else may fill. On host
memory that is over when the call returns, and a model may lie anywhere: its KV passes through host memory. On a device
model and slots share it, copies run on the torch stream that the session was entered on, and `event` says when.
Shapes: a view of the slots is [slots, block_tokens, heads, dim], in any memory order; a row of K or V is
[tokens, heads, dim] on our side and [heads, tokens, dim] on that of transformers. numpy and CuPy have no bfloat16: its
bits travel as uint16.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

import kvtier
from kvtier.allocator import host_memory
from kvtier.errors import UsageError
from kvtier.integrations.transformers.tensors import copy_blocks, in_blocks


class Slots(Protocol):
    """What a session asks of them. commits_late: what was committed is found some time after `commit` has returned."""

    commits_late: bool

    def enter(self) -> None:
        """The session begins, on the calling thread's stream."""
        ...

    def working(self) -> AbstractContextManager[Any]:
        """Copies are made, and events recorded, inside of it only. Any thread."""
        ...

    def expect_stream(self) -> None:
        """The model is about to use what was restored. Raises UsageError on another stream than the session's."""
        ...

    def event(self) -> Any:
        """Behind all copies so far, for `commit` and `release`."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Where `gather` writes."""
        ...

    def gather(self, view: Any, slots: Sequence[int], row: torch.Tensor) -> None:
        """Copy the first tokens of the blocks in `slots`, in that order, into a [tokens, heads, dim] row."""
        ...

    def scatter(self, view: Any, slots: Sequence[int], row: torch.Tensor) -> None:
        """Copy a [heads, tokens, dim] row, wherever it lies, into whole `slots`, in that order."""
        ...

    def to_model(self, rows: torch.Tensor) -> torch.Tensor:
        """Of `empty`, to where the model is."""
        ...


def slots_of(cache: "kvtier.SyncCache", model: Any) -> Slots:
    """Those of an open cache. Raises UsageError if they lie on a device that the model is not on."""
    kind, _, number = str(getattr(cache.config.tiers[0], "device", "")).partition(":")
    if kind != "cuda":
        return HostSlots(model.device)
    device = torch.device("cuda", int(number or 0))
    if model.device != device:
        raise UsageError(
            f"the model is on {model.device}, and the cache's fastest tier on {device}; move the model there, "
            "or give that tier `device: host`: KV then passes through host memory, wherever the model is"
        )
    return CudaSlots(device)


class HostSlots:
    """Slots in host memory."""

    commits_late = False

    def __init__(self, model_device: torch.device) -> None:
        self._model_device = model_device

    def enter(self) -> None:
        pass

    def working(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def expect_stream(self) -> None:
        pass

    def event(self) -> None:
        return None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(tuple(shape), dtype=dtype)
        host_memory.populate_within(made.data_ptr(), made.nbytes)  # a quarter of the time that page faults take
        return made

    def gather(self, view: Any, slots: Sequence[int], row: torch.Tensor) -> None:
        copy_blocks(torch.from_numpy(view).view(row.dtype), slots, row)

    def scatter(self, view: Any, slots: Sequence[int], row: torch.Tensor) -> None:
        blocks = in_blocks(row.detach().cpu(), view.shape[1])
        if blocks.dtype == torch.bfloat16:
            blocks = blocks.contiguous().view(torch.uint16)
        view[list(slots)] = blocks.numpy()  # half the time of torch's index_copy_

    def to_model(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self._model_device)


class CudaSlots:
    """Slots in the memory of the CUDA device that the model is on."""

    commits_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def enter(self) -> None:
        self._stream = torch.cuda.current_stream(self._device)

    def working(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def expect_stream(self) -> None:
        if torch.cuda.current_stream(self._device) != self._stream:
            raise UsageError(
                "the model runs on another CUDA stream than the one on which the session was entered, where its prefix "
                "may still be on its way; enter the session inside the same torch.cuda.stream(...)"
            )

    def event(self) -> Any:
        make: Any = torch.cuda.Event  # it has no types
        event = make()
        event.record(self._stream)
        return event

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def gather(self, view: Any, slots: Sequence[int], row: torch.Tensor) -> None:
        copy_blocks(self._tensor(view, row.dtype), slots, row)

    def scatter(self, view: Any, slots: Sequence[int], row: torch.Tensor) -> None:
        index = torch.tensor(slots, dtype=torch.long, device=self._device)
        blocks = in_blocks(row.detach(), view.shape[1])
        self._tensor(view, row.dtype).index_copy_(0, index, blocks)

    def to_model(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def _tensor(self, view: Any, dtype: torch.dtype) -> torch.Tensor:
        """The slots themselves: CuPy's array, taken by DLPack on the stream of now."""
        blocks: torch.Tensor = from_dlpack(view)
        return blocks.view(dtype)
