"""The check for cards, on the fake libcuda: what it finds when all is well, and when something is not.

Times mean nothing here and are never looked at. The fake has no graphs and torch no device: those parts are skipped.
"""

import ctypes
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.vmm import Arena
from kvtier.engine.mover import TierMover
from kvtier.errors import CudaError, DriverError
from kvtier.kernels import launch_blocks
from kvtier.kernels.launch import DevicePool
from kvtier.kernels.launch_device import DeviceLauncher, Images
from kvtier.testing.gpu_check import command, part_aliases, part_copies, part_decode, parts
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.child import run_in_child
from kvtier.testing.gpu_check.paged import Placed
from kvtier.testing.gpu_check.parts import PARTS, run_here
from kvtier.testing.gpu_check.reader import Reader
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.scale import KIB, MIB, Scale
from kvtier.testing.gpu_check.serving import Serving
from kvtier.testing.gpu_check.targets import TARGETS, verdicts
from kvtier.tiers.device_copies import DeviceCopies
from kvtier.types import DONE, Outcome, Status
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.kernels.emulated import Emulator

__all__ = ["fake_cuda"]
pytestmark = pytest.mark.timeout(100)
DEVICE_BYTES = 64 * MIB
TINY = Scale(
    rounds=1,
    vmm_granules=8,
    copy_bytes=256 * KIB,
    copy_pieces=16,
    block_bytes=(4 * KIB, 64 * KIB),
    fragment_bytes=(128,),
    submit_pieces=4,
    heads=(4, 2),
    head_dims=(64,),
    sequences=2,
    kv_tokens=40,
    decode_head_dim=64,
    decode_sequences=2,
    decode_kv_tokens=48,
    decode_steps=2,
    resize_bytes=512 * KIB,
    reader_slots=3,
    reader_bytes=16 * KIB,
    settle_s=0.0,
    layers=2,
    prompts=3,
    prompt_blocks=3,
)
ELSEWHERE = {
    "graphs": "this driver has no CUDA graphs",
    "dlpack": "needs torch with CUDA",
    "sequence_views": "needs torch with CUDA",
    "transformers": "needs torch with CUDA",
}
HERE = [part for part in PARTS if part not in ELSEWHERE]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: the device's kernels cannot run on this machine")
    return Emulator(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def images(emulator: Emulator) -> Images:
    """The kernels for the CPU."""
    return lambda variant: emulator.path(variant).read_bytes()


@pytest.fixture(params=["plain", "strict"])
def device(request: pytest.FixtureRequest, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A device on which there is room for every part; other processes find it, too."""
    fake_cuda.configure(DEVICE_BYTES, GRANULE_BYTES, strict=request.param == "strict")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda.path.parent))
    return fake_cuda


@pytest.fixture
def plain(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake_cuda.configure(DEVICE_BYTES, GRANULE_BYTES)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda.path.parent))
    return fake_cuda


@pytest.fixture
def card(plain: FakeCuda, images: Images) -> Iterator[Card]:
    card = Card(0, TINY, images)
    yield card
    card.close()


# ---------------------------------------------------------------- all is well


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


# ---------------------------------------------------------------- something is not


def copies_lose_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    read = DeviceCopies.read
    monkeypatch.setattr(DeviceCopies, "read", lambda self, items: [*read(self, items[:-1]), DONE])


def kernels_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceLauncher, "launch", lambda self, launch, stream_key: None)


def gather_takes_the_wrong_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = launch_blocks.gather
    wrong = lambda pool, slots, fragments, blocks, count: gather(pool, slots, fragments, slots, count)  # noqa: E731
    monkeypatch.setattr(launch_blocks, "gather", wrong)


def batches_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        part_copies.Blocks,
        "_batch",
        lambda self, way: self.card.streams.copy(
            *(ends[:-1] for ends in self._ends(way)), self._lengths[:-1], self.card.stream
        ),
    )


def loops_only_go_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they should bring up, another method has brought there before."""
    loop = part_copies.Blocks._loop
    monkeypatch.setattr(part_copies.Blocks, "_loop", lambda self, way: loop(self, way) if way == "down" else None)


def tables_are_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Placed.run

    def shifted(self: Placed, stream: Any = None) -> None:
        tables = self._question.batch.tables
        self._card.put(self.tables, np.roll(tables, 1, axis=1))
        run(self, stream)

    monkeypatch.setattr(Placed, "run", shifted)


def shrinking_keeps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "shrink", lambda self, granules, is_free: [])


def growing_spoils_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = Arena.map

    def map_and_spoil(self: Arena, granules: Any) -> list[int]:
        stride_bytes = self.geometry.stride_bytes
        ctypes.memset(self.address + stride_bytes, 0xEE, max(0, self.slots_mapped - 1) * stride_bytes)
        return grow(self, granules)

    monkeypatch.setattr(Arena, "map", map_and_spoil)


def releases_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CudaDriver.release
    large = lambda self, handle: release(self, handle) if handle.length_bytes == GRANULE_BYTES else None  # noqa: E731
    monkeypatch.setattr(CudaDriver, "release", large)


def blocks_are_restored_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    write = DeviceCopies.write

    def swapped(self: DeviceCopies, batch: Any) -> Any:
        if len(batch.items) > 1:
            first, second, *rest = batch.items
            exchanged = (replace(first, source=second.source), replace(second, source=first.source))
            batch = replace(batch, items=[*exchanged, *rest])
        return write(self, batch)

    monkeypatch.setattr(DeviceCopies, "write", swapped)


def loads_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = lambda self, batch: [Outcome(Status.DONE, item.place) for item in batch.items]  # noqa: E731
    monkeypatch.setattr(DeviceCopies, "write", done)


def stores_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierMover, "_store", lambda self, move: [Outcome(Status.FAILED) for _ in move.keys])


