"""Where the bench writes: a new ext4 in an image file, or, where that cannot be had, a folder of the given directory.

What an aged filesystem makes of a new file would decide the comparison with files, and others write to its device.
Owns: the image, its loop device and its mount. Always: they are gone when the bench ends, by Ctrl-C or an error too.
Once mounted, the image has no name and its device none who holds it but the mount: after a kill -9 one `umount` gives
everything back. Units: bytes.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread

from kvtier.cli.bench.folder import scratch
from kvtier.tiers.lmdb.meter import device_of, disk_written_bytes

FILL_BYTES = 4 << 20
FORMAT = ("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0")
TOOL_S_MAX = 60


@dataclass(frozen=True, slots=True)
class Volume:
    """`folder`: empty at first. `device`: the kernel's folder of a block device that nobody else writes to, or None.
    `note`: what it is, for the reader of the figures."""

    folder: Path
    device: Path | None
    note: str

    def written_bytes(self) -> int | None:
        """What the device has written; None where others write to it too."""
        return None if self.device is None else disk_written_bytes(self.device)


@contextmanager
def volume(parent: Path | None, size_bytes: int, fresh: bool) -> Iterator[Volume]:
    """A place for so many bytes. Raises UsageError if `parent` is not fit to be measured."""
    with scratch(parent, size_bytes) as folder, ExitStack() as undo:
        if not fresh:
            yield Volume(folder, None, "in the given directory, as asked: its age counts, and so does who else uses it")
            return
        try:
            with ExitStack() as undo_mount:
                point = _mounted(folder, size_bytes, undo_mount)
                undo.push(undo_mount.pop_all())
        except (OSError, subprocess.SubprocessError) as error:
            why = f"no fresh filesystem ({_reason(error)}): in the given directory, whose age counts"
            yield Volume(folder, None, why)
            return
        yield Volume(point, device_of(point), "on a fresh ext4 (loop device, direct I/O) in the given directory")


def _mounted(folder: Path, size_bytes: int, undo: ExitStack) -> Path:
    """Make the filesystem. Raises OSError or SubprocessError where that is refused; `undo` takes back what was done."""
    if os.geteuid():
        raise PermissionError("only root may mount one")
    image, point = folder / "image", folder / "fresh"
    undo.callback(image.unlink, missing_ok=True)
    _write_out(image, size_bytes)
    _run(*FORMAT, str(image))
    undo.callback(_undisturbed, _detach, image)
    device = _run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
    point.mkdir()
    undo.callback(_undisturbed, _unmount, point)
    _run("mount", "-t", "ext4", device, str(point))
    _run("losetup", "--detach", device)  # takes place when the mount goes
    image.unlink()
    return point


def _write_out(image: Path, size_bytes: int) -> None:
    """Every page once: else each page's first write, whoever does it, pays for what the filesystem below notes down."""
    page = os.urandom(FILL_BYTES)
    with image.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        for start in range(0, size_bytes, FILL_BYTES):
            file.write(page[: size_bytes - start])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _detach(image: Path) -> None:
    """Also if we never learned which device it got."""
    for line in _run("losetup", "--associated", str(image)).splitlines():
        _run("losetup", "--detach", line.partition(":")[0])


def _unmount(point: Path) -> None:
    """With a store that is still open it goes when the process does."""
    if not point.is_mount():
        return
    try:
        _run("umount", str(point))
    except subprocess.SubprocessError:
        _run("umount", "--lazy", str(point))


def _run(*command: str) -> str:
    """A tool's output. It does not hear of Ctrl-C: whoever started it does."""
    done = subprocess.run(  # noqa: S603 -- fixed tools, our own paths
        command, capture_output=True, text=True, check=True, timeout=TOOL_S_MAX, start_new_session=True
    )
    return done.stdout


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", "") or str(error)
    return said.strip().splitlines()[-1]


def _undisturbed(clean_up: Callable[[Path], None], path: Path) -> None:
    """Clean up, whatever is pressed meanwhile."""
    if current_thread() is not main_thread():
        return clean_up(path)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        clean_up(path)
    finally:
        signal.signal(signal.SIGINT, before)
