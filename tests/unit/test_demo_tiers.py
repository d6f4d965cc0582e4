"""The demo's configurations: small enough to move blocks, large enough to work; a user's is checked first."""

from pathlib import Path

import pytest

from kvtier.cli.demo import text, tiers, weights
from kvtier.errors import ConfigError, UsageError

OWN = """
model: {{name: mine, weights_epoch: one, layers: {layers}, kv_heads: 3, head_dim: 64, dtype: float32}}
tiers:
- {{type: gpu, capacity: 64MiB}}
{more}
"""
LMDB = "- {type: lmdb, name: nvme, path: ./store, capacity: 1GiB}"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("prefix_tokens", [16, 1024, 4096, 8000])
def test_one_prompt_fits_and_all_do_not(model_folder: Path, tmp_path: Path, prefix_tokens: int) -> None:
    """Nothing would move down while users are served, or a prompt would not fit at all."""
    config = tiers.small_tiers(model_folder, prefix_tokens, tmp_path / "store")
    block_bytes = 30 * 2 * 16 * 3 * 64 * 4
    slots = config.tiers[0].capacity_bytes // block_bytes - 1  # without the null slot
    one = (prefix_tokens + text.QUESTION_TOKENS_MAX + text.NEW_TOKENS) / 16
    everyone = one + (len(text.QUESTIONS) - text.NEWCOMERS - 1)  # and at least a tail block for each other user
    assert one <= slots
    assert slots <= everyone + 2
    assert config.tiers[2].capacity_bytes > 2 * config.tiers[0].capacity_bytes
    assert tiers.persistent_name(config) == "lmdb"


def test_a_users_tiers_are_taken(tmp_path: Path) -> None:
    """--config would be ignored, or its store looked for under another name."""
    file = tmp_path / "own.yaml"
    file.write_text(OWN.format(layers=30, more=LMDB))
    config = tiers.own_tiers(file)
    assert config.tiers[1].capacity_bytes == 1 << 30
    assert tiers.persistent_name(config) == "nvme"


def test_a_file_for_another_model_is_refused_with_the_field(tmp_path: Path) -> None:
    """The demo would fail minutes later, in a child process."""
    file = tmp_path / "own.yaml"
    file.write_text(OWN.format(layers=32, more=LMDB))
    with pytest.raises(UsageError, match=r"own\.yaml: .*config\.model\.layers is 32, .*layers: 30"):
        tiers.own_tiers(file)


def test_a_file_without_a_store_is_refused(tmp_path: Path) -> None:
    """The second process would have nothing to restore from."""
    file = tmp_path / "own.yaml"
    file.write_text(OWN.format(layers=30, more=""))
    with pytest.raises(ConfigError, match="no tier survives"):
        tiers.own_tiers(file)


def test_the_shape_is_the_models() -> None:
    """All sizes of the demo would be off."""
    assert weights.SHAPE.layers * weights.SHAPE.kv_heads * weights.SHAPE.head_dim * 2 * 4 == 46_080
