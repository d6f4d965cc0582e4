"""docs/manager.md: its code runs and prints what it says, in a second process, too."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "manager.md").read_text()
ENGINE, TIERS, METRICS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(code, cwd):
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_engine_finds_what_it_computed_before(tmp_path):
    """The engine loop that a reader copies does not work."""
    told = re.findall(r'print\(serve\(.*?\), "tokens found"\)  # (\d+)', ENGINE)
    assert (
        run(ENGINE, tmp_path)[:2]
        == [f"{count} tokens found" for count in told]
        == ["0 tokens found", "480 tokens found"]
    )


def test_what_the_pool_evicts_comes_back_from_the_tiers(tmp_path):
    """An engine with tiers below its pages gets wrong bytes, or none, or only in the same process."""
    assert run(TIERS, tmp_path) == ["first 500", "again 4", "later 4 dropped 0"]
    assert run(TIERS, tmp_path) == ["first 4", "again 4", "later 4 dropped 0"]


def test_metrics_print_what_the_text_says(tmp_path):
    """The example of metrics does not run, or its numbers are not those in the text."""
    rate, life = re.search(r"It prints `(.*?)`, .*?\n`(lived .*?)`", TEXT).groups()
    assert run(METRICS, tmp_path) == [rate, life, life, life]
