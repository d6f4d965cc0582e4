"""Writes batches: payload, then fdatasync, then one index transaction, and only then are evicted slots free.

Owns: the order above. One thread at a time.
Always: a block is DONE only when its record is committed; if the commit does not happen no item is DONE, no
eviction is applied, and the batch's slots are free again. A slot freed by a batch is never written by it.

                      disk full               payload failed   sync failed            commit failed
    that item         NO_ROOM                 FAILED           FAILED                 NO_ROOM / FAILED
    the others        go on                   go on            FAILED                 NO_ROOM / FAILED
    the slots         withheld till it isn't  free again       withheld till reopen   free again
    evictions         NO_ROOM, not applied    go on            FAILED, not applied    NO_ROOM / FAILED, not applied
    the sidecar       goes on                 goes on          FAILED, not applied    NO_ROOM / FAILED, not applied

Batches that are given together (group commit) share the payload's writing, its sync and the transaction. Each has the
outcomes that it would have alone: what the disk refuses to one ends that one; a transaction that does not happen is
tried again, a batch at a time; and a batch that needs what an earlier one frees waits for that one's commit. Only a
failed sync is all of theirs, for it may have been any page; where it is the index's, their rows are there, and whether
a crash undoes them is unknown: they are FAILED, and nothing more is written. Blocks that lie inline are written a batch
at a time.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext

import lmdb

from kvtier.tiers.lmdb.blockfile import NO_SPACE
from kvtier.tiers.lmdb.budget import Budget
from kvtier.tiers.lmdb.coding import BlockCoding
from kvtier.tiers.lmdb.committing import Committer
from kvtier.tiers.lmdb.index import Change
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.layout import HEADER_KEY, Header, encode_header
from kvtier.tiers.lmdb.meter import Meter
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.tiers.lmdb.room import Room
from kvtier.tiers.lmdb.staging import Staged, Staging, Writing
from kvtier.types import DONE, Outcome, Status, WriteBatch

_log = logging.getLogger(__name__)

_STAYS = Outcome(Status.NO_ROOM, detail="it stays: the disk was full for what should take its place")


class BatchWriter:
    """Writes to one open store."""

    def __init__(self, store: OpenStore, room: Room, coding: BlockCoding) -> None:
        self._store = store
        self._room = room
        self._coding = coding
        self.meter = Meter(store.folder)
        self._staging = Staging(store, room, coding)
        self._committer = Committer(store, room, self.meter)
        self._synced = store.header.durability != "none"

    # ------------------------------------------------------------ verbs

    def write(self, batches: Sequence[WriteBatch]) -> list[list[Outcome]]:
        """For each batch one outcome per item, one per eviction, one for a sidecar with rows."""
        ends: list[list[Outcome]] = []
        while len(ends) < len(batches):
            ends += self._write_first(batches[len(ends) :])
        return ends

    def drop(self, local: int) -> Outcome:
        """Forget a namespace: its row goes, and with it the meaning of every record that names it."""
        if (refusal := self._refusal()) is not None:
            return refusal
        tier_id = self._store.names.to_tier(local)
        if tier_id is None:
            return DONE
        failure = self._committer.forget(tier_id)
        self._room.refresh()
        return failure or DONE

    def change_capacity(self, header: Header, budget: Budget, payload_bytes: int) -> Outcome:
        """Take over another capacity, once the store's header says it. payload_bytes: what a table of payloads may
        grow to: further before the header says so, less far afterwards."""
        if (refusal := self._refusal()) is not None:
            return refusal
        slab = self._store.slab
        former_bytes = slab.table.limit_bytes if isinstance(slab, InlineSlab) else payload_bytes
        failure = self._limit_payload(payload_bytes) if payload_bytes > former_bytes else None
        if failure is None:
            failure = self._committer.apply(Change(meta={HEADER_KEY: encode_header(header)}), evicting=False)
            self._limit_payload(former_bytes if failure else payload_bytes)
        if failure is None:
            self._store.header, self._store.budget = header, budget
            self._store.allocator.extents_max = budget.extents_max
            self._room.fit_index()
        self._room.refresh()
        return failure or DONE

    # ------------------------------------------------------------ inside

    def _refusal(self) -> Outcome | None:
        """Why nothing can be written at all. A store that opened on a full disk is settled as soon as that can be."""
        if self._committer.broken:
            return Outcome(Status.FAILED, detail=self._committer.broken)
        if self._store.settled:
            return None
        try:
            waits = self._store.settle()
        except (OSError, lmdb.Error) as error:
            return Outcome(Status.FAILED, detail=f"the store cannot be settled: {error}")
        if waits:
            return Outcome(Status.NO_ROOM, detail=waits)
        self._room.fit_index()
        return None

    def _write_first(self, batches: Sequence[WriteBatch]) -> list[list[Outcome]]:
        """Write the first batch, and those behind it that can go with it; returns their outcomes."""
        if (refusal := self._refusal()) is not None:
            self._room.refresh()
            return [[refusal] * (len(batches[0].items) + len(batches[0].evict) + bool(batches[0].sidecar))]
        if isinstance(self._store.slab, InlineSlab):
            batches = batches[:1]
        sizes = [self._coding.scratch_bytes(batch.items) for batch in batches]
        with self._coding.scratch(sum(sizes)) as scratch:
            together: list[Staged] = []
            for batch, size in zip(batches, sizes, strict=True):
                staged = self._staging.stage(batch, scratch[:size])
                if any(staged.waits_for(earlier) for earlier in together):
                    self._room.give_back(writing.place for writing in staged.moving)
                    break
                scratch = scratch[size:]
                together.append(staged)
            self._write_payload(together)
            self._commit([staged for staged in together if staged.is_due])
        self._room.refresh()
        return [staged.outcomes() for staged in together]

    def _limit_payload(self, payload_bytes: int) -> Outcome | None:
        """Let a table of payloads grow so far, and no further. Returns why its limit stays."""
        slab = self._store.slab
        if not isinstance(slab, InlineSlab) or payload_bytes == slab.table.limit_bytes:
            return None
        try:
            slab.table.limit(payload_bytes)
        except OSError as error:
            stays = f"the table of payloads stays at {slab.table.map_bytes()} bytes: {error}"
            _log.warning("%s: %s", self._store.folder, stays)
            return Outcome(Status.FAILED, detail=stays)
        return None

    def _write_payload(self, together: Sequence[Staged]) -> None:
        """Write and sync. Ends the items whose payload failed, and, if the sync did, the batches that had any."""
        moving = [(staged, staged.moving) for staged in together]
        self._write_slots([writing for _, writings in moving for writing in writings])
        for staged, writings in moving:
            if any(writing.has_no_room for writing in writings):  # nothing leaves for what could not be stored
                staged.keep(_STAYS)
        pending = [staged for staged in together if staged.moving]
        if not self._synced or not pending:
            return
        if (failure := self._sync(sum(len(writings) for _, writings in moving))) is not None:
            for staged in pending:
                staged.end(failure)

    def _write_slots(self, writings: Sequence[Writing]) -> None:
        ios = [writing.io for writing in writings if writing.io is not None]
        inline = isinstance(self._store.slab, InlineSlab)
        with self.meter.commit() if inline else nullcontext():  # there blocks are written as pages of LMDB
            self._store.slab.write(ios)
        written = [io for io in ios if io.error is None]
        slot_bytes = 0 if inline else sum([io.stride_bytes for io in written])
        self.meter.payload(sum([io.length_bytes for io in written]), slot_bytes)
        if len(written) == len(writings):
            return
        for writing, io in zip(writings, ios, strict=True):
            if io.error is not None:
                status = Status.NO_ROOM if io.error.errno in NO_SPACE else Status.FAILED
                writing.outcome = Outcome(status, detail=str(io.error))
        self._room.withhold([writing.place for writing in writings if writing.has_no_room])
        self._room.give_back(w.place for w in writings if w.outcome is not None and not w.has_no_room)

    def _sync(self, slots: int) -> Outcome | None:
        """Why nothing that was written since the last sync can be kept."""
        try:
            self._store.slab.file.sync()
        except OSError as error:
            # The kernel may have dropped the pages and will report success next time: these slots stay taken.
            self._store.stock.findings.append(f"sync of the slab failed: {error}; {slots} slots are out of use")
            return Outcome(Status.FAILED, detail=f"sync: {error}")
        return None

    def _commit(self, due: Sequence[Staged]) -> None:
        """One transaction for all; if it does not happen, one for each, so that none suffers for another."""
        if len(due) > 1 and self._committed(due, alone=False) is None:
            return
        for staged in due:
            if (failure := self._committed([staged], alone=True)) is not None:
                self._room.give_back(writing.place for writing in staged.moving)
                if failure.status is Status.NO_ROOM:
                    self._room.grow_index(evicting=False)  # before an extent is lent to what the index cannot name
                staged.end(failure)

    def _committed(self, due: Sequence[Staged], alone: bool) -> Outcome | None:
        """Commit these and end them, or say why that did not happen."""
        moving = [writing for staged in due for writing in staged.moving]
        leaving = {place: key for staged in due for place, key in staged.leaving.items()}
        sidecar = {key: row for staged in due for key, row in staged.batch.sidecar.items()}
        failure, noted = self._committer.commit(moving, leaving, sidecar, alone=alone)
        if failure is None:
            unkept = self._committer.keep_promise() if len(due) > 1 else None
            for staged in due:
                staged.end(unkept, noted)
        return failure
