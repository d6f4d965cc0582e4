"""The oracle itself, against torch's scaled_dot_product_attention in float64, which shares no code with it."""

import numpy as np
import pytest

from kvtier.errors import UsageError
from kvtier.kernels.arrays import FORMATS
from kvtier.kernels.attention import Batch, PagedKv, attend, merge
from kvtier.kernels.floats import to_float
from kvtier.kernels.reference import ReferenceKernels
from tests.kernels.attention_world import World, world

torch = pytest.importorskip("torch")


def by_torch(case: World, scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Results and log-sum-exp, one sequence at a time, from dense KV and a boolean mask."""
    queries = torch.from_numpy(to_float(case.queries, case.dtype).astype(np.float64))
    out, log_sums = torch.zeros_like(queries), torch.full(queries.shape[:2], -torch.inf, dtype=torch.float64)
    batch = case.batch
    for sequence, (keys, values) in enumerate(case.dense):
        start, stop = int(batch.query_starts[sequence]), int(batch.query_starts[sequence + 1])
        at = int(batch.positions[sequence]) + torch.arange(stop - start)[:, None]
        tokens = torch.arange(len(keys))[None]
        mask = tokens <= at
        if batch.window:
            mask &= tokens > at - batch.window
        k, v = (torch.from_numpy(part).transpose(0, 1) for part in (keys, values))
        group = queries.shape[1] // len(k)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        q = queries[start:stop].transpose(0, 1)
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        out[start:stop] = dense.transpose(0, 1)
        log_sums[start:stop] = scores.masked_fill(~mask, -torch.inf).logsumexp(-1).T
    seen = (log_sums > -torch.inf)[..., None]
    return torch.where(seen, out, 0).numpy(), log_sums.numpy()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [None, 1, 17])
@pytest.mark.parametrize("dtype", FORMATS)
def test_reference_is_sdpa(dtype: str, window: int | None, seed: int) -> None:
    """All device results are judged by the reference: a mask off by one there would be off by one everywhere."""
    case = world(seed, dtype, 64, window=window, host_blocks=seed % 2 == 0)
    scale = 0.3 if seed == 3 else None
    out, log_sums = attend(case.queries, case.kv, case.batch, scale)
    wanted, wanted_log_sums = by_torch(case, scale)
    assert np.allclose(out, wanted, rtol=1e-6, atol=1e-6)
    assert np.allclose(log_sums, wanted_log_sums, rtol=1e-6, atol=1e-6)


def test_a_query_may_see_nothing() -> None:
    """A window that has moved past the cached prefix gives NaN, and merging spreads it."""
    keys = np.full((2, 4, 1, 64), np.nan, np.float32)
    one = np.array([1], np.int32)
    batch = Batch(np.array([0, 1], np.int32), one * 20, one * 8, np.array([[0, 1]], np.int32), window=4)
    out, log_sums = attend(np.ones((1, 2, 64), np.float32), PagedKv(keys, keys), batch)
    assert not out.any()
    assert np.isneginf(log_sums).all()
    merged, merged_log_sums = merge(np.stack([out, out + 3]), np.stack([log_sums, log_sums]))
    assert not merged.any()
    assert np.isneginf(merged_log_sums).all()


def test_partial_results_merge() -> None:
    """A prefix from the cache and new tokens from the engine do not add up to attention over both."""
    case = world(11, "float32", 64, kv_heads=2)
    whole, whole_log_sums = attend(case.queries, case.kv, case.batch)
    keys, values = case.dense[0]
    rows = int(case.batch.query_starts[1])
    cut = len(keys) // 2
    parts, log_sums = [], []
    for start, stop in ((0, cut), (cut, len(keys))):
        one = np.array([stop - start], np.int32)
        part = Batch(np.array([0, rows], np.int32), case.batch.positions[:1] - start, one, np.zeros((1, 1), np.int32))
        dense = PagedKv(keys[None, start:stop].astype(np.float32), values[None, start:stop].astype(np.float32))
        out, log_sum = attend(case.queries[:rows], dense, part)
        parts.append(out)
        log_sums.append(log_sum)
    merged, merged_log_sums = merge(np.stack(parts), np.stack(log_sums))
    assert np.allclose(merged, whole[:rows], atol=1e-6)
    assert np.allclose(merged_log_sums, whole_log_sums[:rows], atol=1e-6)


@pytest.mark.parametrize("dtype", FORMATS)
def test_merged_results_are_of_the_engines_dtype(dtype: str) -> None:
    """A merged result is read as another dtype, is rounded before it is summed, or torch's tensors are refused."""
    parts = torch.tensor([[[[1.0, 3.0]]], [[[2.0, 1.0]]]])
    log_sums = torch.log(torch.tensor([[[1.0]], [[3.0]]]))
    merged, merged_log_sums = ReferenceKernels().merge(parts, log_sums, dtype)
    assert to_float(merged, dtype)[0, 0].tolist() == pytest.approx([1.75, 1.5])
    assert merged_log_sums == pytest.approx(np.log(4.0))
    assert merged.dtype == {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]


def test_parts_that_do_not_belong_together_are_refused() -> None:
    """Log-sum-exps of other rows, or of one part less, are spread over all by broadcasting."""
    for log_sums in (np.zeros((2, 3), np.float32), np.zeros((1, 3, 4), np.float32)):
        with pytest.raises(UsageError, match=r"parts \(2, 3, 4, 8\) and log-sum-exps"):
            merge(np.zeros((2, 3, 4, 8), np.float32), log_sums)
    with pytest.raises(UsageError, match=r"parts \(0, 3, 8\)"):
        merge(np.zeros((0, 3, 8), np.float32), np.zeros((0, 3), np.float32))


def test_tensors_are_taken_as_they_are() -> None:
    """A caller with torch gets an error, or a copy, or bfloat16 read as integers."""
    case = world(2, "bfloat16", 64)
    as_tensor = lambda array: torch.from_numpy(array.copy()).view(torch.bfloat16)  # noqa: E731
    tensors = PagedKv(as_tensor(case.kv.keys), as_tensor(case.kv.values))
    out, log_sums = ReferenceKernels().attend(as_tensor(case.queries), tensors, case.batch)
    wanted, wanted_log_sums = attend(case.queries, case.kv, case.batch)
    assert np.array_equal(out, wanted)
    assert np.array_equal(log_sums, wanted_log_sums)


def refused(**changes: object) -> pytest.ExceptionInfo[UsageError]:
    base = {
        "query_starts": np.array([0, 1], np.int32),
        "positions": np.array([3], np.int32),
        "kv_tokens": np.array([4], np.int32),
        "tables": np.array([[0]], np.int32),
    }
    keys = np.zeros((1, 4, 2, 64), np.float32)
    queries = changes.pop("queries", np.zeros((1, 4, 64), np.float32))
    kv = changes.pop("kv", PagedKv(keys, keys))
    with pytest.raises(UsageError) as info:
        attend(queries, kv, Batch(**{**base, **changes}))
    return info


def test_what_does_not_fit_is_refused() -> None:
    """A batch that does not fit its arrays reads past them on the device; the reference says what is wrong."""
    keys = np.zeros((1, 4, 2, 64), np.float32)
    assert refused(kv_tokens=np.array([5], np.int32)).match("kv_tokens 5 exceed what 1 blocks hold")
    assert refused(query_starts=np.array([0, 2], np.int32)).match("from 0 to the 1 queries")
    assert refused(positions=np.zeros(2, np.int32)).match("one start more")
    assert refused(window=0).match("a window of 0 tokens")
    assert refused(tables=np.array([[-1]], np.int32)).match("slot 0 of the host, and no host pool")
    assert refused(queries=np.zeros((1, 3, 64), np.float32)).match("queries of 3 heads, 64 values each, over 2")
    assert refused(queries=np.zeros((1, 4, 64), np.float16)).match("these must agree")
    assert refused(kv=PagedKv(keys, keys[:, :2])).match("these must agree")
    assert refused(queries=np.zeros((1, 4, 64))).match("KV values of dtype float64")
    assert refused(queries=[0.0]).match("a numpy array or a CPU tensor is wanted, not list")
