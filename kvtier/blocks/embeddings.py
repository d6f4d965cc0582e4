"""Prompt embeddings: rows that take the place of token ids, named by their bytes.

Always: the digest of a range of rows is made once per request, however often its block is named. The caller must not
write to the rows meanwhile. Rows may be a numpy array or a torch tensor of any element type (bfloat16 included), on any
device; the same numbers in another element type are other bytes, hence other keys.
"""

import hashlib
from typing import Any

from kvtier.errors import UsageError


class PromptEmbeddings:
    """One request's embeddings, [tokens, hidden size]. Equal only to itself."""

    __slots__ = ("_digests", "_rows")

    def __init__(self, rows: Any) -> None:
        """Raises UsageError for anything but a two-dimensional array or tensor of numbers."""
        if not _is_tensor(rows) and not _is_array(rows):
            raise UsageError(f"prompt embeddings are a {type(rows).__name__}; pass a numpy array or a torch tensor")
        if len(rows.shape) != 2:
            raise UsageError(f"prompt embeddings of shape {tuple(rows.shape)}; pass [tokens, hidden size]")
        self._rows = rows
        self._digests: dict[tuple[int, int], bytes] = {}

    def __repr__(self) -> str:
        return f"PromptEmbeddings({self._rows.dtype}, {tuple(self._rows.shape)})"

    def digest(self, start: int, end: int) -> bytes:
        """SHA-256 of rows [start, end), or of those that exist: of nothing behind the last one."""
        known = self._digests.get((start, end))
        if known is None:
            known = self._digests[start, end] = hashlib.sha256(_bytes_of(self._rows[start:end])).digest()
        return known


def _bytes_of(rows: Any) -> Any:
    """The rows in memory order, little-endian, as something that can be hashed."""
    if _is_tensor(rows):
        import torch

        return rows.detach().contiguous().flatten().cpu().view(torch.uint8).numpy()
    return rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes()


def _is_tensor(rows: Any) -> bool:
    return type(rows).__module__.partition(".")[0] == "torch" and hasattr(rows, "detach")


def _is_array(rows: Any) -> bool:
    # kind V: element types that numpy does not know itself, such as the bfloat16 of ml_dtypes
    return (
        hasattr(rows, "tobytes") and hasattr(rows, "shape") and rows.dtype.kind in "fuiV" and not rows.dtype.hasobject
    )
