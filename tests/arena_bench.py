"""Arenas for tests, on every driver, and what lies in their slots."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.driver_memfd import MemfdDriver
from kvtier.allocator.vmm import Arena
from kvtier.testing.drivers import CopyingDriver, peek, poke
from tests.fakecuda.fake import FakeCuda, fake_cuda, load

__all__ = ["fake_cuda"]
PAGE = 4096
CAPACITY_PAGES = 12


@pytest.fixture(params=["memfd", "cuda"])
def driver(request: pytest.FixtureRequest) -> Iterator[CopyingDriver]:
    if request.param == "memfd":
        driver: CopyingDriver = MemfdDriver(CAPACITY_PAGES * PAGE, PAGE)
    else:
        request.getfixturevalue("fake_cuda").configure(CAPACITY_PAGES * PAGE, PAGE, strict=True)
        driver = CudaDriver()
    yield driver
    driver.close()


def arena_on(driver: object, stride_pages: int = 1, slots: int = 8) -> Arena:
    return Arena(driver, stride_bytes=stride_pages * PAGE, slots_reserved=slots)  # type: ignore[arg-type]


def write(arena: Arena, driver: CopyingDriver, value: int, *slots: int) -> None:
    """Fill slots with a byte."""
    stride_bytes = arena.geometry.stride_bytes
    for slot in slots:
        poke(driver, arena.address + slot * stride_bytes, value, stride_bytes)


def content(arena: Arena, driver: CopyingDriver, *slots: int) -> set[int]:
    """All bytes that occur in slots."""
    stride_bytes = arena.geometry.stride_bytes
    return {
        byte for slot in slots for byte in np.unique(peek(driver, arena.address + slot * stride_bytes, stride_bytes))
    }


def machine_bytes(driver: CopyingDriver) -> int:
    """Physical memory by the account of the kernel, or of the device."""
    if isinstance(driver, MemfdDriver):
        return os.fstat(driver.fd).st_blocks * 512
    fake = load()
    assert isinstance(fake, FakeCuda)
    return fake.used_bytes
