"""The filesystem that `kvtier bench nvme` makes for itself: fresh where it can be had, and gone whatever happens."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.bench.nvme import volume as volumes
from kvtier.cli.bench.nvme.volume import volume
from kvtier.cli.machine import filesystem_of
from tests.bench_disk import clean_disk, disk

__all__ = ["clean_disk", "disk"]

SIZE_BYTES = 24 << 20
PATIENCE_S = 60.0


@pytest.fixture
def unmounted(clean_disk: Path) -> Iterator[Path]:
    """A folder on a disk; afterwards nothing is mounted there."""
    yield clean_disk
    assert str(clean_disk) not in Path("/proc/self/mountinfo").read_text()
    give_up_s = time.monotonic() + PATIENCE_S
    while attached(clean_disk) and time.monotonic() < give_up_s:  # the kernel detaches in its own time
        os.sched_yield()
    assert not attached(clean_disk)


def attached(disk: Path) -> list[str]:
    """Loop devices whose image lies there."""
    backing = Path("/sys/block").glob("loop*/loop/backing_file")
    return [text for file in backing if (text := read(file)).startswith(str(disk))]


def read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # detached meanwhile
        return ""


@pytest.fixture
def root(unmounted: Path) -> Path:
    """The same, where a filesystem can be mounted."""
    with volume(unmounted, SIZE_BYTES, fresh=True) as place:
        note = place.note
    if "no fresh filesystem" in note:
        pytest.xfail(note)  # no lack of the environment's that KVTIER_REQUIRE_ALL could have mended
    return unmounted


def test_a_fresh_filesystem_is_empty_and_counts_our_writes(root: Path) -> None:
    """An aged filesystem, or somebody else's writes, would be measured."""
    with volume(root, SIZE_BYTES, fresh=True) as place:
        assert filesystem_of(place.folder).startswith("ext4 on")
        assert [entry.name for entry in place.folder.iterdir()] == ["lost+found"]
        assert "fresh ext4" in place.note
        before = place.written_bytes()
        assert before is not None
        with (place.folder / "file").open("wb") as file:
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        written_bytes = (place.written_bytes() or 0) - before
        assert 1 << 20 <= written_bytes <= 3 << 20
        assert not list(root.rglob("image"))  # whoever unmounts it, by hand too, has the disk back


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_it_goes_however_the_bench_ends(root: Path, error: type[BaseException]) -> None:
    """Ctrl-C would leave a mount and gigabytes behind."""

    def fail(place: volumes.Volume) -> None:
        (place.folder / "file").write_bytes(b"something")
        raise error

    with pytest.raises(error), volume(root, SIZE_BYTES, fresh=True) as place:
        fail(place)


def test_it_goes_when_the_bench_is_told_to_end(root: Path) -> None:
    """A polite kill would leave them."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, volume(root, SIZE_BYTES, fresh=True):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_file_that_is_still_open_keeps_nobody(root: Path) -> None:
    """A store that failed to close would keep the mount for good."""
    with volume(root, SIZE_BYTES, fresh=True) as place:
        left_open = (place.folder / "file").open("wb")
    assert str(root) not in Path("/proc/self/mountinfo").read_text()
    left_open.close()


def test_clearing_up_is_not_interrupted(unmounted: Path) -> None:
    """A second Ctrl-C, while the first one is clearing up, would leave the mount."""
    cleared = []

    def clear_up(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        cleared.append(path)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest runs in the background
    try:
        volumes._undisturbed(clear_up, unmounted)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleared == [unmounted]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("FORMAT", ("sh", "-c", "echo it will not >&2; exit 1"), "it will not"),
        ("FORMAT", ("no-such-tool",), "No such file or directory: 'no-such-tool'"),
    ],
)
def test_without_it_the_directory_is_measured_and_that_is_said(
    unmounted: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, why: str
) -> None:
    """Figures of an aged filesystem would be taken for those of a fresh one."""
    monkeypatch.setattr(volumes.os, "geteuid", lambda: 0)
    monkeypatch.setattr(volumes, name, value)
    with volume(unmounted, SIZE_BYTES, fresh=True) as place:
        assert place.device is None
        assert place.written_bytes() is None
        assert place.note.startswith("no fresh filesystem (")
        assert why in place.note
        assert [entry.name for entry in place.folder.iterdir()] == ["direct"]  # by which O_DIRECT was tried


def test_a_mount_that_fails_takes_its_device_along(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failed run would take one of a few loop devices."""
    inner = volumes._run

    def failing(*command: str) -> str:
        if command[0] == "mount":
            raise subprocess.CalledProcessError(32, command, stderr="not today")
        return inner(*command)

    monkeypatch.setattr(volumes, "_run", failing)
    with volume(root, SIZE_BYTES, fresh=True) as place:
        assert "no fresh filesystem (not today)" in place.note
        assert not attached(root)


def test_only_root_mounts(unmounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would be shown an error of a tool they never asked for."""
    monkeypatch.setattr(volumes.os, "geteuid", lambda: 1000)
    with volume(unmounted, SIZE_BYTES, fresh=True) as place:
        assert "only root may mount one" in place.note


def test_it_is_not_made_where_that_is_not_wanted(unmounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants to know about their own filesystem could not."""
    monkeypatch.setattr(volumes, "_run", lambda *command: pytest.fail(f"{command} was run"))
    with volume(unmounted, SIZE_BYTES, fresh=False) as place:
        assert place.device is None
        assert "as asked" in place.note
