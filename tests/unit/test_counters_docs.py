"""docs/counters.md lists exactly what `stats()` gives, for each kind of tier."""

import pathlib
import re

import pytest

import kvtier
from kvtier.metrics import ENGINE_COUNTERS, TIER_COUNTERS
from tests.cache_bench import config_for, prompt, serve

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "counters.md").read_text()
TABLES = re.split(r"^\| (over all|per tier) \|.*$", TEXT, flags=re.M)[1:]
KINDS = ("gpu", "host", "lmdb")


def rows(table):
    """The first cell of each row, and the cells behind it."""
    lines = re.findall(r"^\| `(\w+)` \|(.*) \|$", table, re.M)
    return {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in lines}


OVER_ALL, PER_TIER, SIZES, TIER_SIZES = (rows(table) for table in TABLES[1::2])


@pytest.fixture(scope="module")
def stats(tmp_path_factory):
    config = config_for(tmp_path_factory.mktemp("store") / "store")
    with kvtier.open_sync(config) as cache:
        serve(cache, prompt(config, 1, 3))
        cache.flush()
        yield cache.stats()


def test_the_counters_are_those_that_are_kept():
    """A counter is promised that does not exist, or one exists that nobody can know of."""
    assert tuple(OVER_ALL) == ENGINE_COUNTERS
    assert tuple(PER_TIER) == TIER_COUNTERS


def test_the_sizes_over_all_are_those_given(stats):
    """The same, for the sizes."""
    assert {*stats} == {*OVER_ALL, *SIZES, "tiers"}
    assert not {*OVER_ALL} & {*SIZES}, "a name means two things"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_tier_has_the_sizes_that_are_told(stats, kind):
    """A dashboard asks a disk for its slots, or memory for its used bytes, and gets a KeyError."""
    told = {name for name, (kinds, *_) in TIER_SIZES.items() if kinds == "all" or kind in kinds.split(", ")}
    assert {*stats["tiers"][kind]} == told | {*PER_TIER}
    assert len(told) < len(TIER_SIZES), "nothing is told of what this kind lacks"


def test_the_kinds_told_exist():
    """A kind of tier is misspelled, and its row means nothing."""
    for kinds, *_ in TIER_SIZES.values():
        assert kinds == "all" or {*kinds.split(", ")} <= {*KINDS}
