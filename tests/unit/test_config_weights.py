"""`weights_epoch: auto`: changes with the weights, and with nothing else."""

import os
from pathlib import Path

import pytest

from kvtier.config.weights import EDGE_BYTES, WHOLE_BYTES_MAX, cache_folder, weights_epoch
from kvtier.errors import ConfigError

LARGE_BYTES = 4 * WHOLE_BYTES_MAX


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "shards").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "shards" / "a.safetensors").write_bytes(bytes(LARGE_BYTES))
    return folder


def flip(path: Path, offset: int) -> None:
    """Change one byte, and make sure that mtime tells."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize("offset", [0, EDGE_BYTES - 1, EDGE_BYTES, LARGE_BYTES - EDGE_BYTES, LARGE_BYTES - 1])
def test_a_changed_byte_changes_the_epoch(weights: Path, tmp_path: Path, offset: int) -> None:
    """Reloaded weights would meet the KV of the old ones (vllm#42125, lmdeploy#4917)."""
    before = weights_epoch(weights, tmp_path / "cache")
    assert before == weights_epoch(weights, tmp_path / "cache")
    flip(weights / "shards" / "a.safetensors", offset)
    assert weights_epoch(weights, tmp_path / "cache") != before


def test_every_eighth_of_a_large_file_counts(weights: Path) -> None:
    """A training step that leaves the edges alone would go unseen."""
    shard = weights / "shards" / "a.safetensors"
    before = weights_epoch(weights)
    for eighth in range(8):
        content = bytearray(LARGE_BYTES)
        start = LARGE_BYTES * eighth // 8
        content[start : start + LARGE_BYTES // 8] = b"\1" * (LARGE_BYTES // 8)
        shard.write_bytes(content)
        assert weights_epoch(weights) != before


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    """A small adapter or config could change unseen."""
    small = tmp_path / "small.bin"
    small.write_bytes(bytes(3 * EDGE_BYTES))
    before = weights_epoch(small)
    flip(small, 3 * EDGE_BYTES // 2 + 17)
    assert weights_epoch(small) != before


def test_names_and_sizes_count(weights: Path) -> None:
    """A shard renamed, grown, added or taken away would go unseen."""
    seen = {weights_epoch(weights)}
    shard = weights / "shards" / "a.safetensors"
    with shard.open("ab") as file:
        file.write(b"\0")
    seen.add(weights_epoch(weights))
    shard = shard.rename(shard.with_name("b.safetensors"))
    seen.add(weights_epoch(weights))
    (weights / "more.bin").write_bytes(b"")
    seen.add(weights_epoch(weights))
    shard.unlink()
    seen.add(weights_epoch(weights))
    assert len(seen) == 5


def test_place_and_hidden_files_do_not_count(weights: Path) -> None:
    """The same model in another folder would start with an empty cache (LMCache#1139's kind)."""
    before = weights_epoch(weights)
    (weights / ".cache").mkdir()
    (weights / ".cache" / "lock").write_text("x")
    (weights / ".DS_Store").write_text("x")
    moved = weights.rename(weights.with_name("elsewhere"))
    assert weights_epoch(moved) == before


def test_the_cache_spares_reading(weights: Path, tmp_path: Path) -> None:
    """Every start would read the weights again, or a damaged cache entry would be believed."""
    cache = tmp_path / "cache"
    before = weights_epoch(weights, cache)
    shard = weights / "shards" / "a.safetensors"
    facts = shard.stat()
    shard.write_bytes(b"\1" * LARGE_BYTES)
    os.utime(shard, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # as if unchanged
    assert weights_epoch(weights, cache) == before
    for entry in (cache / "weights").iterdir():
        entry.write_bytes(b"damaged")
    assert weights_epoch(weights, cache) == weights_epoch(weights) != before


def test_an_unwritable_cache_is_no_error(weights: Path, tmp_path: Path) -> None:
    """A read-only home would keep the cache from starting."""
    blocker = tmp_path / "blocker"
    blocker.write_text("a file where the cache folder should be")
    assert weights_epoch(weights, blocker / "kvtier") == weights_epoch(weights)


def test_cache_folder() -> None:
    """Digests would be written to a place the user did not choose."""
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/kvtier")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/kvtier")
    assert cache_folder({}) is None


def test_missing_or_empty_weights(tmp_path: Path) -> None:
    """Without files every model would have the same epoch."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden").write_text("x")
    for name, says in {"absent": "does not exist", "empty": "holds no files"}.items():
        with pytest.raises(ConfigError, match=says) as caught:
            weights_epoch(tmp_path / name)
        assert caught.value.path == "model.weights"
