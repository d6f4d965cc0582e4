"""Float formats that numpy lacks, against torch's."""

import numpy as np
import pytest

from kvtier.kernels.floats import QUIET_NANS, bfloat16_to_float, float_to_bfloat16, from_float, to_float

torch = pytest.importorskip("torch")


def test_bfloat16_is_torch_bfloat16() -> None:
    """bfloat16 is cut off instead of rounded, or ties go the wrong way: off by one bit, in every value."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint64).astype(np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[~np.isnan(values)]
    wanted = torch.from_numpy(values).bfloat16()
    assert np.array_equal(float_to_bfloat16(values), wanted.view(torch.uint16).numpy())
    every = np.arange(1 << 16, dtype=np.uint16)
    exact = torch.from_numpy(every).view(torch.bfloat16).float().numpy()
    assert np.array_equal(bfloat16_to_float(every), exact, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_nan_is_written(dtype: str) -> None:
    """A NaN's payload makes bytes of the host and of the device differ."""
    nans = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    written = from_float(nans, dtype)
    assert set(written.view(np.uint32 if dtype == "float32" else np.uint16).tolist()) == {QUIET_NANS[dtype]}
    assert np.isnan(to_float(written, dtype)).all()
