"""A fake card for the tests of the check for cards: sizes that a CPU can do, and its kernels for the CPU."""

import shutil
from collections.abc import Iterator

import pytest

from kvtier.kernels.launch_device import Images
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.parts import PARTS
from kvtier.testing.gpu_check.scale import KIB, MIB, Scale
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.kernels.emulated import Emulator

__all__ = ["fake_cuda"]
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
    folder = tmp_path_factory.getbasetemp() / "gpu_check_kernels"  # for all modules with this fixture: they take long
    folder.mkdir(exist_ok=True)
    return Emulator(folder)


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
