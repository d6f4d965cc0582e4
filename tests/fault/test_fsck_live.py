"""`kvtier fsck` beside a writer at full speed: it finds nothing where nothing is, and mends nothing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from tests.fault.test_inspect_live import CHURN, writing

ROUNDS = 5


INLINE = CHURN.replace("capacity_bytes=4 << 20", 'capacity_bytes=12 << 20, payload="inline"')


@pytest.mark.parametrize("code", [CHURN, INLINE], ids=["slab", "inline"])
def test_no_false_alarm(tmp_path: Path, code: str) -> None:
    """What a writer is just doing would be called damage, and a sound store be thrown away."""
    with writing(code, tmp_path / "s") as writer:
        for _ in range(ROUNDS):
            done = CliRunner().invoke(app, ["fsck", str(tmp_path / "s"), "--json"])
            found = json.loads(done.stdout)
            assert (done.exit_code, found["live"], found["findings"], found["condemned"]) == (0, True, [], [])
        told = writer.end()
    assert told["refused"] == []
    assert CliRunner().invoke(app, ["fsck", str(tmp_path / "s")]).exit_code == 0


@pytest.mark.parametrize(
    "verb", [["fsck", "--repair"], ["gc"], ["drop", "--namespace", "x", "--yes"]], ids=lambda verb: verb[0]
)
def test_a_verb_that_changes_things_refuses(tmp_path: Path, verb: list[str]) -> None:
    """Rows would be taken away from under a cache that serves from them."""
    with writing(CHURN, tmp_path / "s") as writer:
        done = CliRunner().invoke(app, [verb[0], str(tmp_path / "s"), *verb[1:], "--json"])
        assert done.exit_code == 2
        assert f"process {writer.process.pid} has the store open" in json.loads(done.stdout)["error"]
        assert writer.end()["refused"] == []
