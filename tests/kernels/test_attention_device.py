"""Attention on the device against the reference: every dtype and head dim, layout, window, split and block table."""

import numpy as np
import pytest

from kvtier.kernels.arrays import FORMATS
from kvtier.kernels.attention import Batch, PagedKv, attend, merge
from kvtier.kernels.floats import from_float, to_float
from tests.kernels.attention_world import dtypes_and_dims, world
from tests.kernels.emulated import EmulatedKernels


@pytest.mark.parametrize(("dtype", "head_dim"), dtypes_and_dims())
def test_every_variant_agrees(device: EmulatedKernels, dtype: str, head_dim: int) -> None:
    """One of the compiled kernels computes something else, or reads a token that no query sees (those are NaN)."""
    case = world(head_dim + len(dtype), dtype, head_dim, window=None if head_dim % 128 else 40)
    out, log_sums = device.attend(case.queries, case.kv, case.batch, split_tokens=64)
    wanted, wanted_log_sums = attend(case.queries, case.kv, case.batch)
    assert np.allclose(out, wanted, rtol=1e-4, atol=2e-6)
    assert np.allclose(log_sums, wanted_log_sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(24))
def test_random_batches_agree(device: EmulatedKernels, seed: int) -> None:
    """Some mix of grouped heads, queries, blocks, window, splits and host slots goes wrong."""
    rng = np.random.default_rng(1000 + seed)
    window = [None, 1, 8, 33, 100][int(rng.integers(5))]
    case = world(seed, list(FORMATS)[seed % 3], 64, window=window, host_blocks=seed % 4 == 0)
    scale = 0.02 if seed % 5 == 0 else None
    split_tokens = [32, 64, 1 << 20][int(rng.integers(3))]
    parts, part_log_sums = device.attend_parts(case.queries, case.kv, case.batch, scale, split_tokens)
    wanted, wanted_log_sums = attend(case.queries, case.kv, case.batch, scale)
    for out, log_sums in (merge(parts, part_log_sums), device.merge(parts, part_log_sums, "float32")):
        assert np.allclose(out, wanted, rtol=1e-4, atol=2e-6)
        assert np.allclose(log_sums, wanted_log_sums, rtol=1e-5, atol=1e-5)


def test_parts_are_disjoint(device: EmulatedKernels) -> None:
    """A token at a split's border counts twice, or not at all: each part is what its own tokens give."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 10, 8, 1, 64)).astype(np.float32)
    queries = rng.standard_normal((2, 2, 64)).astype(np.float32)
    starts, after = np.array([0, 2], np.int32), np.array([80], np.int32)
    batch = Batch(starts, after, np.array([76], np.int32), np.arange(10, dtype=np.int32)[None])
    parts, log_sums = device.attend_parts(queries, PagedKv(keys, values), batch, None, 32)
    assert len(parts) == 3
    for part, tokens in enumerate((32, 32, 12)):
        own = slice(4 * part, 4 * part + 4)
        alone = Batch(starts, after, np.array([tokens], np.int32), np.arange(4, dtype=np.int32)[None])
        wanted, wanted_log_sums = attend(queries, PagedKv(keys[own], values[own]), alone)
        assert np.allclose(parts[part], wanted, atol=1e-5)
        assert np.allclose(log_sums[part], wanted_log_sums, atol=1e-5)


@pytest.mark.parametrize("dtype", FORMATS)
def test_merge_agrees(device: EmulatedKernels, dtype: str) -> None:
    """Merged results are weighted wrongly, or what an empty part holds leaks into them."""
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((4, 3, 2, 96)).astype(np.float32)
    log_sums = (rng.standard_normal((4, 3, 2)) * 30).astype(np.float32)
    log_sums[1, 0] = log_sums[:, 2, 1] = -np.inf
    parts[1, 0] = np.nan
    out, merged_log_sums = device.merge(parts, log_sums, dtype)
    wanted, wanted_log_sums = merge(parts, log_sums)
    assert np.allclose(to_float(out, dtype), to_float(from_float(wanted, dtype), dtype), rtol=1e-2, atol=1e-6)
    if dtype == "float32":
        assert np.allclose(out, wanted, rtol=1e-5, atol=1e-6)
    assert np.allclose(merged_log_sums, wanted_log_sums, rtol=1e-6)
    assert not out[2, 1].any()


def test_nan_shows_only_where_it_is_seen(device: EmulatedKernels) -> None:
    """A damaged key is hidden by zero weights, or one query's NaN spreads to its neighbours in the tile."""
    keys = np.random.default_rng(0).standard_normal((1, 16, 1, 64)).astype(np.float32)
    values = keys + 1
    keys[0, 5], values[0, 9] = np.nan, np.inf
    counts = np.array([16], np.int32)
    batch = Batch(np.array([0, 16], np.int32), np.zeros(1, np.int32), counts, np.zeros((1, 1), np.int32), window=3)
    queries = np.random.default_rng(1).standard_normal((16, 2, 64)).astype(np.float32)
    parts, _ = device.attend_parts(queries, PagedKv(keys, values), batch, None, 32)
    assert np.isnan(parts[0, 5:8]).all()
    for kernel in (device.attend, attend):
        with np.errstate(invalid="ignore"):
            out, log_sums = kernel(queries, PagedKv(keys, values), batch)
        assert np.isnan(out).any(axis=(1, 2)).tolist() == [query in (5, 6, 7) for query in range(16)]
        assert np.isnan(log_sums).any(axis=1).tolist() == [query in (5, 6, 7) for query in range(16)]
        assert np.isinf(out).any(axis=(1, 2)).tolist() == [query in (9, 10, 11) for query in range(16)]
