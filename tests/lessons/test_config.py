"""Set-ups that look fine and keep nothing: sizes that cannot help, and processes that do not mean the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvtier
from kvtier.blocks.namespace import fingerprint
from kvtier.cli.main import app
from kvtier.errors import ConfigError
from tests.cache_bench import config_for, prompt, serve

ROOT = Path(__file__).parents[2]
CHILD = """
import sys
sys.path.insert(0, {root!r})
import kvtier
from kvtier.blocks.namespace import fingerprint
from tests.cache_bench import config_for, prompt
config = config_for({path!r})
with kvtier.open_sync(config) as cache:
    print(fingerprint(config.model).hex(), cache.peek(prompt(config, 1, 4)).tiers["lmdb"])
"""


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_a_process_with_another_hash_seed_finds_everything(tmp_path, seed):
    """With PYTHONHASHSEED unset or different there are no hits across processes, and nobody says so (LMCache#1139,
    LMCache#2136, LMCache#2979, LMCache#1739)."""
    config = config_for(tmp_path / "store")
    with kvtier.open_sync(config) as cache:
        serve(cache, prompt(config, 1, 4))
    code = CHILD.format(root=str(ROOT), path=str(tmp_path / "store"))
    child = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    assert child.stdout.split() == [fingerprint(config.model).hex(), "16"]


def test_two_set_ups_that_do_not_share_can_be_told_apart(tmp_path):
    """Two processes use one store with different identities: both look fine, and neither finds the other's blocks
    (LMCache#2979, Mooncake#1948). The fingerprints and the field that differs are shown."""
    for epoch in ("v1", "v2"):
        config = config_for(tmp_path / "store", model={"weights_epoch": epoch})
        with kvtier.open_sync(config) as cache:
            serve(cache, prompt(config, 1, 4))
    found = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "store"), "--json"]).stdout)
    shown = {space["fields"]["weights_epoch"]: space for space in found["namespaces"]}
    for epoch in ("v1", "v2"):
        model = config_for(tmp_path / "store", model={"weights_epoch": epoch}).model
        assert shown[epoch]["fingerprint"] == fingerprint(model).hex()
        assert shown[epoch]["blocks"] == 4


@pytest.mark.parametrize(
    ("sizes", "path"),
    [
        ({"gpu": "4KiB"}, r"tiers\[0\]\.capacity"),
        ({"host": "4KiB"}, r"tiers\[1\]\.capacity"),
        ({"gpu": "1MiB", "host": "64KiB"}, r"tiers\[1\]\.capacity.*blocks would be copied down for ever"),
        ({"host": "8MiB", "lmdb": "1MiB"}, r"tiers\[2\]\.capacity"),
        ({"prefetch": {"budget": "2%"}}, r"prefetch\.budget.*no hint could help"),
        ({"limits": {"queue": "1KiB"}}, r"limits\.queue"),
    ],
)
def test_sizes_that_cannot_help_do_not_start(tmp_path, sizes, path):
    """A CPU tier smaller than the GPU's is pure churn (dynamo PR#6506); a ratio of 1.0 leaves a prefetch no room at
    all, silently (sglang PR#26449). What is said has the numbers and what would do."""
    with pytest.raises(ConfigError, match=path) as caught:
        config_for(tmp_path / "store", **sizes)
    assert re.search(r"\d.* less than .*\d", caught.value.problem) or "less than one" in caught.value.problem
    assert re.search(r"Use at least \d", caught.value.remedy)
    assert not (tmp_path / "store").exists()


def test_what_is_called_off_is_seen_to_be_off():
    """Offload is on in one process and off in the other, and both look alike (Mooncake#1948, Mooncake#2011,
    Mooncake#1729): the tiers there are, and what they stored, are in the numbers."""
    for with_host in (True, False):
        config = config_for(host="128KiB" if with_host else None, watermarks=(0.6, 0.9))
        with kvtier.open_sync(config) as cache:
            assert set(cache.stats()["tiers"]) == ({"gpu", "host"} if with_host else {"gpu"})
            assert set(cache.peek(prompt(config, 1, 2)).tiers) == set(cache.stats()["tiers"])