def loads_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierMover, "_load", lambda self, move: [Outcome(Status.FAILED) for _ in move.keys])


def slots_move(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = Serving.address_now, count()
    monkeypatch.setattr(Serving, "address_now", lambda self: now(self) + next(asked))


def readers_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "is_running", False)


def results_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = Placed.result, count()
    monkeypatch.setattr(Placed, "result", lambda self: result(self) + next(asked))


def demotion_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_decode.Demotion, "running", lambda self: nullcontext())


def demotion_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its thread: afterwards all is well."""
    read = DeviceCopies.read

    def fail_there(self: DeviceCopies, items: Any) -> Any:
        if threading.current_thread().name == "kvtier-demotion":
            raise DriverError("cuMemcpyBatchAsync", 1, "refused")
        return read(self, items)

    monkeypatch.setattr(DeviceCopies, "read", fail_there)


def trespasses_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_aliases, "_trespass", lambda device, way: {"refused": way == "copy", "error": None})


def parts_have_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_decode, "_steps", lambda card, placed, steps: [][0])


def results_are_a_percent_off(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Placed.result
    monkeypatch.setattr(Placed, "result", lambda self: result(self) * np.float32(1.01))


def aliases_are_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    open_to = CudaDriver.set_access
    monkeypatch.setattr(CudaDriver, "set_access", lambda self, *place, write: open_to(self, *place, write=True))
    monkeypatch.setattr(CudaDriver, "has_read_only", True)


PLANTED: list[tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = [
    ("copies", batches_are_short, "batch, blocks of 4096 bytes: other bytes came back"),
    ("copies", loops_only_go_down, "loop, blocks of 65536 bytes: other bytes came back"),
    ("copies", gather_takes_the_wrong_blocks, "kernel, blocks of 4096 bytes: other bytes came back"),
    ("copies", kernels_do_nothing, "kernel, blocks of 65536 bytes: other bytes came back"),
    ("copies", kernels_do_nothing, "fragments of 128 bytes: load by staged is left out: it gives other bytes"),
    ("copies", gather_takes_the_wrong_blocks, "fragments of 128 bytes: store by direct is left out"),
    ("attention", tables_are_off_by_one, "float16, head dim 64, decode: relative error"),
    ("attention", kernels_do_nothing, "bfloat16, head dim 64, sliding window: relative error inf"),
    ("attention", results_are_a_percent_off, "bfloat16, head dim 64, decode: relative error 1.0e-02, at most 8e-03"),
    ("aliases", aliases_are_writable, "aliases asked for as read-only grant the access"),
    ("roundtrip", copies_lose_the_last, "blocks have other bytes"),
    ("roundtrip", blocks_are_restored_elsewhere, "from host: [1-3] blocks have other bytes"),
    ("engine", blocks_are_restored_elsewhere, "restored from host: .* answers differ"),
    ("engine", tables_are_off_by_one, "request 0: relative error"),
    ("managed", copies_lose_the_last, "blocks have other bytes"),
    ("managed", blocks_are_restored_elsewhere, "from host, prompt 0: [1-3] blocks have other bytes"),
    ("managed", loads_write_nothing, "from lmdb, prompt 0: 3 blocks have other bytes"),
    ("managed", stores_fail, "not all pages could be copied to the store"),
    ("managed", loads_fail, "from host, prompt 0: 0 of 48 tokens"),
    ("decode", copies_lose_the_last, "blocks came down with other bytes"),
    ("resize", shrinking_keeps_memory, "shrinking gave back 0% of 524288 bytes"),
    ("resize", growing_spoils_slots, "steps read wrong bytes"),
    ("aliases", kernels_do_nothing, "a kernel reads other bytes"),
    ("roundtrip", loads_write_nothing, "from lmdb: 3 blocks have other bytes"),
    ("resize", slots_move, "the slots' address changed"),
    ("resize", readers_stop, "the reader stopped while the tier was resized"),
    ("vmm", readers_stop, "the reader stopped while memory was mapped"),
    ("decode", results_vary, "decode results change while blocks are demoted"),
    ("decode", demotion_rests, "nothing was demoted while the loop ran"),
    ("decode", demotion_fails, "DriverError: cuMemcpyBatchAsync: refused"),
    ("decode", parts_have_bugs, "IndexError: list index out of range"),
    ("aliases", trespasses_go_through, "a kernel wrote through a mapping that is read-only"),
    ("vmm", releases_are_forgotten, "memory that was released is still taken"),
    ("vmm", kernels_do_nothing, "steps read wrong bytes"),
]


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


# ---------------------------------------------------------------- the command


@pytest.fixture
def run(plain: FakeCuda, images: Images, tmp_path: pathlib.Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The command with its parts in this process; its exit code and its JSON."""

    def run_part(part: str, device: int, scale: str, patience_s: float) -> Record:
        return run_here(part, device, TINY, images)

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "out.json"
        code = command.main(["--json", str(out), *options], run_part)
        return code, json.loads(out.read_text()) if out.exists() else {}

    return run


