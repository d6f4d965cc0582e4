"""The emulated device, with threads in both orders: what needs a barrier and has none is wrong in one of them."""

import shutil

import pytest

from tests.kernels.emulated import EmulatedKernels, Emulator


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: the device's kernels cannot run on this machine")
    return Emulator(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=["ascending", "descending"])
def device(request: pytest.FixtureRequest, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> EmulatedKernels:
    monkeypatch.setenv("EMU_REVERSE", "1" if request.param == "descending" else "0")
    return EmulatedKernels(emulator)
