"""Between memory tiers of different codecs: every block by itself, in pieces, and through the tiers' own verbs only."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvtier.blocks.coding import Codings
from kvtier.engine import recoding
from kvtier.engine.executor import carry_out
from kvtier.engine.recoding import Recoding
from kvtier.errors import DeviceLost, UsageError
from kvtier.kernels import quantize
from kvtier.tiers.gpu import GpuTier
from kvtier.tiers.host import HostTier
from kvtier.types import GroupSpec, Outcome, ReadItem, Status, StoreKey, Transfer, TransferBatch, block_key, store_key
from tests.kernels.bit_patterns import normal

GROUPS = [GroupSpec("full", (0,), 2, 64, "bfloat16", 16), GroupSpec("mla", (1,), 1, 96, "float32", 16)]
LENGTHS = (8192, 6144)  # of a block, by group


class Picky(GpuTier):
    """Refuses to read some places, and may lose its device."""

    refused: frozenset[int] = frozenset()
    lost = False

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        if self.lost:
            raise DeviceLost("gone")
        done = super().read(items)
        return [
            Outcome(Status.FAILED) if item.place in self.refused else end for item, end in zip(items, done, strict=True)
        ]


@pytest.fixture(params=["int8", "fp8"])
def codings(request: pytest.FixtureRequest) -> Codings:
    return Codings(request.param, GROUPS)


@pytest.fixture
def tiers(codings: Codings) -> Iterator[list[Any]]:
    gpu = Picky.create(name="gpu", capacity_bytes=1 << 20, length_bytes_max=max(LENGTHS))
    room_bytes_max = max(map(codings.room_bytes, LENGTHS))
    host = HostTier.create(
        name="host", capacity_bytes=1 << 20, length_bytes_max=room_bytes_max, hugepages="off", codec=codings.codec
    )
    yield [gpu, host]
    gpu.close()
    host.close()


def key_of(number: int, group: int) -> StoreKey:
    return store_key(0, block_key(number.to_bytes(32, "little"), group))


def group_at(number: int) -> int:
    """Every fifth block is of the second group."""
    return int(number % 5 == 4)


def transfer(number: int, source: int, target: int) -> Transfer:
    """Of block `number`."""
    group = group_at(number)
    return Transfer(number, key_of(number, group), source, 0, target, LENGTHS[group])


def rows_of(number: int) -> Any:
    group = GROUPS[group_at(number)]
    item_bytes = 4 if group.dtype == "float32" else 2
    bits = normal(np.random.default_rng(number), group.dtype, LENGTHS[group_at(number)] // item_bytes)
    rows = bits.reshape(-1, group.head_dim)
    return rows.view("float32") if group.dtype == "float32" else rows


def coded(number: int, codec: str) -> bytes:
    return quantize.encode(rows_of(number), GROUPS[group_at(number)].dtype, codec).tobytes()


def decoded(number: int, codec: str) -> bytes:
    rows, dtype = rows_of(number), GROUPS[group_at(number)].dtype
    back = quantize.decode(quantize.encode(rows, dtype, codec), dtype, *rows.shape, codec)
    return np.ascontiguousarray(back).tobytes()


def fill(gpu: GpuTier, numbers: Sequence[int]) -> None:
    for number in numbers:
        payload = rows_of(number).tobytes()
        gpu.slot(number + 1)[: len(payload)] = payload


def test_down_and_up(tiers: list[Any], codings: Codings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a batch change places, or bytes of the one before stay behind a shorter one."""
    monkeypatch.setattr(recoding, "SCRATCH_BYTES", 20_000)  # two blocks at once
    gpu, host = tiers
    work = Recoding(codings, max(LENGTHS))
    numbers = list(range(20))
    fill(gpu, numbers)
    for slot in range(host.traits.slots):
        host.slot(slot)[:] = b"\xee" * host.stride_bytes
    done = carry_out(tiers, TransferBatch(1, 0, 1, tuple(transfer(n, n + 1, 40 - n) for n in numbers)), recoding=work)
    assert done.outcomes == tuple(Outcome(Status.DONE, 40 - n) for n in numbers)
    for n in numbers:
        want = coded(n, codings.codec)
        assert bytes(host.slot(40 - n)) == want.ljust(host.stride_bytes, b"\0"), n
    done = carry_out(tiers, TransferBatch(2, 1, 0, tuple(transfer(n, 40 - n, n + 50) for n in numbers)), recoding=work)
    assert done.outcomes == tuple(Outcome(Status.DONE, n + 50) for n in numbers)
    for n in numbers:
        want = decoded(n, codings.codec)
        assert bytes(gpu.slot(n + 50)) == want.ljust(gpu.stride_bytes, b"\0"), n


