"""The demo's conversion: the model appears whole or not at all."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtier.cli.demo import convert, weights  # noqa: E402 -- needs torch
from kvtier.cli.demo.steps import CONVERT_STEPS  # noqa: E402
from tests.tiny_llama import prompt_of, tiny_llama  # noqa: E402

pytestmark = pytest.mark.torch


class FakeTokenizer:
    @classmethod
    def from_pretrained(cls, folder: Path, gguf_file: str) -> "FakeTokenizer":
        return cls()

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


class FakeModel:
    """What transformers gives for a GGUF file: a model with a quantization_config, which it refuses to save."""

    @classmethod
    def from_pretrained(cls, folder: Path, gguf_file: str, dtype: Any) -> Any:
        model = tiny_llama(tie_word_embeddings=True)
        model.config.quantization_config = {"quant_method": "gguf"}
        return model


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "AutoModelForCausalLM", FakeModel)
    monkeypatch.setattr(convert, "AutoTokenizer", FakeTokenizer)


@pytest.mark.usefixtures("fakes")
def test_the_converted_model_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights would get lost or tied wrongly on the way."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "cache" / "model"
    convert.convert(tmp_path / "w.gguf", folder)
    assert weights.is_converted(folder)
    assert capsys.readouterr().out.count('{"step": ') == CONVERT_STEPS
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = prompt_of(20)
    assert torch.equal(loaded(prompt).logits, tiny_llama(tie_word_embeddings=True)(prompt).logits)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.usefixtures("fakes")
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run would load half a model."""
    monkeypatch.setattr(FakeTokenizer, "from_pretrained", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert.convert(tmp_path / "w.gguf", tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("fakes")
def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    """Half a gigabyte would stay for each kill; a running conversion must be left alone, though."""
    (tmp_path / ".converting-999999999").mkdir()
    (tmp_path / ".converting-1").mkdir()  # init is alive
    convert.convert(tmp_path / "w.gguf", tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".converting-1", "model"]


@pytest.mark.usefixtures("fakes")
def test_two_conversions_at_once_both_succeed(tmp_path: Path) -> None:
    """The slower of two demos started together would fail at its rename."""
    convert.convert(tmp_path / "w.gguf", tmp_path / "model")
    convert.convert(tmp_path / "w.gguf", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
