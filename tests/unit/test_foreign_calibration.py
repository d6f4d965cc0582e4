"""Which way a foreign cache's blocks are copied: measured by the clock that is given, by a rule if it says nothing."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvtier import notices
from kvtier.clock import Clock, ManualClock
from kvtier.engine.foreign_pages import ForeignPages
from kvtier.errors import ConfigError, DeviceLost
from kvtier.kernels.launch_device import DeviceLauncher, Images
from kvtier.kernels.source import Variant
from kvtier.tiers.foreign import kernel_kit
from kvtier.tiers.foreign.calibration import MARGIN, THRESHOLD_BYTES, choose
from kvtier.tiers.foreign.opening import opened_on
from kvtier.tiers.foreign.places import HostPlaces
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.foreign_world import LAYOUTS, Favouring, Layout, World, images

__all__ = ["fake_cuda", "images"]
UNALIGNED = Layout("unaligned", (8, 4, 3), 0, (0, 1, 2), item_bytes=2)  # 24 bytes of each block


@pytest.fixture
def device(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(notices, "_said", set())
    fake_cuda.configure(1024 * GRANULE_BYTES, GRANULE_BYTES)
    return fake_cuda


@pytest.fixture
def make(device: FakeCuda, images: Images) -> Iterator[Callable[..., tuple[World, ForeignPages]]]:
    """Opens pages on a cache. Afterwards nothing is left of them."""
    made: list[tuple[World, ForeignPages]] = []

    def opened(
        clock: Clock, layout: Layout = LAYOUTS[0], images: Images = images, **host: int
    ) -> tuple[World, ForeignPages]:
        world = World(device, layout)
        try:
            places = HostPlaces.of_tier(world.host)
            pages = ForeignPages.on_device([world.cache], places, clock=clock, images=images)
        except BaseException:
            world.close()
            raise
        made.append((world, pages))
        return world, pages

    yield opened
    for world, pages in made:
        pages.close()
        world.close()


# ---------------------------------------------------------------- the choice


def test_the_fastest_is_taken() -> None:
    """Blocks go the slow way though the fast one was measured."""
    choice = choose("load", 2048, 10**9, {"pieces": 1.0, "direct": 0.25, "staged": 0.5})
    assert (choice.method, choice.why, choice.fragment_bytes) == ("direct", "measured", 2048)
    assert choice.gigabytes_per_s == {"pieces": 1.0, "direct": 4.0, "staged": 2.0}
    assert str(choice) == (
        "load by direct (pieces 1.0 GB/s, direct 4.0 GB/s, staged 2.0 GB/s), fragments of 2048 bytes"
    )
    assert choose("store", 2048, 10**9, {"pieces": 1.0, "direct": 2.0, "staged": 0.5}).method == "staged"


def test_the_rule_yields_only_to_what_is_clearly_faster() -> None:
    """Two ways that are equally fast change places from start to start."""
    assert choose("store", 2048, 1, {"pieces": 1.0, "direct": 1 - MARGIN + 0.01}).method == "pieces"
    assert choose("store", 2048, 1, {"pieces": 1.0, "direct": 1 - MARGIN - 0.01}).method == "direct"
    assert choose("load", 2048, 1, {"pieces": 1 - MARGIN + 0.01, "direct": 1.0}).method == "direct"
    assert choose("load", 2048, 1, {"pieces": 0.9, "direct": 1.0}).method == "pieces"


@pytest.mark.parametrize(
    ("way", "fragment_bytes", "names", "method"),
    [
        ("load", THRESHOLD_BYTES - 1, ("pieces", "direct", "staged"), "direct"),
        ("load", THRESHOLD_BYTES - 1, ("pieces", "staged"), "staged"),
        ("load", THRESHOLD_BYTES, ("pieces", "direct", "staged"), "pieces"),
        ("store", 512, ("pieces", "direct", "staged"), "pieces"),
    ],
)
def test_a_clock_that_says_nothing_leaves_it_to_the_rule(
    way: str, fragment_bytes: int, names: tuple[str, ...], method: str
) -> None:
    """What is chosen follows from noise, or from the order of a dictionary."""
    for seconds in (0.0, -1.0):
        choice = choose(
            way, fragment_bytes, 1, {name: float(place) for place, name in enumerate(names)} | {names[-1]: seconds}
        )
        assert (choice.method, choice.why, choice.gigabytes_per_s) == (method, "rule", {})
    assert choose(way, fragment_bytes, 1, {"pieces": 0.0}).why == "only"


# ---------------------------------------------------------------- on the fake device


@pytest.mark.parametrize("favourite", ["pieces", "direct", "staged"])
def test_the_clock_decides(
    favourite: str,
    make: Callable[..., tuple[World, ForeignPages]],
    device: FakeCuda,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The times are taken of other copies than the ones that they are to tell apart, or of one method twice."""
    clock = Favouring(device, **{"pieces": 3.0, "direct": 3.5, "staged": 4.0, favourite: 1.0})
    with caplog.at_level(logging.INFO, "kvtier"):
        world, pages = make(clock)
    assert pages.notes == ()
    for way in ("store", "load"):
        choice = pages.choices[way, 0]
        assert (choice.method, choice.why) == (favourite, "measured")
        speed = 8 * world.layout.block_bytes / 1e9
        assert choice.gigabytes_per_s[favourite] == pytest.approx(speed)
        assert f"foreign cache 0: {choice}" in caplog.messages


