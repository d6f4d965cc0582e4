"""The LMDB environment that inline payloads lie in, as files fail: OSError, and ENOSPC for all that means "no room".

Owns: the environment, its file's descriptor, and a gate between readers and a change of the map's size, which LMDB
forbids while a transaction of ours is open. Always: before a table counts as full, readers that died are let go of, for
LMDB uses no page again that one of them may see; a full table can be emptied, for which LMDB needs new pages first:
DELETE_RESERVE_BYTES behind its limit, or behind its end if a limit that became smaller lies before that.
Units: bytes.
"""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from kvtier.tiers.lmdb.blockfile import NO_SPACE, disk_bytes
from kvtier.tiers.lmdb.creation import NEW_STORE_BYTES
from kvtier.tiers.lmdb.environment import Opening
from kvtier.tiers.lmdb.index import DATA_NAME, SYNC_MODES, claim_readers, errno_of
from kvtier.tiers.lmdb.pages import check_index

_log = logging.getLogger(__name__)
_READERS_MAX = 126
DELETE_RESERVE_BYTES = 256 << 10

Result = TypeVar("Result")


class PayloadTable:
    """Rows of one environment. `change`, `limit` and `sync` from one thread at a time, `reading` from any."""

    def __init__(self, env: Any, fd: int, opening: Opening) -> None:
        self.fd = fd
        self._env = env
        self._opening = opening
        self._map_bytes = int(env.info()["map_size"])  # known also when LMDB has failed
        self.limit_bytes = self._map_bytes
        self._gate = _Gate()

    @classmethod
    def open(cls, folder: Path, durability: str, map_bytes: int) -> "PayloadTable":
        """Open for writing, create if absent. map_bytes: the hard limit of the file, unless it is longer already.

        Raises CorruptBlock, lmdb.Error or OSError.
        """
        sync, metasync = SYNC_MODES[durability]
        folder.mkdir(mode=0o700, exist_ok=True)
        claim_readers(folder)
        if (folder / DATA_NAME).exists():
            check_index(folder / DATA_NAME)
        options = {"map_size": map_bytes, "sync": sync, "metasync": metasync, "mode": 0o600}
        return cls._opened(folder, os.O_RDWR, options)

    @classmethod
    def open_readonly(cls, folder: Path, live: bool) -> "PayloadTable":
        """Open for a look; with no live writer nothing is written or locked. Raises CorruptBlock, lmdb.Error or
        OSError."""
        if not live:
            check_index(folder / DATA_NAME)
        return cls._opened(folder, os.O_RDONLY, {"readonly": True, "lock": live, "create": False})

    @classmethod
    def _opened(cls, folder: Path, access: int, options: dict[str, Any]) -> "PayloadTable":
        options |= {"readahead": False, "max_readers": _READERS_MAX}
        env = lmdb.open(str(folder), **options)
        try:
            env.reader_check()  # whoever died before us may have filled the reader table
            options.pop("map_size", None)
            return cls(env, os.open(folder / DATA_NAME, access | os.O_CLOEXEC), Opening(folder / DATA_NAME, options))
        except BaseException:
            env.close()
            raise

    # ------------------------------------------------------------ transactions

    @contextmanager
    def reading(self, **options: Any) -> Iterator[Any]:
        """A read transaction. Raises OSError."""
        with self._gate.shared():
            try:
                with self._begin(**options) as txn:
                    yield txn
            except lmdb.Error as error:
                raise self._as_oserror(error) from error

    def change(self, work: Callable[[Any], Result]) -> Result:
        """What `work` makes of a write transaction, which is committed; it is called anew where it needs more room and
        dead readers held some. Raises OSError: then nothing was changed."""
        while True:
            try:
                return self._changed(work)
            except OSError as error:
                if error.errno not in NO_SPACE or not self.release_dead_readers():
                    raise

    def delete(self, work: Callable[[Any], Result]) -> Result:
        """The same, for what makes room: it may use the reserve."""
        try:
            return self.change(work)
        except OSError as error:
            if not isinstance(error.__cause__, lmdb.MapFullError):
                raise
        limit_bytes = self.limit_bytes
        self.limit(max(limit_bytes, self._end_bytes()) + DELETE_RESERVE_BYTES)
        try:
            return self._changed(work)
        finally:
            self.limit(limit_bytes)

    def sync(self) -> None:
        """Make everything committed durable. Raises OSError."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise self._as_oserror(error) from error

    def release_dead_readers(self) -> int:
        """How many there were; 0 too where LMDB cannot tell."""
        try:
            return int(self._env.reader_check())
        except lmdb.Error as error:
            _log.warning("%s: its readers cannot be looked at: %s", self._opening.data, error)
            return 0

    # ------------------------------------------------------------ sizes

    def map_bytes(self) -> int:
        """What the file may grow to: `limit_bytes`, or its length. Any thread, no I/O, never raises."""
        return self._map_bytes

    def limit(self, map_bytes: int) -> None:
        """Set the hard limit of the file; one that it exceeds becomes its length. Raises OSError; it is what it was
        then."""
        with self._gate.alone():
            try:
                self._env.set_mapsize(map_bytes)
                self._map_bytes = int(self._env.info()["map_size"])
            except lmdb.Error as error:
                self._open_again()
                raise self._as_oserror(error) from error
        self.limit_bytes = map_bytes

    def used_bytes(self) -> int:
        """What the rows take, and would take if the file held nothing else."""
        stat = self._env.stat()
        return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))

    def disk_bytes(self) -> int:
        """What the filesystem has claimed for the file."""
        return disk_bytes(self.fd)

    def disk_free_bytes(self) -> int:
        """What the filesystem has left for us. Raises OSError."""
        filesystem = os.fstatvfs(self.fd)
        return filesystem.f_bavail * filesystem.f_frsize

    def copy_to(self, fd: int) -> None:
        """Write the rows, and nothing else, as a table of their own. Raises lmdb.Error or OSError."""
        self._env.copyfd(fd, compact=True)

    def close(self) -> None:
        """Idempotent."""
        self._env.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # ------------------------------------------------------------ inside

    def _open_again(self) -> None:
        """LMDB has closed the environment: go on as before, or, if that fails, let every call raise."""
        try:
            self._env = self._opening.again(self._env, self.fd, self._map_bytes)
        except (OSError, lmdb.Error) as error:
            _log.error("%s: the table of payloads is closed: %s", self._opening.data, error)

    def _changed(self, work: Callable[[Any], Result]) -> Result:
        try:
            with self._env.begin(write=True) as txn:
                return work(txn)
        except lmdb.Error as error:
            raise self._as_oserror(error) from error

    def _end_bytes(self) -> int:
        """Behind the last page that was ever used."""
        return (int(self._env.info()["last_pgno"]) + 1) * int(self._env.stat()["psize"])

    def _begin(self, **options: Any) -> Any:
        """If another process has let the file outgrow our map, the map follows first."""
        while True:
            try:
                return self._env.begin(**options)
            except lmdb.MapResizedError:
                self._env.set_mapsize(0)

    def _as_oserror(self, error: lmdb.Error) -> OSError:
        """What a file would say. LMDB says EIO for a write that was cut short, whatever the reason."""
        code = errno_of(error) or errno.EIO
        if isinstance(error, lmdb.MapFullError | lmdb.DiskError) or (code == errno.EIO and self._is_disk_full()):
            code = errno.ENOSPC
        return OSError(code, str(error))

    def _is_disk_full(self) -> bool:
        try:
            return self.disk_free_bytes() < NEW_STORE_BYTES
        except OSError:
            return False


class _Gate:
    """Many may pass at once, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nobody is inside, and lets nobody in meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._inside)
            yield
