"""The right to mend one store without being its cache: for verbs that change a store which nobody has open.

Owns: the store's lock, and its index and slab for writing. Always: nobody else writes between `open` and `close`; what
`commit` was given is durable when it returns, all of it or nothing; the lock file says in the end what it said before,
for what was not synced then is not synced by this.
Units: bytes.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

import lmdb

from kvtier.errors import StoreError
from kvtier.tiers.lmdb.anew import write_anew
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES, INDEX_BYTES_FIRST
from kvtier.tiers.lmdb.creation import refusal, sync_names
from kvtier.tiers.lmdb.folder import expect_access, expect_store, expect_trust, without_header
from kvtier.tiers.lmdb.index import CHUNK_ROWS, DAMAGE_REMEDY, DATA_NAME, Change, DamagedStore, Index
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.layout import INDEX_NAME, PAYLOAD_NAME, Header
from kvtier.tiers.lmdb.lock import StoreLock, WriterState, boot_id
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.tiers.lmdb.opening import read_header
from kvtier.tiers.lmdb.payloads import open_to_mend
from kvtier.tiers.lmdb.slab import Slab
from kvtier.types import page_aligned

DURABILITY = "strict"


class OwnIndex:
    """The rows of an index that this process writes, as a RowSource."""

    live = False

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self._index = index
        self.get, self.fetch, self.count = index.get, index.fetch, index.count

    def chunks(self, table: str) -> Iterator[list[tuple[bytes, bytes]]]:
        """A table's rows in key order, a thousand at a time."""
        rows = self._index.rows(table)
        while chunk := list(islice(rows, CHUNK_ROWS)):
            yield chunk

    def expect_undisturbed(self) -> None:
        """Nobody disturbs whoever holds the lock."""

    def close(self) -> None:
        """The index is its owner's to close."""


class Upkeep:
    """An open store that this process alone may change. `reader` looks at it with the same eyes as `inspect`."""

    def __init__(self, lock: StoreLock, index: Index, slab: Slab | InlineSlab, header: Header) -> None:
        self.folder = lock.folder
        self.index = index
        self.slab = slab
        self.header = header
        self.reader = StoreReader(OwnIndex(self.folder, index), slab, header, lock.before)
        self._lock = lock
        self._leaves = lock.before  # what the lock file will say

    @classmethod
    def open(cls, folder: Path) -> "Upkeep":
        """Raises StoreLocked, naming the process, if somebody has the store open; StoreError if it is none, or cannot
        be read."""
        expect_store(folder)
        expect_access(folder, live=False)
        try:
            with ExitStack() as undo:
                lock = StoreLock.acquire(folder)
                undo.callback(lock.release)
                expect_trust(folder, lock.before, lock.before.durability, live=False)
                index = Index.open(folder / INDEX_NAME, DURABILITY, _map_bytes(folder / INDEX_NAME / DATA_NAME))
                undo.callback(index.close)
                header = read_header(folder, index)
                if header is None:
                    raise without_header(folder)
                if not lock.before.pid:
                    expect_trust(folder, lock.before, header.durability, live=False)
                slab = open_to_mend(folder, header, DURABILITY)
                undo.callback(slab.close)
                lock.write_state(_state_meanwhile(lock.before, header))
                undo.pop_all()
                return cls(lock, index, slab, header)
        except OSError as error:
            raise refusal(folder, error) from error

    def commit(self, change: Change) -> None:
        """Apply all rows or none, durably. Raises StoreError if the disk refuses; nothing is changed then."""
        try:
            self.index.commit_growing(change, EVICT_RESERVE_BYTES)
        except (OSError, lmdb.Error) as error:
            raise StoreError(str(self.folder), f"nothing was changed: {error}", "Mend that and try again") from error

    def compact_index(self) -> None:
        """Write the index anew without the pages that nobody uses; then this can only be closed.

        Raises StoreError if the disk has no room for a second one; the first is as it was.
        """
        self._replace(self.folder / INDEX_NAME, self.index)

    def compact_payload(self) -> None:
        """The same for payloads that lie inline; then no block can be read."""
        if isinstance(self.slab, InlineSlab):
            self._replace(self.folder / PAYLOAD_NAME, self.slab)

    def _replace(self, folder: Path, table: Index | InlineSlab) -> None:
        try:
            write_anew(folder, table)
        except (OSError, lmdb.Error) as error:
            problem = f"the {folder.name} stays as it is: {error}"
            raise StoreError(str(self.folder), problem, "Make room on the disk") from error
        sync_names(self.folder)

    def renew_state(self) -> bool:
        """Let the lock file say again how the store was left, if it does not; whether that was so.

        It is only open here where what it holds was synced: see `expect_trust`.
        """
        if self._lock.before.pid:
            return False
        self._leaves = _state_meanwhile(self._lock.before, self.header)
        return True

    def close(self) -> None:
        """Let go, and leave the store as clean as it was found."""
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            undo.callback(self.index.close)
            undo.callback(self.slab.close)
            self._lock.write_state(self._leaves)

    def __enter__(self) -> "Upkeep":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _state_meanwhile(before: WriterState, header: Header) -> WriterState:
    """If we die, the store is as good as it was: what a clean one held was synced, and what we commit is, too."""
    durability = DURABILITY if before.clean else before.durability or header.durability
    return replace(before, pid=os.getpid(), boot_id=boot_id(), durability=durability, clean=False)


def _map_bytes(data: Path) -> int:
    if not data.exists():
        raise DamagedStore(str(data.parent.parent), "there is no index", DAMAGE_REMEDY)
    return max(page_aligned(data.stat().st_size), INDEX_BYTES_FIRST)
