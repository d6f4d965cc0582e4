"""The parts of the check that a fake device cannot carry, with stand-ins for what is missing.

Graphs are lists of launches here, and torch reaches device memory as the CPU does. This shows that the parts look where
they should, and nothing about graphs, DLPack or torch on a device.
"""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.allocator.cuda_calls import CudaCalls
from kvtier.kernels.launch_device import DeviceLauncher, Images
from kvtier.testing.gpu_check import part_dlpack, part_sequence_views
from kvtier.testing.gpu_check.paged import BLOCK_TOKENS
from kvtier.testing.gpu_check.parts import run_here
from kvtier.testing.gpu_check.record import Record
from tests.fakecuda.fake import FakeCuda, fake_cuda
from tests.gpu_check_card import TINY, emulator, images, plain

torch = pytest.importorskip("torch")
__all__ = ["emulator", "fake_cuda", "images", "plain"]
pytestmark = pytest.mark.timeout(100)
TABLE_BYTES = TINY.sequences * -(-TINY.kv_tokens // BLOCK_TOKENS) * 4


# ---------------------------------------------------------------- graphs


@pytest.fixture
def graphs(images: Images, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Capturing keeps launches, and a replay launches them anew. `replays` False: a replay does nothing.

    stale: a replay reads the block table as it was when it was captured.
    """
    state: dict[str, Any] = {"captured": None, "graph": [], "replays": True, "stale": False}
    call, launch, pointer = CudaCalls.__call__, DeviceLauncher.launch, CudaCalls.pointer

    def called(self: CudaCalls, function: str, *arguments: Any) -> Any:
        if function == "cuStreamBeginCapture":
            state["captured"] = []
        elif function == "cuStreamEndCapture":
            state["graph"], state["captured"] = state["captured"], None
            state["table"] = ctypes.string_at(table_of(state), TABLE_BYTES)
        elif function == "cuGraphLaunch":
            if state["stale"]:
                ctypes.memmove(table_of(state), state["table"], TABLE_BYTES)
            for launcher, each in state["graph"] if state["replays"] else ():
                launch(launcher, each, arguments[1])
        elif not function.startswith("cuGraph"):
            return call(self, function, *arguments)
        return 1

    def launched(self: DeviceLauncher, each: Any, stream_key: int) -> None:
        if state["captured"] is None:
            launch(self, each, stream_key)
        else:
            state["captured"].append((self, each))

    monkeypatch.setattr(CudaCalls, "__call__", called)
    monkeypatch.setattr(DeviceLauncher, "launch", launched)
    monkeypatch.setattr(
        CudaCalls, "pointer", lambda self, name, *rest: name == "cuGraphLaunch" or pointer(self, name, *rest)
    )
    return state


def table_of(state: dict[str, Any]) -> int:
    """Where the captured attention finds its block table."""
    address: int = state["graph"][0][1].arguments[6].value
    return address


def test_a_replay_with_an_old_table_is_found(graphs: dict[str, Any], plain: FakeCuda, images: Images) -> None:
    """A replay that reads the blocks where they were passes, for they are still there."""
    graphs["stale"] = True
    record = run_here("graphs", 0, TINY, images)
    assert record.findings == ["a replay does not follow its block table to newly mapped slots"]


def test_a_replay_follows_its_table(graphs: dict[str, Any], plain: FakeCuda, images: Images) -> None:
    """The part compares what was never moved, or a sound replay is called wrong."""
    record = run_here("graphs", 0, TINY, images)
    assert (record.findings, record.skipped) == ([], None)
    assert len(graphs["graph"]) == 2
    assert len(record.figures) == 2
    assert plain.report == ""


def test_a_replay_that_does_nothing_is_found(graphs: dict[str, Any], plain: FakeCuda, images: Images) -> None:
    """Results of the launches before are taken for the replay's."""
    graphs["replays"] = False
    record = run_here("graphs", 0, TINY, images)
    assert record.findings == [
        "a replay gives other results than its launches",
        "a replay does not follow its block table to newly mapped slots",
    ]


# ---------------------------------------------------------------- torch


class TorchOnTheCpu:
    """torch, taking arrays of CuPy's as the memory that they are."""

    float16 = torch.float16

    def __init__(self, *, copies: bool = False) -> None:
        self._copies = copies
        self.cuda = SimpleNamespace(
            ExternalStream=lambda key: SimpleNamespace(synchronize=lambda: None),
            stream=lambda stream: nullcontext(),
            synchronize=lambda: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def from_dlpack(self, view: Any) -> Any:
        length_bytes = sum((count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True))
        memory = (ctypes.c_ubyte * (length_bytes + view.itemsize)).from_address(view.data.ptr)
        array = np.ndarray(view.shape, view.dtype.name, memory, 0, view.strides)
        if not self._copies:
            return torch.from_numpy(array)
        copy = np.zeros(view.shape, view.dtype.name)
        return torch.from_numpy(copy)


def use(monkeypatch: pytest.MonkeyPatch, stand_in: TorchOnTheCpu) -> None:
    for part in (part_dlpack, part_sequence_views):
        monkeypatch.setattr(part, "torch_on", lambda card: stand_in)


@pytest.mark.parametrize("part", ["dlpack", "sequence_views"])
def test_views_are_used_as_they_should_be(
    part: str, plain: FakeCuda, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part fails on a card that does all it should."""
    use(monkeypatch, TorchOnTheCpu())
    record = run_here(part, 0, TINY, images)
    assert (record.findings, record.skipped) == ([], None)
    assert record.figures
    assert plain.report == ""


@pytest.mark.parametrize(
    ("part", "findings"),
    [
        (
            "dlpack",
            [
                "torch has a copy, not the tier's memory",
                "what torch writes into a slot is not what the tier holds",
                "a tensor does not reach what was mapped after it",
            ],
        ),
        ("sequence_views", ["two sequences see different bytes in the block that they share"]),
    ],
)
def test_a_copy_in_place_of_a_view_is_found(
    part: str, findings: list[str], plain: FakeCuda, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy passes for a view: what attention writes never reaches the tier."""
    use(monkeypatch, TorchOnTheCpu(copies=True))
    assert run_here(part, 0, TINY, images).findings == findings


def test_aliases_that_are_one_range_are_found(plain: FakeCuda, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that share everything pass for sequences that share a prefix."""
    use(monkeypatch, TorchOnTheCpu())
    view, first = part_sequence_views._view, []

    def always_the_first(torch_: Any, card: Any, addresses: Any) -> Any:
        first.append(addresses)
        return view(torch_, card, first[0])

    monkeypatch.setattr(part_sequence_views, "_view", always_the_first)
    assert run_here("sequence_views", 0, TINY, images).findings == [
        "two sequences see the same bytes in blocks of their own"
    ]


# ---------------------------------------------------------------- transformers


def check_here() -> Record:
    """The part's work with model and slots in host memory."""
    from kvtier.integrations.transformers import card_check

    torch.set_num_threads(1)  # more would only wait for each other at this size
    record = Record("transformers")
    card_check.check(card_check.Place("cpu", "host", lambda: None), TINY, record)
    return record


def test_sessions_on_host_memory_pass() -> None:
    """The part fails where sessions do all they should, or compares nothing."""
    record = check_here()
    assert record.findings == []
    figures = {figure.name: figure.value for figure in record.figures}
    assert figures["tokens that came from below, cold"] == 0
    assert figures["tokens that came from below, from lmdb"] == 3 * 3 * BLOCK_TOKENS
    for when in ("from host", "from lmdb"):
        assert figures[f"prompts whose KV is bit for bit what was kept, {when}"] == "3 of 3"


def test_a_session_that_restores_other_kv_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV from wrong slots passes, as long as nobody looks at more than the figures."""
    from kvtier.integrations.transformers.slots import HostSlots

    gather = HostSlots.gather

    def first_only(self: HostSlots, view: Any, slots: Any, row: Any) -> None:  # in another order they attend alike
        gather(self, view, [slots[0]] * len(slots), row)

    monkeypatch.setattr(HostSlots, "gather", first_only)
    findings = check_here().findings
    assert "from host: the KV of 3 of 3 prompts is not what was kept" in findings
    assert any("other tokens than those of the model alone" in finding for finding in findings)


def test_a_session_that_restores_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is computed again, which gives the same tokens."""
    from kvtier.integrations.transformers import keep

    monkeypatch.setattr(keep, "_copy", lambda *arguments: 1 // 0)
    findings = check_here().findings
    assert any("ZeroDivisionError" in finding for finding in findings)
    assert "from lmdb, prompt 0: 0 of 48 tokens were restored" in findings
    assert "from lmdb: nothing came from below the device" in findings


def test_the_part_runs_beside_the_model(plain: FakeCuda, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part looks at host memory on a machine with a card."""
    from kvtier.integrations.transformers import card_check
    from kvtier.testing.gpu_check import part_transformers

    places = []
    monkeypatch.setattr(part_transformers, "torch_on", lambda card: TorchOnTheCpu())
    monkeypatch.setattr(card_check, "check", lambda place, scale, record: places.append((place.model, place.slots)))
    assert run_here("transformers", 0, TINY, images).findings == []
    assert places == [("cuda:0", "cuda:0")]