def test_the_report_is_complete(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure reaches nobody, or nobody knows which card, driver or version it belongs to."""
    code, told = run()
    assert code == 0
    assert [part["part"] for part in told["parts"]] == list(PARTS)
    assert told["ok"] is True
    assert {part["part"] for part in told["parts"] if part["skipped"]} == set(ELSEWHERE)
    assert told["card"]["name"] == "fakecuda"
    assert told["card"]["architecture"] == "sm_90"
    assert told["card"]["driver_version"] > 12000
    assert told["versions"]["numpy"] == np.__version__
    assert {"cpu", "cores", "kernel", "python"} == set(told["machine"])
    assert told["date"].endswith("+00:00")
    assert told["command"].startswith("python -m kvtier.testing.gpu_check --json")
    text = capsys.readouterr().out
    for part in told["parts"]:
        assert part["part"] in text
        for figure in part["figures"]:
            assert figure["name"].split()[0] in text
    assert "fakecuda" in text


def test_targets_are_met_missed_or_not_measured(run: Any) -> None:
    """A target that nobody measured looks like one that was met."""
    _, told = run("--only", "decode,resize")
    by_name = {target["name"]: target for target in told["targets"]}
    assert list(by_name) == [target.name for target in TARGETS]
    assert by_name["copies_large"]["met"] is None
    assert by_name["copies_large"]["reason"] == "part copies was not asked for"
    assert by_name["resize_8GiB"]["met"] is None
    assert by_name["resize_8GiB"]["reason"] == f"part resize: resized by {TINY.resize_bytes} bytes, not by 8 GiB"
    assert isinstance(by_name["decode_slower"]["met"], bool)
    assert by_name["decode_slower"]["measured"] is not None


@pytest.mark.parametrize(
    ("name", "value", "met"),
    [
        ("copies_large", 0.95, True),
        ("copies_large", 0.9499, False),
        ("copies_64KiB", 0.8, True),
        ("submit_1024", 49.9, True),
        ("submit_1024", 50.0, False),
        ("decode_slower", 2.99, True),
        ("decode_slower", 3.0, False),
        ("decode_slower", -1.0, True),
        ("resize_8GiB", 0.99, True),
        ("resize_8GiB", 1.0, False),
    ],
)
def test_a_target_is_what_it_says(name: str, value: float, met: bool) -> None:
    """A missed target is called met."""
    (target,) = [target for target in TARGETS if target.name == name]
    record = Record(target.part, aims={name: value})
    (verdict,) = [verdict for verdict in verdicts({target.part: record}) if verdict["name"] == name]
    assert (verdict["met"], verdict["measured"], verdict["reason"]) == (met, value, None)


def test_a_finding_is_exit_code_1_and_the_others_go_on(run: Any, capsys: Any, monkeypatch: Any) -> None:
    """A broken card passes in CI, or one broken part hides all the others."""
    kernels_do_nothing(monkeypatch)
    code, told = run("--only", "aliases,copies,roundtrip")
    assert code == 1
    assert [(part["part"], part["ok"]) for part in told["parts"]] == [
        ("copies", False),
        ("roundtrip", True),
        ("aliases", False),
    ]
    assert told["ok"] is False
    assert "FINDING  copies: kernel, blocks of 4096 bytes" in capsys.readouterr().out


def test_a_missed_target_is_no_finding(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow hardware is called broken."""
    slow = lambda card, record: record.aims.update(decode_slower=99.0)  # noqa: E731
    monkeypatch.setattr(part_decode, "measure", slow)
    code, told = run("--only", "decode")
    assert code == 0
    assert [target["met"] for target in told["targets"] if target["name"] == "decode_slower"] == [False]


def test_what_is_not_begun_in_time_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs past its four minutes, or ends early and calls what it left out good."""
    monkeypatch.setattr(command, "BUDGET_S", 0.0)
    code, told = run("--only", "vmm,copies")
    assert code == 0
    assert [part["skipped"] for part in told["parts"]] == ["no time was left of 0 s"] * 2
    assert {target["met"] for target in told["targets"]} == {None}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--only", "vnm"], "no part 'vnm'. Did you mean 'vmm'?"),
        (["--only", ","], "no part is named"),
        (["--device", "x"], "invalid int value"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_options_are_exit_code_2(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error runs something else for minutes."""
    with pytest.raises(SystemExit) as ended:
        command.main(options)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--device", "-1"], "--device -1: use 0 or more"),
        (["--device", "7"], "there is no device to check: device 7: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"),
        (["--json", "/nowhere/out.json"], "--json /nowhere/out.json: name a file in a folder that exists"),
    ],
)
def test_what_cannot_work_is_told_at_once(
    options: list[str], told: str, plain: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes pass before the report cannot be written, or a missing device ends in a traceback."""
    assert command.main(options, partial(pytest.fail, "a part was run")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"gpu_check: {told}")
    assert captured.err.count("\n") == 1


def test_without_a_driver_it_says_so_in_one_sentence() -> None:
    """On a machine without a GPU the check ends in a traceback, or passes."""
    clean = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    call = [sys.executable, "-m", "kvtier.testing.gpu_check", "--quick"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, env=clean)
    if done.returncode == 0 and "GPU" in done.stdout:
        pytest.skip("there is a device here")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_check: there is no device to check: ")
    assert done.stderr.count("\n") == 1


# ---------------------------------------------------------------- processes


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
