"""kill -9 in the middle of a cache's work: the store and the order of eviction are those of one and the same commit."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cbor2
import pytest

from kvtier.engine.sync import open_sync
from kvtier.types import StoredBlock
from tests.fault.order_writer import ORDER_KEY, configured


@pytest.fixture(params=["none", "batch", "strict"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Serves requests from a process of its own when told to, and kills that."""
    command = [sys.executable, "-m", "tests.fault.order_writer", str(tmp_path / "s"), request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as nursery:
        yield nursery
        assert nursery.stdin is not None
        nursery.stdin.close()


def kept_by(core_tier: object) -> tuple[list[StoredBlock], list[bytes]]:
    """What the store has, oldest write first, and the order that was noted in its last transaction."""
    blocks = list(core_tier.scan())
    rows = dict(core_tier.sidecar())
    return blocks, cbor2.loads(rows[ORDER_KEY])


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_directory_and_order_are_those_of_the_last_commit(
    writer: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """After a crash blocks leave that were just used, for the order is older or younger than the blocks."""
    from kvtier.engine import build

    assert writer.stdin is not None
    assert writer.stdout is not None
    found: list[tuple[list[StoredBlock], list[bytes]]] = []
    open_tier = build.open_tier

    def watched(config, *rest):
        tier = open_tier(config, *rest)
        if config.type == "lmdb":
            found.append(kept_by(tier))
        return tier

    monkeypatch.setattr(build, "open_tier", watched)
    durability = writer.args[-1]
    for seed in range(kills):
        batches = random.Random(seed).randint(8, 60)
        print(seed, batches, file=writer.stdin, flush=True)
        assert writer.stdout.readline().split() == ["killed", str(seed)]
        with open_sync(configured(tmp_path / "s", durability)) as cache:
            core = cache._engine._core
            order, directory = core.residency.orders[1], core.residency.directory
            leaving = [directory.key(handle) for handle in order.candidates(len(order))]
            assert core.check() == []
        blocks, noted = found[-1]
        there = {block.key for block in blocks}
        known = [key for key in noted if key in there]
        assert leaving == known + [block.key for block in blocks if block.key not in {*noted}]
        assert len(known) > 20
