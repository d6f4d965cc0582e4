"""What docs/compression.md says of sizes is so, and its example loads."""

import re
from pathlib import Path

import pytest
import yaml

import kvtier
from kvtier.blocks.coding import CODECS, FLOATS, HEAD_BYTES, Coding
from kvtier.kernels.exponents import Layout

TEXT = (Path(__file__).parents[2] / "docs" / "compression.md").read_text()


def test_the_example_loads(tmp_path: Path) -> None:
    """The YAML is refused, or the disk keeps other bytes than its comment says."""
    (text,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    data = yaml.safe_load(text)
    data["tiers"][2]["path"] = str(tmp_path / "s")
    assert [tier.codec for tier in kvtier.load_config(data).tiers] == ["none", "int8", "int8"]


@pytest.mark.parametrize("codec", CODECS[1:])
def test_the_table_says_how_much_smaller_blocks_become(codec: str) -> None:
    """A user expects more than there is."""
    (row,) = re.findall(rf"^\| `{codec}` \|(.*)\|$", TEXT, re.M)
    told = [float(cell) for cell in row.split("|")[1:4]]
    values = 64 * 4000
    for dtype, ratio in zip(("float32", "float16", "bfloat16"), told, strict=True):
        raw_bytes, layout = values * FLOATS[dtype][0], Layout.of(dtype, values)
        assert layout is not None
        coded_bytes = layout.escapes if codec == "exp4" else Coding(codec, dtype, 64).room_bytes(raw_bytes)
        assert round(raw_bytes / (coded_bytes - HEAD_BYTES), 2) == ratio, dtype
