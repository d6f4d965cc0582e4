"""Part `sequence_views`: torch's own attention over contiguous ranges that share a physical block.

Owns no state. Finds: a view over a partly mapped range that torch refuses or misreads; attention through an alias that
is further from float64 than half precision explains. Tokens lie one after the other, each K then V: `token_major`.
"""

from contextlib import ExitStack
from typing import Any

from kvtier.allocator.driver import Range
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.torch_cuda import torch_on

HEADS, HEAD_DIM = 8, 128
TOKEN_VALUES = 2 * HEADS * HEAD_DIM
RESERVED_GRANULES = 64
ERROR_MAX = 5e-3


def measure(card: Card, record: Record) -> None:
    torch = torch_on(card)
    size = card.driver.granule_bytes
    with ExitStack() as undo:
        prefix = card.driver.create(size)
        undo.callback(card.driver.release, prefix)
        ranges = [_sequence(card, undo, prefix) for _ in range(2)]
        undo.callback(torch.cuda.synchronize)
        tokens = size // (TOKEN_VALUES * 2)
        views = [_view(torch, card, addresses) for addresses in ranges]
        for view in views:
            view[: 2 * tokens].normal_()
        torch.cuda.synchronize()
        same = torch.equal(views[0][:tokens], views[1][:tokens])
        record.expect(bool(same), "two sequences see different bytes in the block that they share")
        differ = not torch.equal(views[0][tokens : 2 * tokens], views[1][tokens : 2 * tokens])
        record.expect(differ, "two sequences see the same bytes in blocks of their own")
        error = max(_error(torch, view[: 2 * tokens]) for view in views)
        record.measured("relative error of float16 attention", error)
        record.expect(error <= ERROR_MAX, f"relative error {error:.1e}, at most {ERROR_MAX:.0e}")
        record.measured("tokens, of which half are shared", 2 * tokens)
        del views, view


def _sequence(card: Card, undo: ExitStack, prefix: Any) -> Range:
    """The shared granule, one of its own, and a range that has no memory behind them."""
    driver, size = card.driver, card.driver.granule_bytes
    addresses = driver.reserve(RESERVED_GRANULES * size)
    undo.callback(driver.free_range, addresses)
    own = driver.create(size)
    undo.callback(driver.release, own)
    for place, handle in ((0, prefix), (size, own)):
        driver.map(addresses, place, handle)
        undo.callback(driver.unmap, addresses, place, size)
    driver.set_access(addresses, 0, 2 * size, write=True)
    return addresses


def _view(torch: Any, card: Card, addresses: Range) -> Any:
    """A float16 tensor [tokens, 2, heads, head_dim] over the whole range, mapped or not."""
    memory = card.driver.view(addresses)
    return torch.from_dlpack(memory.view("float16").reshape(-1, 2, HEADS, HEAD_DIM))


def _error(torch: Any, rows: Any) -> float:
    """Of attention through the view, against the same in float64 over a copy."""
    attend = torch.nn.functional.scaled_dot_product_attention
    asked = torch.randn(1, HEADS, 1, HEAD_DIM, device=rows.device, dtype=rows.dtype)
    found = attend(asked, *(rows[:, part].permute(1, 0, 2)[None] for part in (0, 1))).double()
    copy = rows.double()
    wanted = attend(asked.double(), *(copy[:, part].permute(1, 0, 2)[None] for part in (0, 1)))
    return float((found - wanted).norm() / wanted.norm())
