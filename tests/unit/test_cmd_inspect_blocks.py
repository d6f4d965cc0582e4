"""`kvtier inspect`: the blocks that it reads and checks, and how fast."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.cli.cmd_inspect import inspect
from kvtier.cli.inspect import show
from kvtier.cli.inspect.pace import Pace, parse_rate
from kvtier.cli.inspect.tally import spread
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.index import Change
from kvtier.types import block_key_of
from tests.inspected import change, folder, report

__all__ = ["folder"]


def test_damage_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rotten store would be called sound."""
    with (folder / "slab").open("r+b") as slab:
        slab.write(b"\0" * 8192)
    for options in ({}, {"verify": True}, {"sample": 13}):
        code, found = report(capsys, folder, **options)
        assert code == 1
        assert (found["verify"]["sound"], found["verify"]["corrupt"]) == (12, 1)
        [bad] = found["condemned"]
        assert (bad["found_by"], bad["place"], bad["namespace"]) == ("inspect", 0, "31" * 32)
        assert bad["key"] == block_key_of(key_of(0)).hex()
        assert bad["detail"] == "its bytes do not match their checksum"
    code, found = report(capsys, folder, sample=0)
    assert (code, found["verify"]["mode"], found["verify"]["blocks"]) == (0, "none", 0)
    os.truncate(folder / "slab", 4096)
    code, found = report(capsys, folder)
    assert code == 1
    assert len(found["findings"]) == 13
    assert inspect(folder) == 1
    assert "damage: " in capsys.readouterr().out


def test_a_sample_is_a_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A look at a large store would take as long as reading it."""
    code, found = report(capsys, folder, sample=5)
    assert (code, found["blocks"], found["verify"]["blocks"]) == (0, 13, 5)


def test_a_block_larger_than_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The buffer for a batch would be too small for a single block of a large model."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=64 << 20, length_bytes_max=3 << 20)
    store.write(range(3), 3 << 20)
    store.write(range(3, 6), 5000)
    store.close()
    waits: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.cli.inspect.pace.Pace.__init__.__defaults__", (lambda: 0.0, waits.append))
        code, found = report(capsys, tmp_path / "s", verify=True, rate="2MiB/s")
    assert (code, found["verify"]["sound"]) == (0, 6)
    assert len(waits) == 4, "each large block is a batch of its own"
    assert waits[-1] == pytest.approx(found["verify"]["read_bytes"] / (2 << 20))


def test_a_bad_sector(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One page that the device refuses would end the look, or pass for corruption."""
    read = BlockFile.read

    def refused(file: BlockFile, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= 3 * 8192 < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")
        return read(file, buffers, offset)

    monkeypatch.setattr(BlockFile, "read", refused)
    code, found = report(capsys, folder, verify=True)
    assert code == 1
    assert (found["verify"]["sound"], found["verify"]["unreadable"], found["verify"]["corrupt"]) == (12, 1, 0)
    assert "Input/output error" in found["condemned"][0]["detail"]


def test_without_direct_io(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On filesystems without O_DIRECT nothing could be checked, or a stale page of the cache be called corrupt."""
    opened = BlockFile.open_readonly

    def buffered(path: Path) -> BlockFile:
        opened(path).close()
        return BlockFile(os.open(path, os.O_RDONLY), direct=False)

    monkeypatch.setattr(BlockFile, "open_readonly", buffered)
    assert report(capsys, folder, verify=True)[1]["verify"]["sound"] == 13
    with (folder / "slab").open("r+b") as slab:
        slab.write(b"\0" * 8192)
    stale = iter([True])
    read = BlockFile.read

    def stale_once(file: BlockFile, buffers: Sequence[memoryview], offset: int) -> int:
        moved = read(file, buffers, offset)
        if next(stale, False):
            buffers[1][0] ^= 1
        return moved

    monkeypatch.setattr(BlockFile, "read", stale_once)
    assert report(capsys, folder, verify=True)[1]["verify"]["corrupt"] == 1, "the second read was right"


def test_lists_have_an_end(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with a million bad records would fill the memory with words about them."""
    monkeypatch.setattr("kvtier.tiers.lmdb.offline.FINDINGS_KEPT", 3)
    monkeypatch.setattr("kvtier.cli.inspect.report.CONDEMNED_KEPT", 2)
    with (folder / "slab").open("r+b") as slab:
        slab.write(b"\0" * 4 * 8192)
    change(folder, Change(blocks={bytes([255, number]): b"x" for number in range(8)}))
    code, found = report(capsys, folder)
    assert (code, found["verify"]["corrupt"]) == (1, 4)
    assert (len(found["condemned"]), found["condemned_left_out"]) == (2, 2)
    assert (len(found["findings"]), found["findings_left_out"]) == (3, 5)
    monkeypatch.setattr(show, "SHOWN_MAX", 1)
    assert inspect(folder) == 1
    text = capsys.readouterr().out
    assert "... and 3 more condemned blocks" in text
    assert "... and 7 more findings" in text


def test_samples_are_spread() -> None:
    """Only the oldest part of a store would ever be verified."""
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread(range(3), 64) == [0, 1, 2]
    assert spread(range(3), 1) == [0]
    assert spread(range(3), 0) == []


def test_pace() -> None:
    """A limited look would take the whole device in bursts, or catch up on what a slow device cost."""
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(parse_rate("4MiB/s"), lambda: now[0], sleep)
    assert pace.batch_bytes(16 << 20) == 1 << 20
    for _ in range(8):
        pace.spend(1 << 20)
    assert now[0] == pytest.approx(2.0, abs=0.25)
    now[0] += 60
    slept.clear()
    for _ in range(8):
        pace.spend(1 << 20)
    assert sum(slept) == pytest.approx(1.75)
    free = Pace(None, lambda: now[0], sleep)
    free.spend(1 << 40)
    assert free.batch_bytes(123) == 123
