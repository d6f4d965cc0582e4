"""docs/lessons.md promises a test for every case: the tests are there, and no case is left out."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "lessons.md").read_text()
NAMED = sorted({*re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)})

# Every case that was collected when the movement of blocks was designed.
CASES = """
LMCache#4991 LMCache#4463 LMCache#PR4467 dynamo#15079 dynamo#14416 LMCache#3388 sglang#PR26670 sglang#PR31108
sglang#PR22811 sglang#27504 sglang#38031 sglang#PR21125 Mooncake#4153 vllm#49250 vllm#42125 lmdeploy#4917 ATOM#PR1807
sglang#30760 sglang#22607 sglang#PR33029 LMCache#2942 LMCache#4676 LMCache#RFC4945 LMCache#PR4517 vllm#49176
dynamo#5012 dynamo#6032 LMCache#4133 kvcached#371 kvcached#PR422 kvcached#372 vllm#50687 vllm#PR45497 Mooncake#2156
LMCache#1034 LMCache#2017 LMCache#PR3884 LMCache#PR2785 LMCache#3381 kvcached#364 kvcached#262 kvcached#463
vllm#PR51317 LMCache#4664 Mooncake#3452 sglang#26305 sglang#12809 LMCache#1109 LMCache#2205 LMCache#1938 vllm#49902
sglang#32724 sglang#PR31398 sglang#19320 vllm#RFC50031 LMCache#1139 LMCache#2136 LMCache#2979 LMCache#1739 Mooncake#1948
Mooncake#2011 Mooncake#1729 dynamo#PR6506 sglang#PR26449 LMCache#1260 LMCache#2574 sglang#26608 dynamo#4549 dynamo#4840
LMCache#562 LMCache#1175 LMCache#1788 LMCache#PR4778 Mooncake#1196 Mooncake#2306 Mooncake#PR2077 LMCache#2273
sglang#37160 LMCache#PR2757 LMCache#PR926 llm-d-kv-cache#396 vllm#9744 FlexKV#PR258 vllm#39732 vllm#PR52838
vllm#PR49328 vllm#PR55297 vllm#44294 vllm#46014 vllm-ascend#16662 vllm#46951 vllm#45704 vllm#47282 vllm#54363 vllm#54779
vllm#PR54327 vllm#55904 vllm#PR55191 vllm#57159 vllm#PR52771 vllm#26329 LMCache#1330 vllm#44249 llm-d-kv-cache#526
sglang#36179 slime#PR1694 vllm#PR53347
"""


@cache
def functions_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("path", "test"), NAMED)
def test_a_test_that_is_named_exists(path: str, test: str) -> None:
    """A case points to a test that was renamed or deleted: nobody looks at it any more."""
    assert test in functions_in(path)


def test_no_case_is_left_out() -> None:
    """A case was collected and forgotten."""
    missing = []
    for case in CASES.split():
        project, number = case.split("#")
        kind = re.match(r"[A-Z]*", number)
        assert kind is not None
        name = f"{project} {kind[0]}#{number[kind.end() :]}" if kind[0] else case
        if not re.search(re.escape(name) + r"\b", TEXT):
            missing.append(name)
    assert not missing
    assert len(CASES.split()) > 100


def test_every_row_but_the_last_table_has_a_test() -> None:
    """A case has an answer that nothing tests."""
    applies, _, _ = TEXT.partition("## Not here yet")
    rows = [line for line in applies.splitlines() if re.match(r"\| [\w-]+ ?(PR|RFC)?#\d", line)]
    assert len(rows) > 40
    assert [row for row in rows if "::test_" not in row] == []
