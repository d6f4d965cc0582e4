"""Whether torch can use the card. Owns nothing; torch is imported when a part asks."""

from typing import Any

from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.record import Skip


def torch_on(card: Card) -> Any:
    """The module, with the card as its current device. Raises Skip with what is missing."""
    try:
        import torch
    except ImportError:
        raise Skip("needs torch with CUDA, and torch is not installed") from None
    if not torch.cuda.is_available():
        raise Skip(f"needs torch with CUDA, and torch {torch.__version__} finds no device")
    torch.cuda.set_device(card.number)
    return torch
