"""What `kvtier bench` is made of: fair turns, honest ratios, raw I/O that moves the right bytes, the machine's name."""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.cli import machine
from kvtier.cli.bench.rawfile import RawFile
from kvtier.cli.bench.report import Cost, Race, Report, counted
from kvtier.cli.bench.timing import Timed, interleave, quartiles

PAGE = 4096


def test_contestants_take_turns_and_clear_up() -> None:
    """One contestant would run while the machine is quiet and the other while it is not, or with the other's mess."""
    seen: list[str] = []

    def contestant(name: str) -> Callable[[], object]:
        @contextmanager
        def turn() -> Iterator[Callable[[], object]]:
            seen.append(f"ready {name}")
            yield lambda: seen.append(f"move {name}")
            seen.append(f"clear {name}")

        return turn

    timed = interleave({name: contestant(name) for name in "ab"}, rounds=8)  # type: ignore[arg-type]
    assert [len(timed[name].wall_s) for name in "ab"] == [len(timed[name].cpu_s) for name in "ab"] == [8, 8]
    moves = [event[-1] for event in seen if event.startswith("move")]
    rounds = ["".join(moves[at : at + 2]) for at in range(0, len(moves), 2)]
    assert len(rounds) == 9  # the first is thrown away
    assert set(rounds) == {"ab", "ba"}
    for at in range(0, len(seen), 3):
        assert [event.split()[0] for event in seen[at : at + 3]] == ["ready", "move", "clear"]


def test_quartiles_of_little() -> None:
    """One round is enough to see that something runs."""
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_the_ratio_is_to_the_fastest_rival() -> None:
    """We would win against the slower of two raw programs and call it the limit."""
    timed = {"kvtier": Timed([2.0], [1.0]), "slow": Timed([4.0], [1.0]), "fast": Timed([1.0], [0.5])}
    record = Race("put", 10, 10**8, timed, 0.8).record()
    assert record["ratios"] == {"slow": 2.0, "fast": 0.5}
    assert (record["best_rival"], record["ratio"]) == ("fast", 0.5)
    assert record["gbs"]["kvtier"]["median"] == pytest.approx(0.5)
    assert record["cpu_s_per_gb"]["fast"] == pytest.approx(0.5)


def test_quartiles_of_speed_are_ordered() -> None:
    """The slow quartile of the times is the low one of the speeds."""
    speed = Race("put", 1, 10**9, {"kvtier": Timed([1.0, 2.0, 3.0], [0.0] * 3)}).gbs("kvtier")
    assert speed["q1"] < speed["median"] < speed["q3"]


def test_a_cost_is_in_its_unit() -> None:
    """Seconds would stand under a target in milliseconds."""
    cost = Cost.of("match", Timed([0.001, 0.002, 0.003], [0.0] * 3), 1.0)
    assert (cost.unit, cost.median, cost.target) == ("ms", pytest.approx(2.0), 1.0)


def test_a_narrow_terminal_cuts_no_figure() -> None:
    """Speeds and targets would end in dots."""
    report = Report("host", {})
    timed = {"kvtier": Timed([0.2, 0.3], [1.0, 2.0]), "torch copy_": Timed([0.4, 0.5], [1.0, 2.0])}
    report.races.append(Race("gpu -> host, scattered", 16, 737_280, timed, 0.8))
    report.costs.append(Cost("RAM of an idle cache, slots and keys apart", "MB", [12.34, 23.45], 100.0))
    said = {}
    for width in (30, 80, 200):
        console = Console(width=width, file=StringIO(), record=True)
        report.show(console)
        said[width] = console.export_text()
    assert "…" not in said[30]
    assert set(said[200].split()) <= set(said[30].split())
    table = said[80].partition("RAM of")[0].splitlines()
    assert max(map(len, table)) <= 80, "the usual terminal would wrap it"


def test_one_block_is_no_blocks() -> None:
    """A table would speak of 1 blocks."""
    assert (counted(1), counted(2), counted(1, "unknown block")) == ("1 block", "2 blocks", "1 unknown block")


def slots(count: int) -> list[memoryview]:
    memory = memoryview(mmap.mmap(-1, count * PAGE))
    return [memory[at * PAGE : (at + 1) * PAGE] for at in range(count)]


@pytest.mark.parametrize("threads", [1, 4])
def test_raw_io_moves_the_right_bytes(tmp_path: Path, threads: int) -> None:
    """The limit we are compared with would be that of a program that does not do the work."""
    try:
        file = RawFile(tmp_path / "raw", PAGE, 40, threads)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    numbers = [7, 3, 4, 5, 39, 0, 20, 21]
    views = slots(len(numbers))
    for number, view in zip(numbers, views, strict=True):
        view[:] = bytes([number + 1]) * PAGE
    file.write(list(zip(numbers, views, strict=True)), sync=True)
    back = slots(len(numbers))
    file.read(list(zip(numbers[::-1], back, strict=True)))
    assert [view[0] - 1 for view in back] == numbers[::-1]
    written = (tmp_path / "raw").read_bytes()
    assert len(written) == 40 * PAGE
    assert written[3 * PAGE] == 4
    assert not written[PAGE]
    with pytest.raises(OSError, match="the disk moved 0 of 4096 bytes"):
        file.read([(40, back[0])])
    file.close()


def test_neighbours_go_in_one_call(tmp_path: Path) -> None:
    """A call per block would be a limit that is easy to beat."""
    try:
        file = RawFile(tmp_path / "raw", 1 << 20, 16, 1)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    views = [memoryview(bytearray(0))] * 16
    runs = [[slot for slot, _ in run] for run in file._runs([(slot, views[0]) for slot in (0, 1, 2, 3, 4, 5, 8, 9)])]
    assert runs == [[0, 1, 2, 3], [4, 5], [8, 9]]  # calls of up to 4 MiB
    file.close()


def test_the_deepest_mount_names_the_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on a disk of its own would be described as lying on the root's."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "28 27 254:1 / /data rw shared:1 - xfs /dev/nvme0n1 rw\n"
        "29 27 0:30 / /data/my\\040disk rw - btrfs /dev/sda1 rw\n"
    )
    monkeypatch.setattr(machine, "MOUNTS", mounts)
    assert machine.filesystem_of(Path("/data/store")) == "xfs on /dev/nvme0n1"
    assert machine.filesystem_of(Path("/data/my disk/store")) == "btrfs on /dev/sda1"
    assert machine.filesystem_of(Path("/database")) == "ext4 on /dev/vda"


def test_the_machine_is_described_on_one_line() -> None:
    """A package that is not installed would be printed as None."""
    facts = machine.machine() | {"torch": None}
    line = machine.machine_line(facts)
    assert "None" not in line
    assert "torch" not in line
    assert f"{len(os.sched_getaffinity(0))} cores" in line
