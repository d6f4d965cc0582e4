"""What docs/transformers.md shows, runs."""

import pathlib
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.tiny_llama import tiny_llama, tiny_tokenizer  # noqa: E402 -- needs torch

pytestmark = pytest.mark.torch

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs" / "transformers.md").read_text()


def test_every_block_runs_in_order(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a user copies does not work."""
    tiny_llama().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    blocks[0] = re.sub(r"\d+[MG]iB", "64MiB", blocks[0])  # the machine may be small
    blocks = [block.replace("max_new_tokens=64", "max_new_tokens=8") for block in blocks]  # and slow
    names: dict[str, Any] = {}
    sessions = []
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/transformers.md, block {number}", "exec"), names)
        sessions.append(names.get("session"))
    assert all(session.problem is None for session in sessions if session)
    assert names["session"].tokens_restored == 0
    assert names["chat"].session.tokens_restored > 0
    history = names["history"][0].tolist()
    assert names["chat"].histories[0][:40] == history[:40]  # both ways ask the same
    assert "{'gpu': 0, 'host': 0, 'lmdb': 0}" in capsys.readouterr().out


def test_every_link_leads_somewhere() -> None:
    """A document that this one names does not exist."""
    for link in re.findall(r"\]\(([^)#]+)\)", DOCUMENT):
        assert (pathlib.Path(__file__).parents[2] / "docs" / link).exists(), link