def test_half_of_a_batch_fails(tiers: list[Any], codings: Codings) -> None:
    """One bad block takes its neighbours with it, or is reported as another."""
    gpu, host = tiers
    work = Recoding(codings, max(LENGTHS))
    fill(gpu, range(9))
    gpu.refused = frozenset({3, 5})  # one among four that are coded together, and one by itself
    batch = TransferBatch(1, 0, 1, tuple(transfer(n, n + 1, n) for n in range(9)))
    ends = carry_out(tiers, batch, recoding=work).outcomes
    assert [end.status is Status.DONE for end in ends] == [n not in (2, 4) for n in range(9)]
    host.slot(5)[0] ^= 0x40  # no codec
    host.slot(8)[12] ^= 0x01  # another length
    numbers = [n for n in range(9) if n not in (2, 4)]
    back = TransferBatch(2, 1, 0, tuple(transfer(n, n, n + 50) for n in numbers))
    ends = carry_out(tiers, back, recoding=work).outcomes
    assert [end.status for end in ends] == [Status.CORRUPT if n in (5, 8) else Status.DONE for n in numbers]
    for n in numbers:
        if n not in (5, 8):
            assert bytes(gpu.slot(n + 50)).rstrip(b"\0") == decoded(n, codings.codec).rstrip(b"\0")


def test_a_lost_device_is_said_of_all(tiers: list[Any], codings: Codings) -> None:
    """Blocks on a device that is gone are reported as copied."""
    tiers[0].lost = True
    batch = TransferBatch(1, 0, 1, tuple(transfer(n, n + 1, n) for n in range(3)))
    ends = carry_out(tiers, batch, recoding=Recoding(codings, max(LENGTHS))).outcomes
    assert [end.status for end in ends] == [Status.DEVICE_LOST] * 3


def test_a_group_that_the_model_has_not(tiers: list[Any], codings: Codings) -> None:
    """A strange key stops the worker, and all blocks of its batch."""
    gpu, _ = tiers
    work = Recoding(codings, max(LENGTHS))
    fill(gpu, range(2))
    strange = Transfer(9, key_of(9, 7), 1, 0, 9, LENGTHS[0])
    batch = TransferBatch(1, 0, 1, (transfer(0, 1, 0), strange, transfer(1, 2, 1)))
    ends = carry_out(tiers, batch, recoding=work).outcomes
    assert [end.status for end in ends] == [Status.DONE, Status.FAILED, Status.DONE]
    with pytest.raises(UsageError, match="no such group"):
        work.coded_bytes(strange)


def test_the_memory_that_a_device_should_know_of(codings: Codings) -> None:
    """A device copies to and from the scratch memory through buffers of its own, at a fraction of the speed."""
    memories = Recoding(codings, max(LENGTHS)).memories()
    assert len(memories) == 4
    assert all(address % 4096 == length_bytes % 4096 == 0 and length_bytes for address, length_bytes in memories)
    big = Recoding(codings, 32 << 20).memories()
    assert max(length_bytes for _, length_bytes in big) == 32 << 20, "a block larger than the usual scratch memory"
