"""The gate: NVRTC compiles the kernels for the architectures of A100, H100/H200 and B200. No device is needed.

Per architecture every source, dtype and head dim is compiled (attention with each head dim in one dtype, so every
line of it); the three architectures together cover all variants. All on each would take three times as long.
"""

import sys

import pytest

from kvtier.errors import ConfigError, CudaError
from kvtier.kernels.arrays import FORMATS
from kvtier.kernels.compiler import compiled
from kvtier.kernels.source import HEAD_DIMS, Variant, variants

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def gate() -> list[tuple[Variant, str]]:
    chosen = []
    for turn, architecture in enumerate(ARCHITECTURES):
        for variant in variants():
            if variant.head_dim is not None:
                dtypes = list(FORMATS)
                if variant.dtype != dtypes[(HEAD_DIMS.index(variant.head_dim) + turn) % len(dtypes)]:
                    continue
            chosen.append((variant, architecture))
    return chosen


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        compiled(variants()[0], ARCHITECTURES[0])
    except ConfigError as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize(("variant", "architecture"), gate(), ids=lambda part: getattr(part, "name", part))
def test_compiles_without_a_warning(variant: Variant, architecture: str) -> None:
    """What g++ lets through is refused on the device, where nobody can mend it."""
    result = compiled(variant, architecture)
    assert result.warnings == ""
    for entry in variant.entries:
        assert f".text.{entry}\0".encode() in result.image


def test_gate_leaves_nothing_out() -> None:
    """A variant that no architecture compiles would fail at its first user."""
    assert {variant for variant, _ in gate()} == set(variants())
    for architecture in ARCHITECTURES:
        mine = [variant for variant, other in gate() if other == architecture]
        assert {variant.head_dim for variant in mine} == {None, *HEAD_DIMS}
        assert {variant.dtype for variant in mine if variant.head_dim} == set(FORMATS)


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