def test_measuring_leaves_the_cache_as_it_was(
    make: Callable[..., tuple[World, ForeignPages]], device: FakeCuda
) -> None:
    """An engine's null block, or what it has computed already, holds the poison of a trial; or a host slot does."""
    world, _ = make(ManualClock())
    assert np.array_equal(world.get(), world.memory)
    assert not any(any(world.slot(index)) for index in range(8))
    assert device.report == ""


def test_what_the_clock_does_not_tell_the_rule_does(make: Callable[..., tuple[World, ForeignPages]]) -> None:
    """A machine with a coarse clock gets another way at each start."""
    _, pages = make(ManualClock())
    assert {way: choice.method for (way, _), choice in pages.choices.items()} == {"store": "pieces", "load": "direct"}
    assert {choice.why for choice in pages.choices.values()} == {"rule"}


# ---------------------------------------------------------------- what can be had only in part


def no_compiler(variant: Variant) -> bytes:
    raise ConfigError("device", "NVRTC cannot be loaded (no such file)", "Install cuda-bindings and nvidia-cuda-nvrtc")


def test_without_kernels_blocks_go_in_pieces_and_that_is_said_once(
    make: Callable[..., tuple[World, ForeignPages]], caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without NVRTC cannot use its GPU's cache at all, or nobody learns why it is slow."""
    for _ in range(2):
        _, pages = make(ManualClock(), images=no_compiler)
        assert {choice.method for choice in pages.choices.values()} == {"pieces"}
        assert {choice.why for choice in pages.choices.values()} == {"only"}
        assert "for there are no kernels: device: NVRTC cannot be loaded" in pages.notes[0]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [w for w in warnings if "there are no kernels" in w] == [f"foreign cache: {pages.notes[0]}"]


def test_machine_code_that_the_device_refuses_is_no_kernel(
    make: Callable[..., tuple[World, ForeignPages]], device: FakeCuda
) -> None:
    """A driver older than the compiler ends the engine at its start."""
    _, pages = make(ManualClock(), images=lambda variant: bytes(64))
    assert pages.choices["load", 0].why == "only"
    assert "CUDA_ERROR_INVALID_IMAGE" in pages.notes[0]


def test_a_device_without_room_for_staging_says_so(
    make: Callable[..., tuple[World, ForeignPages]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has taken all memory but a few pages cannot start."""
    monkeypatch.setattr(kernel_kit, "SCRATCH_BYTES", 2048 * GRANULE_BYTES)
    _, pages = make(ManualClock())
    assert "blocks are not staged on the device: " in pages.notes[0]
    assert pages.choices["load", 0].method == "direct"


def test_memory_that_is_not_registered_is_not_read_by_kernels(
    make: Callable[..., tuple[World, ForeignPages]], device: FakeCuda
) -> None:
    """A kernel follows an address that the device does not know: the context is lost."""
    device.fault("cuMemHostRegister_v2", 1)  # CUDA_ERROR_INVALID_VALUE, for the slots
    _, pages = make(Favouring(device, pieces=3.0, direct=0.5, staged=2.0))
    assert "the host's memory is not registered, and copied more slowly" in pages.notes[0]
    assert {choice.method for choice in pages.choices.values()} == {"staged"}


def test_memory_that_somebody_registered_serves_as_well(
    make: Callable[..., tuple[World, ForeignPages]], device: FakeCuda
) -> None:
    """The tier has registered its slots: they count as unregistered, or are unregistered under it."""
    device.fault("cuMemHostRegister_v2", 712)  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    _, pages = make(Favouring(device, pieces=3.0, direct=0.5, staged=2.0))
    assert pages.notes == ()
    assert {choice.method for choice in pages.choices.values()} == {"direct"}
    before = device.calls("cuMemHostUnregister")
    pages.close()
    assert device.calls("cuMemHostUnregister") == before + 1  # the sheets'


def test_fragments_that_kernels_cannot_read_go_in_pieces(make: Callable[..., tuple[World, ForeignPages]]) -> None:
    """A cache of rows that are no multiple of 16 bytes is refused, or misread."""
    _, pages = make(ManualClock(), UNALIGNED)
    assert "fragments of 24 bytes are copied in pieces: fragment_bytes 24: kernels need" in pages.notes[0]
    assert pages.choices["load", 0].why == "only"


def test_nothing_can_be_measured_without_pinned_memory(
    make: Callable[..., tuple[World, ForeignPages]], device: FakeCuda
) -> None:
    """A limit on locked memory ends the engine at its start."""
    device.fault("cuMemHostRegister_v2", 2, nth=3)  # the trial's memory
    _, pages = make(ManualClock())
    assert "nothing was measured" in pages.notes[0]
    assert pages.choices["load", 0].why == "rule"


def test_all_of_it_goes_with_the_stack(device: FakeCuda, images: Images) -> None:
    """On a driver that lives on, memory stays taken or registered after the copies have gone."""
    world = World(device, LAYOUTS[0])
    used_bytes = device.used_bytes
    with ExitStack() as undo:
        places = HostPlaces.of_tier(world.host)
        opened_on(world.driver, [world.cache], places, clock=ManualClock(), images=images, undo=undo, notes=[])
        assert device.used_bytes > used_bytes
    assert device.used_bytes == used_bytes
    assert device.calls("cuMemHostUnregister") == device.calls("cuMemHostRegister_v2") == 3
    assert device.calls("cuModuleUnload") == device.calls("cuModuleLoadData") == 1
    assert device.calls("cuStreamDestroy_v2") == 2
    world.close()


def do_nothing(launcher: DeviceLauncher, launch: object, stream_key: int) -> None: ...


def test_a_way_that_gives_other_bytes_is_left_out(
    make: Callable[..., tuple[World, ForeignPages]], device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that a driver miscompiles restore rubbish, and are the fastest of all."""
    monkeypatch.setattr(DeviceLauncher, "launch", do_nothing)
    world, pages = make(Favouring(device, pieces=3.0, direct=0.5, staged=0.5))
    assert [note for note in pages.notes if "gives other bytes" in note] == [
        f"{way} by {name} is left out: it gives other bytes than pieces"
        for way in ("store", "load")
        for name in ("direct", "staged")
    ]
    assert {choice.method for choice in pages.choices.values()} == {"pieces"}
    assert np.array_equal(world.get(), world.memory)


def test_a_way_that_fails_in_its_trial_is_left_out(
    make: Callable[..., tuple[World, ForeignPages]], device: FakeCuda
) -> None:
    """The first launch fails in the middle of an engine's work instead of at its start."""
    device.fault("cuLaunchKernel", 1)  # store by direct
    world, pages = make(Favouring(device, pieces=3.0, direct=0.5, staged=1.0))
    assert "store by direct is left out: cuLaunchKernel: CUDA_ERROR_INVALID_VALUE" in pages.notes[0]
    assert {way: choice.method for (way, _), choice in pages.choices.items()} == {"store": "staged", "load": "direct"}
    assert np.array_equal(world.get(), world.memory)


def test_a_device_that_is_lost_meanwhile_says_so(
    make: Callable[..., tuple[World, ForeignPages]], device: FakeCuda
) -> None:
    """An engine starts on a device that is gone, with all in pieces."""
    device.fault("cuLaunchKernel", 700, nth=2)
    with pytest.raises(DeviceLost):
        make(ManualClock())
