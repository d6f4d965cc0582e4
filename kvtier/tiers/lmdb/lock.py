"""One writer per store: the lock file, which also says how the last writer left.

Owns: the flock on `lock`, and its content, one line of JSON: pid, boot_id, durability, clean. The state lies
here and not in the index because it decides whether the index may be looked at at all: after a power loss in
mode `none` LMDB's own pages are not to be trusted.
Always: whoever holds a StoreLock is the only writer. A forked child gives up its copy of the handle, so that a
lock never outlives the process that took it.
"""

import fcntl
import json
import os
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier.errors import StoreLocked
from kvtier.tiers.lmdb.layout import LOCK_NAME

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE_BYTES = 256


def boot_id() -> str:
    """Names the current boot of the machine; empty where the kernel does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class WriterState:
    """How the store was last opened, and whether that writer closed it. pid 0: nobody ever did."""

    pid: int = 0
    boot_id: str = ""
    durability: str = ""
    clean: bool = False


def read_state(fd: int) -> WriterState:
    """The state in an open lock file; the default one if it cannot be read."""
    try:
        fields = json.loads(os.pread(fd, _STATE_BYTES, 0))
        state = WriterState(**fields)
    except (ValueError, TypeError):
        return WriterState()
    shapes = {"pid": int, "boot_id": str, "durability": str, "clean": bool}
    right = all(type(getattr(state, name)) is kind for name, kind in shapes.items())
    return state if right else WriterState()


class StoreLock:
    """The exclusive right to write to one store, from `acquire` to `release`."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd = fd
        self.before = read_state(fd)
        self.is_new = os.fstat(fd).st_size == 0  # nobody has come so far as to write a state
        _HELD.add(self)

    @classmethod
    def acquire(cls, folder: Path) -> "StoreLock":
        """Never waits. Raises StoreLocked, which names the holder; OSError if the filesystem cannot lock."""
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = read_state(fd).pid
            os.close(fd)
            raise _locked(folder, pid) from None
        except OSError:  # such as ENOLCK: this filesystem has no locks
            os.close(fd)
            raise
        return cls(folder, fd)

    def write_state(self, state: WriterState) -> None:
        """Replace the state, durably. It is one sector: never half old, half new."""
        line = json.dumps(asdict(state)).encode().ljust(_STATE_BYTES - 1) + b"\n"
        os.pwrite(self._fd, line, 0)
        os.fsync(self._fd)

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close this process's handle and leave the lock itself alone (a forked child's duty)."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _locked(folder: Path, pid: int) -> StoreLocked:
    holder = "this process" if pid == os.getpid() else f"process {pid}" if pid else "another process"
    return StoreLocked(
        str(folder),
        f"{holder} has the store open, and a store has one writer",
        "Close it there, or give this cache a path of its own",
    )


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock.forget()


_HELD: "weakref.WeakSet[StoreLock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)
