"""An open store: its parts, and the two moments at which all of them change together.

Owns: the parts. Always: what opening found is written down (`settle`) before anything else is; a store that cannot
settle, because its disk is full, can be read, and closes as it was found.
Units: bytes.
"""

import errno
import logging
from collections.abc import Container, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import lmdb

from kvtier.allocator.extents import ExtentAllocator
from kvtier.tiers.lmdb.blockfile import NO_SPACE
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES, Budget
from kvtier.tiers.lmdb.creation import NEW_STORE_BYTES, sync_names
from kvtier.tiers.lmdb.index import Index, errno_of
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.layout import GENERATION_KEY, HEADER_KEY, Header, encode_header, encode_limit
from kvtier.tiers.lmdb.loading import Stock
from kvtier.tiers.lmdb.lock import StoreLock, WriterState
from kvtier.tiers.lmdb.names import TierNames
from kvtier.tiers.lmdb.slab import Slab

_log = logging.getLogger(__name__)

GENERATION_STEP = 1 << 20  # generations are reserved in steps, so that their limit is seldom written


@dataclass(slots=True)
class OpenStore:
    """The parts of an open store. The writer's thread changes them; readers look at index, slab and names.

    settled: what was found at opening is written down. Until it is, on a full disk, the store can only be read.
    deleted: somebody has removed its files. punches: the filesystem takes back parts of a file. notes: what was had
    only in part, in sentences.
    """

    folder: Path
    lock: StoreLock
    state: WriterState
    header: Header
    index: Index
    slab: Slab | InlineSlab
    allocator: ExtentAllocator
    names: TierNames
    budget: Budget
    stock: Stock
    generation_next: int
    generation_limit: int
    punches: bool
    notes: list[str] = field(default_factory=list)
    settled: bool = False
    deleted: bool = False
    _unreturned: dict[int, None] = field(default_factory=dict)  # extents whose disk could not be given back yet
    _touched: bool = False  # something was committed since the opening

    def settle(self) -> str:
        """Write down how the store is open now, forget what is not believed, give unlent extents' disk back.

        Returns why that must wait: the disk has no room. Nothing may be written before it is done; it can be tried
        again. Raises OSError or lmdb.Error.
        """
        try:
            # An earlier writer in mode `none` may have left it to the page cache. And before the lock says that this is
            # a store: one without a header is believed to be new only while its slab is empty.
            self.slab.file.sync()
            self.lock.write_state(self.state)
            if self.punches:
                self._return_disk(self.stock.strides_before)  # first: an extent without a row is left from a crash
            self._commit_stock()
            self.index.sync()
            sync_names(self.folder)
        except (OSError, lmdb.Error) as error:
            if not self.is_full(error):
                raise
            return f"the disk is full: {error}"
        self._return_disk({extent for extent, _, _ in self.allocator.lent()})
        self.settled = True
        return ""

    def is_full(self, error: Exception) -> bool:
        """Whether an error of the disk means that it has no room. LMDB says EIO for a write that was cut short."""
        if not isinstance(error, lmdb.Error):
            return getattr(error, "errno", 0) in NO_SPACE
        if isinstance(error, lmdb.DiskError) or errno_of(error) != errno.EIO:
            return isinstance(error, lmdb.DiskError) or errno_of(error) in NO_SPACE
        try:
            return self.slab.file.disk_free_bytes() < NEW_STORE_BYTES
        except OSError:
            return False

    def occupied_extents(self) -> int:
        """How many extents' disk the slab takes: those that are lent or not given back, or all up to its end where
        nothing can be punched."""
        lent = self.allocator.lent_extents
        if self.punches:
            return lent + sum(self.allocator.stride_of(extent) is None for extent in self._unreturned)
        try:
            return -(-self.slab.file.length_bytes() // self.header.extent_bytes)
        except OSError as error:
            _log.warning("%s: the filesystem does not say how long the slab is: %s", self.folder, error)
            return lent

    def release_dead_readers(self) -> int:
        """Let go of readers that died, of the index and of payloads that lie inline: pages that they saw are not used
        again. How many; 0 too where LMDB cannot tell."""
        inline = self.slab.table.release_dead_readers() if isinstance(self.slab, InlineSlab) else 0
        try:
            return inline + self.index.release_dead_readers()
        except lmdb.Error as error:
            _log.warning("%s: readers of the index cannot be looked at: %s", self.folder, error)
            return inline

    def note_deletion(self) -> None:
        """Say, once, that somebody has deleted the files: they go on until they are closed, and nobody finds them."""
        if self.deleted or not (self.index.is_deleted() or self.slab.file.is_deleted()):
            return
        self.deleted = True
        self.notes.append(
            "its files were deleted while it was open: blocks can be read and written until it is closed, and are lost "
            "then; open the cache anew to have a store again"
        )
        _log.error("%s: %s", self.folder, self.notes[-1])

    def return_disk(self, extents: Iterable[int]) -> None:
        """Give the disk of extents that are not lent back: punch them, or end the file where the last lent one does.

        Never raises, for it comes after a commit: what the disk refuses is tried again by `return_rest`.
        """
        if self.punches:
            for extent in extents:
                self._punch(extent)
            return
        last = max((extent for extent, _, _ in self.allocator.lent()), default=-1)
        try:
            self.slab.file.cut((last + 1) * self.header.extent_bytes)
        except OSError as error:
            _log.warning("%s: the slab could not be cut: %s", self.folder, error)

    def return_rest(self) -> None:
        """Try again what could not be given back, up to the first that is refused; another one is next time's first."""
        for extent in list(self._unreturned):
            del self._unreturned[extent]
            if self.allocator.stride_of(extent) is None and not self._punch(extent):
                return

    def close(self) -> None:
        """Make everything durable, say that it is, and let go. Errors on the way leave the store unclean."""
        self.note_deletion()
        with ExitStack() as undo:
            undo.callback(self.lock.release)
            undo.callback(self.index.close)
            undo.callback(self.slab.close)
            if not self.settled:
                self._leave_as_found()
                return
            try:
                self.slab.file.sync()
                self.index.sync()
                self.lock.write_state(replace(self.state, clean=True))
            except (OSError, lmdb.Error) as error:
                _log.warning("%s: closed without a last sync: %s", self.folder, error)

    def _punch(self, extent: int) -> bool:
        extent_bytes = self.header.extent_bytes
        done = self.slab.file.punch(extent * extent_bytes, extent_bytes)
        if not done:
            if not self._unreturned:
                _log.warning("%s: the disk of extent %d cannot be given back yet", self.folder, extent)
            self._unreturned[extent] = None
        return done

    def _commit_stock(self) -> None:
        limit = self.generation_limit + GENERATION_STEP
        change = self.stock.change
        change.meta[HEADER_KEY] = encode_header(self.header)
        change.meta[GENERATION_KEY] = encode_limit(GENERATION_KEY, limit)
        self.index.commit_growing(change, EVICT_RESERVE_BYTES)
        self.generation_limit = limit
        self._touched = True

    def _leave_as_found(self) -> None:
        """Nothing was written: the store is as clean as the writer before us left it."""
        if self._touched or not self.lock.before.pid:
            return
        try:
            self.lock.write_state(self.lock.before)
        except OSError as error:
            _log.warning("%s: closed as unclean: %s", self.folder, error)

    def _return_disk(self, keep: Container[int]) -> None:
        extents = range(-(-self.slab.file.length_bytes() // self.header.extent_bytes))
        self.return_disk(extent for extent in extents if extent not in keep)
