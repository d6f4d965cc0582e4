"""What the README says must run, runs."""

import pathlib
import re
import subprocess
import sys

import pytest
import yaml

import kvtier

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_runs_and_restores_in_a_second_process(tmp_path):
    """The first thing a newcomer copies does not work."""
    code, *_ = blocks("python")
    runs = [
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True) for _ in range(2)
    ]
    assert runs[0].stdout.startswith("0 tokens restored"), runs[0].stderr
    promised = re.search(r"the second process prints `(.*?)`", README).group(1)
    assert runs[1].stdout.strip() == promised


def test_the_yaml_is_a_valid_configuration(tmp_path):
    """The configuration shown is refused."""
    (text,) = blocks("yaml")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"w" * 100)
    (tmp_path / "kvtier.yaml").write_text(text)
    config = kvtier.load_config(tmp_path / "kvtier.yaml", environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert [tier.type for tier in config.tiers] == [tier["type"] for tier in yaml.safe_load(text)["tiers"]]


def test_the_transformers_example_runs(tmp_path):
    """The lines for transformers do not work."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvtier.integrations.transformers import model_spec
    from tests.tiny_llama import tiny_llama

    _, code, _ = blocks("python")
    model = tiny_llama()
    spec = model_spec(model, name="tiny", weights_epoch="v1")
    tiers = [{"type": "gpu", "capacity": "16MiB"}, {"type": "lmdb", "path": str(tmp_path), "capacity": "64MiB"}]
    with kvtier.open_sync({"model": spec, "tiers": tiers}) as cache:
        names = {"cache": cache, "model": model, "input_ids": torch.arange(1, 41).reshape(1, 40)}
        exec(code.replace("max_new_tokens=64", "max_new_tokens=8"), names)
        exec(code.replace("max_new_tokens=64", "max_new_tokens=8"), names)
        assert names["session"].problem is None
        assert names["session"].tokens_restored == 32


def test_the_block_managers_example_runs():
    """The lines for those who build an engine do not work, or print something else than blocks."""
    *_, code = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "8192 blocks; ([1, 2, 3, 4, 5, 6, 7],)\n", done.stderr


def test_every_link_leads_somewhere():
    """A document that the README names does not exist."""
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
