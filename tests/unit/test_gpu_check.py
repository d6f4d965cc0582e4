"""The check for cards, on the fake libcuda: what it finds when all is well, and its processes."""

import json
import pathlib
import sys
from dataclasses import replace

import pytest

from kvtier.kernels.launch_device import Images
from kvtier.testing.gpu_check import parts
from kvtier.testing.gpu_check.child import run_in_child
from kvtier.testing.gpu_check.parts import PARTS, run_here
from kvtier.testing.gpu_check.record import Record
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.gpu_check_card import DEVICE_BYTES, ELSEWHERE, HERE, TINY, card, device, emulator, images, plain

__all__ = ["card", "device", "emulator", "fake_cuda", "images", "plain"]
pytestmark = pytest.mark.timeout(100)


@pytest.mark.parametrize("part", HERE)
def test_a_part_finds_nothing_wrong(part: str, device: FakeCuda, images: Images) -> None:
    """A part fails on a device that does all it should, or leaves something behind on it."""
    record = run_here(part, 0, TINY, images)
    assert record.findings == []
    assert record.skipped is None
    assert record.figures
    assert device.report == ""
    assert device.used_bytes == 0
    assert device.calls("cuModuleUnload") == device.calls("cuModuleLoadData")


@pytest.mark.parametrize("part", ELSEWHERE)
def test_what_cannot_be_done_is_skipped_with_its_reason(part: str, plain: FakeCuda, images: Images) -> None:
    """A part that needs torch or graphs passes where there are none: it is said to be proven."""
    record = run_here(part, 0, TINY, images)
    assert record.skipped is not None
    assert record.skipped.startswith(ELSEWHERE[part])
    assert (record.figures, record.aims, record.ok) == ([], {}, True)


def test_who_was_asked_is_said(plain: FakeCuda, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch nothing is compared, or a figure names an oracle that was not asked."""
    record = run_here("attention", 0, TINY, images)
    assert record.notes == ["compared with torch's scaled_dot_product_attention, float64"]
    monkeypatch.setitem(sys.modules, "torch", None)
    record = run_here("attention", 0, TINY, images)
    assert record.notes == ["compared with numpy, float64 (torch is not installed)"]
    assert record.ok


def test_too_small_a_device_is_no_finding(plain: FakeCuda, images: Images) -> None:
    """A card with little memory left is called broken, or a figure is taken with other sizes than it says."""
    record = run_here("resize", 0, replace(TINY, resize_bytes=DEVICE_BYTES), images)
    assert record.ok
    assert record.skipped is not None
    assert "bytes, and the device has" in record.skipped
    assert record.aims == {}


def test_read_only_mappings_are_tried_in_another_process(plain: FakeCuda, images: Images) -> None:
    """Whether a write through an alias is refused stays unknown, or the answer takes the context with it."""
    record = run_here("aliases", 0, TINY, images)
    told = {figure.name: figure.value for figure in record.figures}
    assert told["read-only mappings"] is True
    assert "DeviceLost" in str(told["a copy through a read-only alias"]) or "700" in str(
        told["a copy through a read-only alias"]
    )
    assert len(record.notes) == 1  # the fake takes no cubins, so a kernel could not try it: said, not passed
    assert "by a kernel was not tried" in record.notes[0]


def test_a_device_without_read_only_mappings_is_told(plain: FakeCuda, images: Images) -> None:
    """A device that has no such thing counts as one whose aliases are safe."""
    plain.configure(DEVICE_BYTES, GRANULE_BYTES, read_only=False)
    record = run_here("aliases", 0, TINY, images)
    assert record.ok
    assert "writable through every range" in record.notes[0]
    assert [figure.value for figure in record.figures if figure.name == "read-only mappings"] == [False]


def test_each_part_has_a_process_of_its_own(plain: FakeCuda) -> None:
    """A part's record is lost between processes, or a child cannot find the device."""
    record = run_in_child("graphs", 0, "quick", 60)
    assert (record.part, record.findings, record.skipped) == ("graphs", [], "this driver has no CUDA graphs")


def test_a_child_that_hangs_or_dies_is_a_finding(plain: FakeCuda) -> None:
    """A hung kernel hangs the check, or a crash is taken for success."""
    assert run_in_child("vmm", 0, "quick", 0.001).findings == ["no end after 0 s: killed"]
    (finding,) = run_in_child("vmm", 0, "no such scale", 60).findings
    assert finding.startswith("its process ended with 1 and no record: ")
    assert "KeyError: 'no such scale'" in finding


def test_a_record_survives_json() -> None:
    """What a child found is not what the report says."""
    record = Record("vmm", findings=["bad"], notes=["n"], aims={"a": 1.5}, skipped=None, seconds=2.0)
    record.measured("speed", 123.456, "GB/s")
    record.measured("yes", True)
    assert Record.from_json(json.loads(json.dumps(record.as_json()))) == record
    assert record.figures[0].value == 123.5


def test_every_part_is_listed() -> None:
    """A part exists that nobody runs, or one is promised that does not exist, here or in the document."""
    folder = pathlib.Path(parts.__file__).parent
    assert {path.stem.removeprefix("part_") for path in folder.glob("part_*.py")} == set(PARTS)
    text = (pathlib.Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    section = text.partition("## Run the check on a card")[2]
    for part in PARTS:
        assert f"`{part}`" in section
