"""The index of a store that somebody else may be writing to.

Owns: a read-only index handle, and the knowledge of which files it belongs to. Always: a transaction lasts for one
call, never while the caller thinks or reads payload. With a live writer LMDB's reader table is used, for those
moments only; with none it is not, and Overtaken is raised as soon as a writer comes after all.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Protocol

import lmdb

from kvtier.errors import StoreError
from kvtier.tiers.lmdb.folder import (
    expect_access,
    expect_store,
    expect_trust,
    has_writer,
    identity_of,
    stamp_of,
    state_of,
    without_header,
)
from kvtier.tiers.lmdb.index import CHUNK_ROWS, Index, refused
from kvtier.tiers.lmdb.layout import INDEX_NAME, LOCK_NAME, Header
from kvtier.tiers.lmdb.opening import read_header


class Overtaken(Exception):
    """A writer came; what was read without its knowledge may be nonsense. Open anew, live."""


class RowSource(Protocol):
    """A store's rows as bytes, by whatever right they are read. No transaction outlives a call."""

    folder: Path
    live: bool  # somebody else writes meanwhile

    def chunks(self, table: str) -> Iterator[list[tuple[bytes, bytes]]]: ...

    def get(self, table: str, key: bytes) -> bytes | None: ...

    def fetch(self, place_keys: Sequence[bytes]) -> list[bytes | None]: ...

    def count(self, table: str) -> int: ...

    def expect_undisturbed(self) -> None: ...

    def close(self) -> None: ...


def header_of(folder: Path) -> Header:
    """What a store was made as, and how it was last opened. Raises StoreError or OSError."""
    expect_store(folder)
    stamp, live = stamp_of(folder), has_writer(folder / LOCK_NAME)
    state = state_of(folder)
    expect_trust(folder, state, state.durability, live)
    expect_access(folder, live)
    with closing(ForeignIndex(folder, live, stamp)) as index:
        header = index.header()
    if header is None:
        raise without_header(folder)
    return header


class ForeignIndex:
    """Rows of one store, as bytes. Every verb may raise StoreError, or Overtaken if not `live`."""

    def __init__(self, folder: Path, live: bool, stamp: int) -> None:
        """stamp: `stamp_of` the folder before it was found to have no writer."""
        self.folder = folder
        self.live = live
        self._stamp = stamp
        self._identity = identity_of(folder)
        self._index = Index.open_readonly(folder / INDEX_NAME, live)
        self._transaction = self._index.transaction_id()

    def header(self) -> Header | None:
        with self._reading():
            return read_header(self.folder, self._index)

    def chunks(self, table: str) -> Iterator[list[tuple[bytes, bytes]]]:
        """A table's rows in key order, as many at a time as one transaction gives."""
        rows = self._index.rows(table)
        while True:
            with self._reading():
                chunk = list(islice(rows, CHUNK_ROWS))
            if not chunk:
                return
            yield chunk

    def get(self, table: str, key: bytes) -> bytes | None:
        with self._reading():
            return self._index.get(table, key)

    def fetch(self, place_keys: Sequence[bytes]) -> list[bytes | None]:
        """The records at these places."""
        with self._reading():
            return self._index.fetch(place_keys)

    def count(self, table: str) -> int:
        """How many rows a table has."""
        with self._reading():
            return self._index.count(table)

    def expect_undisturbed(self) -> None:
        """Raises Overtaken if a writer came that does not know of this reader, StoreError if the store went away."""
        try:
            gone = identity_of(self.folder) != self._identity
            came = not self.live and (
                stamp_of(self.folder) != self._stamp or self._index.transaction_id() != self._transaction
            )
        except FileNotFoundError:
            gone, came = True, False
        if gone:
            raise StoreError(str(self.folder), "it was deleted or replaced while it was read", "Look at it again")
        if came:
            raise Overtaken

    def close(self) -> None:
        self._index.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Around each transaction: what it found counts only if nobody disturbed it.

        Without the reader table a page may be used again under us only after two commits, so a writer that is not
        there before cannot do harm within the moment that a transaction takes; that it came is seen afterwards.
        """
        self.expect_undisturbed()
        try:
            yield
        except lmdb.Error as error:
            self.expect_undisturbed()
            raise refused(self.folder, "index", error) from error
        self.expect_undisturbed()
