"""docs/extending.md: its code runs, prints what it says, and its example of a new kind of attention is right."""

import pathlib
import re
import subprocess
import sys

import pytest

from kvtier.cache.groups import GroupManager, register_group
from kvtier.cache.groups.full import FullGroup
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.specs import FullAttention, Group, Spec
from kvtier.errors import UsageError

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
TIER = BLOCKS[-2:]

ATTACK = """
from kvtier.cache.specs import SlidingWindow

def heads(**more):
    return dict(block_tokens=more.pop("block_tokens", 16), kv_heads=8, head_dim=128, dtype="bfloat16", **more)

for groups, eagle in (
    ([Group(SinkWindow(**heads(sink_tokens=4, window=64)))], True),
    ([Group(SinkWindow(**heads(sink_tokens=20, window=33))), Group(FullAttention(**heads(block_tokens=32)))], False),
    ([Group(SinkWindow(**heads(sink_tokens=20, window=33))), Group(SlidingWindow(**heads(window=50)))], True),
):
    manager = KVCacheManager(groups, blocks_total=200, tokens_max=4096, eagle=eagle)
    for length in (40, 64, 65, 130, 400, 401):
        request = manager.request(f"r{length}", range(length))
        hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, length - hit.tokens, hit) is not None
        table, size = manager.block_ids(request)[0], 16
        spec = groups[0].spec
        for token in (*range(min(spec.sink_tokens, length)), *range(max(hit.tokens - spec.window + 1, 0), length)):
            assert table[token // size], (length, hit.tokens, token)
        assert manager.check() == []
        manager.free(request)
    assert hit.tokens >= 336, hit.tokens
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_the_code_prints_what_the_document_says():
    """The document's example fails, or gives other figures than it tells."""
    done = run("\n".join(BLOCKS[:-2]))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "26 blocks long, of which it holds 6\n400 tokens need not be computed\n[True, True, False, False]\n"
    )


def test_the_new_kind_of_attention_always_has_what_it_reads():
    """The example serves a prefix with a hole in its window, beside other groups or with a dropped block."""
    done = run("\n".join([*BLOCKS[:3], ATTACK]))
    assert done.returncode == 0, done.stderr


def test_registering_is_checked():
    """A slip replaces the manager of a built-in kind, or fails later and elsewhere."""
    for spec, manager in ((FullAttention, FullGroup), (int, FullGroup), (Spec, int), ("spec", FullGroup)):
        with pytest.raises(UsageError):
            register_group(spec, manager)


def test_a_spec_without_a_manager_is_refused():
    """A kind nobody manages gets some other kind's manager."""

    class Odd(Spec):
        kind = "odd"

        @property
        def content_bytes(self):
            return 1

    with pytest.raises(UsageError, match="register_group"):
        KVCacheManager([Group(Odd(block_tokens=16))], 10, tokens_max=100)
    assert GroupManager.shareable


def test_the_tier_keeps_its_contract(tmp_path):
    """The example of a tier is wrong, or its suite tests nothing."""
    right = "\n".join(TIER)
    wrong = right.replace("target[length_bytes:] = bytes", "bytes")
    found = {}
    for name, code in (("right", right), ("wrong", wrong)):
        (tmp_path / f"test_{name}.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        done = subprocess.run([*command, str(tmp_path / f"test_{name}.py")], capture_output=True, text=True, timeout=60)
        found[name] = re.findall(r"FAILED .*::(\w+)", done.stdout), re.findall(r"(\d+) passed", done.stdout)
    assert found == {"right": ([], ["9"]), "wrong": (["test_padding_is_zero"], ["8"])}
