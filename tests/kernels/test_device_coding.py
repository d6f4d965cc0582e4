"""Coding on a device, by its own kernels on the fake driver: the CPU's bytes, in order, and nothing left behind."""

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.blocks.coding import Coding, Codings
from kvtier.errors import ConfigError, InvariantError
from kvtier.kernels import quantize
from kvtier.kernels.launch import DevicePool
from kvtier.kernels.source import Variant
from kvtier.tiers import device_coding
from kvtier.tiers.base import SupportsCoding
from kvtier.tiers.cuda import CudaTier
from kvtier.tiers.device_coding import DeviceCoding
from kvtier.types import (
    EvictItem,
    GroupSpec,
    ModelSpec,
    Outcome,
    ReadItem,
    Status,
    StoreKey,
    WriteBatch,
    WriteItem,
    block_key,
    store_key,
)
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.kernels.bit_patterns import normal, specials
from tests.kernels.emulated import Emulator

__all__ = ["fake_cuda"]
GROUPS = (GroupSpec("full", (0, 1), 2, 64, "bfloat16", 16), GroupSpec("mla", (*range(2, 10),), 1, 96, "float32", 16))
LENGTHS = (16_384, 49_152)  # of a block, by group
MODEL = ModelSpec("m", "v1", GROUPS)


@pytest.fixture(params=["int8", "fp8"])
def codings(request: pytest.FixtureRequest) -> Codings:
    return Codings.of(request.param, MODEL)


@pytest.fixture
def tier(
    emulator: Emulator, fake_cuda: FakeCuda, codings: Codings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CudaTier]:
    monkeypatch.setattr(device_coding, "SCRATCH_BYTES", 20_000)  # two blocks of the first group at once
    monkeypatch.setattr(device_coding, "images_for", lambda architecture: images(emulator))
    fake_cuda.configure(1024 * GRANULE_BYTES, GRANULE_BYTES)
    tier = CudaTier.create(name="gpu", device=0, capacity_bytes=4 << 20, length_bytes_max=max(LENGTHS))
    assert isinstance(tier, SupportsCoding)
    assert tier.code(codings) == ""
    yield tier
    tier.close()
    assert fake_cuda.report == ""
    assert fake_cuda.calls("cuModuleUnload") == fake_cuda.calls("cuModuleLoadData") == 2


def images(emulator: Emulator) -> Any:
    def image(variant: Variant) -> bytes:
        return emulator.path(variant).read_bytes()

    return image


def group_at(number: int) -> int:
    return int(number % 5 == 4)


def key_of(number: int) -> StoreKey:
    return store_key(0, block_key(number.to_bytes(32, "little"), group_at(number)))


