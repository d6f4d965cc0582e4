"""What docs/sequence_views.md shows, runs."""

import pathlib
import re

import pytest

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "sequence_views.md").read_text()


@pytest.mark.torch
def test_the_example_runs():
    """Whoever copies the example gets an error, or attention over other tokens."""
    torch = pytest.importorskip("torch")
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    told = code.replace(
        "    cache.release(lease)", "    wanted = [cache.kv(layer=1)[n].copy() for n in 'kv']\n    cache.release(lease)"
    )
    names: dict = {}
    exec(compile(told, "docs/sequence_views.md", "exec"), names)
    slots = list(names["lease"].record.slots[0])
    k, v = (torch.from_numpy(part[slots].reshape(24, 2, 16)[:20]).permute(1, 0, 2)[None] for part in names["wanted"])
    attend = torch.nn.functional.scaled_dot_product_attention
    assert names["out"].shape == (1, 2, 1, 16)
    assert torch.allclose(names["out"], attend(names["query"], k, v))
