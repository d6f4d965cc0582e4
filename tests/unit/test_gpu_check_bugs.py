"""The check for cards, on the fake libcuda: what it finds when something is not as it should be."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from kvtier.errors import CudaError
from kvtier.kernels.launch import DevicePool
from kvtier.kernels.launch_device import Images
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.parts import run_here
from kvtier.testing.gpu_check.reader import Reader
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.gpu_check_bugs import PLANTED
from tests.gpu_check_card import TINY, card, device, emulator, images, plain

__all__ = ["card", "device", "emulator", "fake_cuda", "images", "plain"]
pytestmark = pytest.mark.timeout(100)


@pytest.mark.parametrize(("part", "plant", "finding"), PLANTED, ids=lambda item: getattr(item, "__name__", None))
def test_a_planted_bug_is_found(
    part: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    finding: str,
    plain: FakeCuda,
    images: Images,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part passes whatever the device does: it checks nothing."""
    with monkeypatch.context() as planted:
        plant(planted)
        record = run_here(part, 0, TINY, images)
    assert not record.ok
    assert any(re.search(finding, text) for text in record.findings), record.findings


def test_a_reader_knows_right_bytes_from_wrong_ones(card: Card) -> None:
    """A reader reports right bytes as wrong, or wrong ones as right."""
    contents = np.ones((2, GRANULE_BYTES), np.uint8)
    with card.memory(contents.nbytes) as address:
        card.put(address, contents)
        pool = DevicePool(address, GRANULE_BYTES)
        with Reader(card, pool, [0, 1], contents) as reader:
            assert reader.is_running
        assert not reader.is_running
        assert reader.steps > 0
        assert reader.steps_wrong == 0
        contents[1, 5] = 2
        with Reader(card, pool, [0, 1], contents) as reader:
            pass
        assert reader.steps_wrong == reader.steps > 0


def test_a_reader_whose_device_fails_says_so(card: Card, plain: FakeCuda) -> None:
    """A reader that died long ago counts as one that nothing disturbed."""
    contents = np.ones((1, GRANULE_BYTES), np.uint8)
    with card.memory(contents.nbytes) as address:
        card.put(address, contents)
        reader = Reader(card, DevicePool(address, GRANULE_BYTES), [0], contents)
        with pytest.raises(CudaError, match="cuLaunchKernel"):
            read_until_it_fails(reader, plain)


def read_until_it_fails(reader: Reader, fake: FakeCuda) -> None:
    with reader:
        fake.fault("cuLaunchKernel", 1)
        while reader.is_running:
            pass


@pytest.mark.parametrize("part", ["vmm", "resize"])
def test_nothing_that_a_reader_reads_is_touched(
    part: str, plain: FakeCuda, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself writes or unmaps under its own reader: on a card it would find what it made."""
    submit = Reader._submit

    def announced(self: Reader, step: int) -> None:
        for slot in self._slots.tolist():
            plain.launch_touches(self._pool.address + slot * self._pool.stride_bytes, self._length_bytes, writes=False)
        submit(self, step)

    monkeypatch.setattr(Reader, "_submit", announced)
    assert run_here(part, 0, TINY, images).findings == []
    assert plain.report == ""


def test_an_error_of_the_device_costs_one_part(plain: FakeCuda, images: Images) -> None:
    """One refused call ends the whole check, or leaves the device held."""
    plain.fault("cuMemHostRegister_v2", 1)
    first, second = (run_here("copies", 0, TINY, images) for _ in range(2))
    assert any("cuMemHostRegister: CUDA_ERROR_INVALID_VALUE" in text for text in first.findings), first.findings
    assert second.ok


def test_a_lost_device_is_a_finding_and_all_is_let_go(plain: FakeCuda, images: Images) -> None:
    """A kernel that goes astray ends in a traceback, or the context is held for ever."""
    plain.fault("cuLaunchKernel", 700)
    record = run_here("attention", 0, TINY, images)
    assert record.findings
    assert plain.context_owners == 0