def rows_of(number: int) -> Any:
    group = GROUPS[group_at(number)]
    item_bytes = 4 if group.dtype == "float32" else 2
    bits = normal(np.random.default_rng(number), group.dtype, LENGTHS[group_at(number)] // item_bytes)
    bits[-len(specials(group.dtype)) :] = specials(group.dtype)
    rows = bits.reshape(-1, group.head_dim)
    return rows.view("float32") if group.dtype == "float32" else rows


def coded_of(number: int, codec: str) -> bytes:
    with np.errstate(invalid="ignore"):
        return quantize.encode(rows_of(number), GROUPS[group_at(number)].dtype, codec).tobytes()


def decoded_of(number: int, codec: str) -> bytes:
    rows, dtype = rows_of(number), GROUPS[group_at(number)].dtype
    coded = np.frombuffer(coded_of(number, codec), np.uint8)
    return np.ascontiguousarray(quantize.decode(coded, dtype, *rows.shape, codec)).tobytes()


def address(tier: CudaTier, slot: int) -> int:
    return int(tier._arena.address) + slot * tier.stride_bytes


def page_buffer(content: bytes = b"") -> memoryview:
    view = memoryview(mmap.mmap(-1, 13 * 4096))
    view[:] = b"\xee" * len(view)
    view[: len(content)] = content
    return view


def test_blocks_are_coded_and_decoded_where_they_lie(tier: CudaTier, codings: Codings) -> None:
    """The device keeps other bytes than the CPU would, or blocks of a batch change places."""
    codec, numbers = codings.codec, list(range(12))
    for number in numbers:
        payload = rows_of(number).tobytes()
        ctypes.memmove(address(tier, number + 1), payload, len(payload))
    reads = [ReadItem(key_of(n), n + 1, 0, len(coded_of(n, codec)), page_buffer(), codec) for n in numbers]
    assert tier.read(reads) == [Outcome(Status.DONE)] * len(numbers)
    for number, item in zip(numbers, reads, strict=True):
        assert bytes(item.into) == coded_of(number, codec).ljust(len(item.into), b"\0"), number
    items = [
        WriteItem(item.key, item.length_bytes, item.into, 40 - n, codec) for n, item in zip(numbers, reads, strict=True)
    ]
    batch = WriteBatch(items, [EvictItem(key_of(1), 1, 0)])
    assert tier.write(batch) == [Outcome(Status.DONE, 40 - n) for n in numbers] + [Outcome(Status.DONE)]
    for number in numbers:
        want = decoded_of(number, codec)
        assert ctypes.string_at(address(tier, 40 - number), len(want)) == want, number


def test_copies_wait_for_their_kernel(tier: CudaTier, codings: Codings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device reads what its kernel is still writing, as a copy of settled sources may; or one lane uses another's."""
    assert tier._coding is not None
    copies: list[tuple[list[int], bool]] = []
    streams = tier._coding._streams

    class Listening:
        def __getattr__(self, name: str) -> Any:
            return getattr(streams, name)

        def copy(self, targets: Any, sources: Any, lengths: Any, stream: Any, *, settled: bool) -> None:
            copies.append((sources.tolist(), settled))
            streams.copy(targets, sources, lengths, stream, settled=settled)

    monkeypatch.setattr(tier._coding, "_streams", Listening())
    item = ReadItem(key_of(0), 1, 0, len(coded_of(0, codings.codec)), page_buffer(), codings.codec)
    tier.read([item])
    tier.write(WriteBatch([WriteItem(item.key, item.length_bytes, item.into, 2, codings.codec)]))
    down, up = tier._coding._lanes
    end = up.coded + tier._coding._coded_bytes
    from_device = [(sources, settled) for sources, settled in copies if down.tables <= min(sources) < end]
    assert from_device == [([down.coded], False), ([up.table(2)], False)]
    assert up.tables >= down.coded + tier._coding._coded_bytes


@pytest.mark.parametrize("rows", [1, 16, 31, 48, 100, 127, 128, 4096])
def test_blocks_are_cut_into_equal_parts(rows: int) -> None:
    """The last rows of a block are not coded, or those of the next one are."""
    raw_bytes = rows * 128
    cut = device_coding._Cut.of(Coding("int8", "bfloat16", 64), raw_bytes, DevicePool(1 << 20, 1 << 20))
    assert len(cut.records) * cut.fragment_bytes == raw_bytes
    assert cut.records[:, 2].tolist() == [at * cut.fragment_bytes for at in range(len(cut.records))]
    assert len(cut.records) == 1 or cut.fragment_bytes >= 16 * 128
    assert len(cut.records) > 1 or rows in (1, 16, 31, 127)


def test_a_block_that_is_none_is_corrupt(tier: CudaTier, codings: Codings) -> None:
    """Damaged codes in host memory become KV, or take their neighbours with them."""
    codec = codings.codec
    views = [page_buffer(coded_of(n, codec)) for n in range(4)]
    views[1][4] ^= 1
    views[2][0] ^= 0x40
    items = [WriteItem(key_of(n), len(coded_of(n, codec)), view, n + 1, codec) for n, view in enumerate(views)]
    ends = [outcome.status for outcome in tier.write(WriteBatch(items))]
    assert ends == [Status.DONE, Status.CORRUPT, Status.CORRUPT, Status.DONE]
    for number in (0, 3):
        want = decoded_of(number, codec)
        assert ctypes.string_at(address(tier, number + 1), len(want)) == want


def test_what_does_not_belong_is_refused_before_it_begins(tier: CudaTier, codings: Codings) -> None:
    """Memory outside of the slots is overwritten, or a block is coded in rows of another group."""
    codec = codings.codec
    length_bytes = len(coded_of(0, codec))
    good = ReadItem(key_of(0), 1, 0, length_bytes, page_buffer(), codec)
    for wrong in (
        ReadItem(key_of(0), 0, 0, length_bytes, page_buffer(), codec),
        ReadItem(key_of(0), 10_000, 0, length_bytes, page_buffer(), codec),
        ReadItem(key_of(0), 1, 0, length_bytes - 1, page_buffer(), codec),
        ReadItem(key_of(4), 1, 0, length_bytes, page_buffer(), codec),
        ReadItem(store_key(0, block_key(b"h", 9)), 1, 0, length_bytes, page_buffer(), codec),
        ReadItem(key_of(0), 1, 0, length_bytes, page_buffer(), "exp4"),
        ReadItem(key_of(0), 1, 0, length_bytes, page_buffer()[: length_bytes - 1], codec),
    ):
        with pytest.raises(InvariantError):
            tier.read([good, wrong])
        with pytest.raises(InvariantError):
            tier.write(WriteBatch([WriteItem(wrong.key, wrong.length_bytes, wrong.into, wrong.place, wrong.codec)]))
    assert bytes(good.into[:1]) == b"\xee", "nothing was copied"


def test_everything_is_given_back(emulator: Emulator, fake_cuda: FakeCuda, codings: Codings) -> None:
    """Scratch memory of a cache that was closed stays taken on the device; or a failed start leaves some behind."""
    fake_cuda.configure(1024 * GRANULE_BYTES, GRANULE_BYTES)
    driver = CudaDriver()
    pool = DevicePool(1 << 20, max(LENGTHS))

    def refuses(variant: Variant) -> bytes:
        raise ConfigError("device", "no compiler", "Install one")

    with pytest.raises(ConfigError):
        DeviceCoding(driver, pool, codings, refuses)
    assert driver.used_bytes == 0
    coding = DeviceCoding(driver, pool, codings, images(emulator))
    assert driver.used_bytes > device_coding.SCRATCH_BYTES
    coding.close()
    assert driver.used_bytes == 0
    assert fake_cuda.calls("cuModuleUnload") == fake_cuda.calls("cuModuleLoadData") == 2
    driver.close()
    assert fake_cuda.report == ""


def test_without_a_compiler_the_cpu_codes(
    fake_cuda: FakeCuda, codings: Codings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without NVRTC cannot have a codec at all, or nobody learns that the CPU does the work."""
    fake_cuda.configure(1024 * GRANULE_BYTES, GRANULE_BYTES)

    def none_for(architecture: str) -> Any:
        raise ConfigError("device", "NVRTC cannot be loaded", "Install it")

    monkeypatch.setattr(device_coding, "images_for", none_for)
    tier = CudaTier.create(name="gpu", device=0, capacity_bytes=1 << 20, length_bytes_max=max(LENGTHS))
    assert "NVRTC cannot be loaded" in tier.code(codings)
    item = ReadItem(key_of(0), 1, 0, 100, page_buffer(), codings.codec)
    with pytest.raises(InvariantError, match="not prepared to code"):
        tier.read([item])
    tier.close()
