"""The gate: NVRTC compiles every variant of the kernels for A100, H100/H200 and B200. No device is needed."""

import itertools
import sys

import pytest

from kvtier.errors import ConfigError, CudaError
from kvtier.kernels.arrays import FORMATS
from kvtier.kernels.compiler import compiled
from kvtier.kernels.source import HEAD_DIMS, SOURCES, Variant, variants

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        compiled(variants()[0], ARCHITECTURES[0])
    except ConfigError as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", variants(), ids=lambda variant: variant.name)
def test_compiles_without_a_warning(variant: Variant, architecture: str) -> None:
    """What g++ lets through is refused on the device, where nobody can mend it."""
    result = compiled(variant, architecture)
    assert result.warnings == ""
    for entry in variant.entries:
        assert f".text.{entry}\0".encode() in result.image


def test_gate_leaves_nothing_out() -> None:
    """A dtype or head dim that is offered has no variant: it would fail at its first user."""
    for source, (_, by_dtype, by_head_dim) in SOURCES.items():
        dtypes, head_dims = FORMATS if by_dtype else [None], HEAD_DIMS if by_head_dim else [None]
        mine = {(variant.dtype, variant.head_dim) for variant in variants() if variant.source == source}
        assert mine == {*itertools.product(dtypes, head_dims)}
    assert (*FORMATS,) == ("float32", "float16", "bfloat16")
    assert HEAD_DIMS == (64, 96, 128, 192, 256)


def test_refusal_holds_the_log() -> None:
    """A kernel that does not compile fails without saying where."""
    with pytest.raises(CudaError, match=r'(?s)attention_float16_65 for sm_90.*"KV_HEAD_DIM is a multiple of 32"'):
        compiled(Variant("attention", "float16", 65), "sm_90")
    with pytest.raises(CudaError, match="sm_1"):
        compiled(variants()[0], "sm_1")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without NVRTC gets a trace of imports instead of what to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(ConfigError, match=r"NVRTC cannot be loaded.*Install cuda-bindings and nvidia-cuda-nvrtc"):
        compiled(variants()[0], "sm_86")
