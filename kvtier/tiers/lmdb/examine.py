"""Compares what a store's index says with itself, with the slab and with the disk, and says what contradicts.

Owns: what was found. Always: reads only; each block is read at most once, or twice if it is wrong; a *finding* is
something that cannot be believed, a *leftover* something that nobody needs and that stays until it is overwritten or
swept. Beside a writer only what cannot have been a passing state is a finding.
Units: bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvtier.tiers.lmdb.audit import Audit, Audited, Verdict
from kvtier.tiers.lmdb.budget import FILESYSTEM_SHARE
from kvtier.tiers.lmdb.layout import GENERATION_KEY, ID_KEY, NAMESPACE_KEY
from kvtier.tiers.lmdb.offline import UNKNOWN, StoredRecord, StoreReader
from kvtier.tiers.lmdb.slab import Slab
from kvtier.tiers.lmdb.superseded import Superseded

BAD = (Verdict.CORRUPT, Verdict.UNREADABLE)


@dataclass(slots=True)
class Leftovers:
    """What nobody needs, and what is only passed over. None of it is damage."""

    dropped_records: int = 0  # of namespaces that were dropped
    superseded_records: int = 0  # a newer one has their key
    empty_namespaces: int = 0
    empty_extents: int = 0
    unlent_bytes: int = 0  # of disk, that no lent extent accounts for
    unknown_records: int = 0  # of versions that this kvtier does not read: they stay


@dataclass(slots=True)
class Examined:
    """What an examination found. `reader.findings` and `reader.damaged_rows` have the damaged rows."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    read_bytes: int = 0
    bad: list[Audited] = field(default_factory=list)
    leftovers: Leftovers = field(default_factory=Leftovers)
    generation_newest: int = 0
    namespace_newest: int = 0


class Examination:
    """One look at one store, from the first row to the last block."""

    def __init__(self, reader: StoreReader, batch_bytes: int) -> None:
        self.found = Examined()
        self._reader = reader
        self._batch_bytes = batch_bytes
        self._superseded = Superseded()
        self._extents_used: set[int] = set()
        self._namespaces_used: set[int] = set()

    def run(self, spent: Callable[[int], None]) -> Examined:
        """Look at everything. spent: told how many bytes were read, after each batch.

        Raises Overtaken or StoreError like the reader.
        """
        reader, found = self._reader, self.found
        before = set(reader.extents()), reader.namespaces()
        for batch in Audit(reader, self._batch_bytes).run(self._seen(reader.records())):
            found.verdicts.update(audited.verdict for audited in batch)
            found.bad += [audited for audited in batch if audited.verdict in BAD]
            batch_bytes = sum(audited.stored.stride_bytes for audited in batch)
            found.read_bytes += batch_bytes
            spent(batch_bytes)
        found.leftovers.superseded_records = len(self._superseded.find(reader))
        self._compare_names()
        self._compare_limits()
        self._count_leftovers(*before)
        reader.expect_undisturbed()
        return found

    def _seen(self, records: Iterator[StoredRecord]) -> Iterator[StoredRecord]:
        for stored in records:
            self._superseded.add(stored)
            self._extents_used.add(stored.extent)
            self._namespaces_used.add(stored.record.namespace)
            self.found.generation_newest = max(self.found.generation_newest, stored.record.generation)
            yield stored

    def _compare_names(self) -> None:
        """One fingerprint has one row. Beside a writer it may go and come back meanwhile: both must be there now."""
        newest: dict[bytes, int] = {}
        for tier_id, (fingerprint, _) in sorted(self._reader.namespaces().items()):
            older = newest.get(fingerprint)
            if older is not None and all(self._reader.has_namespace(one) for one in (older, tier_id)):
                key = ID_KEY.pack(older)
                self._reader.note(
                    f"namespace {key.hex()}: namespace {tier_id} has the same fingerprint", ("namespaces", key)
                )
            newest[fingerprint] = tier_id
        self.found.namespace_newest = max(self._reader.namespace_newest, *newest.values(), 0)

    def _compare_limits(self) -> None:
        """After the rows: a transaction that needs a higher limit raises it, too."""
        for key, limit, highest in (
            (GENERATION_KEY, self._reader.generation_limit(), self.found.generation_newest),
            (NAMESPACE_KEY, self._reader.namespace_limit(), max(self._reader.names, default=0)),
        ):
            if limit != UNKNOWN and highest >= limit:
                self._reader.note(f"meta {key.decode()}: {limit}, and {highest} was given already", ("meta", key))

    def _count_leftovers(self, extents: set[int], namespaces: dict[int, tuple[bytes, bytes]]) -> None:
        reader, left = self._reader, self.found.leftovers
        left.dropped_records, left.unknown_records = reader.dropped_records, reader.unknown_records
        left.empty_extents = len(extents - self._extents_used - reader.unknown_extents)
        if not reader.unknown_records:  # any namespace may be theirs
            left.empty_namespaces = len(namespaces.keys() - self._namespaces_used)
        if isinstance(reader.slab, Slab):  # a table takes what it takes
            lent_bytes = len(extents) * reader.header.extent_bytes
            allowed_bytes = lent_bytes + lent_bytes // FILESYSTEM_SHARE  # the filesystem's own map of it
            left.unlent_bytes = max(0, reader.disk_bytes()["slab"] - allowed_bytes)
