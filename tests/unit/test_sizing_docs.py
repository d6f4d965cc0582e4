"""What docs/sizing.md shows is what comes out."""

import pathlib
import re

from kvtier.cache.models.layers import layers_of
from kvtier.cache.sizing import size
from kvtier.config.units import readable_bytes
from tests import published_models as published

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "sizing.md").read_text()


def test_the_examples_print_what_is_shown(capsys):
    """Somebody copies an example and sees other numbers."""
    names = {}
    examples = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) == 2
    for code, shown in examples:
        exec(code, names)
        assert capsys.readouterr().out == shown
    assert names["layers_of"](names["model"]) == layers_of(published.GEMMA3_4B)


def test_the_table_of_known_figures_is_so():
    """A figure changed, and the table was not."""
    rows = [re.split(r" \| ", row) for row in re.findall(r"^\| (\w.*-.*) \|$", TEXT, re.M)]
    models = [published.LLAMA3_8B, published.QWEN3_8B, published.GEMMA3_4B, published.DEEPSEEK_V3, published.BAMBA_9B]
    for (_, *cells), model in zip(rows, models, strict=True):
        sizing = size(layers_of(model), 16 << 30, tokens_max=8192)
        (tokens,) = {spec.block_tokens for spec in sizing.layers.values()}
        assert cells == [
            f"{sizing.token_bytes:,} bytes",
            f"{sizing.token_bytes_kept:,}",
            f"{len(sizing.groups)}",
            f"{tokens} tokens, {readable_bytes(sizing.block_bytes)}",
            f"{sizing.blocks_total:,}",
            f"{sizing.concurrency:.2f}",
            f"{sizing.padding_share:.1%}",
        ]
