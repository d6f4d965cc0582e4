"""What must hold after every operation, whatever it was: states, slots, counters, and every byte in every tier.

Owns what was seen before: counters, and rows of the disk that were looked at. Each check raises AssertionError.
Units: slots, bytes.
"""

from collections import Counter

from kvtier.allocator.slot_pool import NULL_SLOT
from kvtier.cache.transitions import State
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.testing.exploring.store import Disk, GlassDisk, Row
from kvtier.testing.exploring.truth import Truth
from kvtier.testing.tiers import slot_buffer
from kvtier.tiers.base import SupportsSlots
from kvtier.tiers.gpu import GpuTier
from kvtier.types import BlockKey, ReadItem, block_key_of, namespace_of


class Checks:
    """The checks of one engine over one disk."""

    def __init__(self, engine: ExploredEngine, truth: Truth, medium: Disk | None) -> None:
        self._engine = engine
        self._directory = engine.directory
        self._truth = truth
        self._glass = medium if isinstance(medium, GlassDisk) else None
        self._counters = engine.counters()
        self._memories = [(index, tier) for index, tier in enumerate(engine.tiers) if isinstance(tier, SupportsSlots)]
        self._versions: dict[tuple[int, int], int] = {}  # (place, generation) -> version of a row that was looked at
        self.gone: Counter[bytes] = Counter()  # by fingerprint: versions below were erased for good
        self._lengths = [spec.block_bytes for spec in engine.specs]

    def all(self, private_slots: int, unanswered_slots: int) -> None:
        """Everything. private_slots: that callers hold; unanswered_slots: that they may hold without knowing it."""
        findings = self._engine.core.check()
        assert not findings, findings
        self.gpu()
        self.counters()
        self.slots(private_slots, unanswered_slots)
        self.memory()
        self.disk()
        self.loads()

    # ------------------------------------------------------------ memory

    def gpu(self) -> None:
        """The memory that came and went is accounted for."""
        gpu, level = self._engine.tiers[0], self._engine.core.residency.levels[0]
        if not isinstance(gpu, GpuTier):
            return
        findings = gpu.check()
        assert not findings, findings
        if not any(flying.batch.remap for flying in self._engine.underway.flying):
            assert gpu.granules_mapped == level.granules, "the deciding code believes in other granules"
            assert level.capacity_bytes == gpu.traits.capacity_bytes

    def memory(self) -> None:
        """Every READY copy in memory holds exactly the bytes of its key, and may be served."""
        directory, truth = self._directory, self._truth
        for handle in directory.handles():
            named = None
            for index, tier in self._memories:
                if not directory.is_ready(handle, index):
                    continue
                if named is None:
                    named = self.named(handle)
                    assert named in truth.alive, f"{named[1].hex()[:8]} can be found: not committed, or dropped"
                    content = truth.content(named, truth.alive[named], directory.length_bytes(handle))
                slot = directory.place(handle, index)
                assert tier.slot(slot)[: len(content)] == content, f"tier {index}: wrong bytes in slot {slot}"

    def named(self, handle: int) -> tuple[bytes, BlockKey]:
        key = self._directory.key(handle)
        return self._engine.namespaces.fingerprint_of(namespace_of(key)), block_key_of(key)

    def counters(self) -> None:
        """A counter only grows, and a part is no larger than its whole."""
        before, now = self._counters, self._engine.counters()
        fallen = [name for name, count in before.items() if now[name] < count]
        assert not fallen, f"counters fell: {fallen}"
        for part, whole in (("hit_tokens", "lookup_tokens"), ("no_room", "reserves")):
            assert now[part] <= now[whole], f"{part} {now[part]} > {whole} {now[whole]}"
        below = [level.name for level in self._engine.core.residency.levels[1:]]
        dropped = [name for name in below if now[f"{name}.dropped_dirty"]]
        assert not dropped, f"{dropped} dropped dirty blocks: only a reservation may, and only in the top tier"
        brought = sum(now[f"prefetch_{how}"] for how in ("useful", "late", "wasted"))
        assert brought <= now["prefetched_blocks"], "a block was brought up once and counted twice"
        self._counters = now

    def slots(self, private_slots: int, unanswered_slots: int) -> None:
        """Every slot that is not free belongs to a copy, to a lease, or waits for the end of a transfer."""
        for tier, level in enumerate(self._engine.core.residency.levels):
            if level.pool is None:
                continue
            pool = level.pool
            null = self._engine.setup.shape[tier] == "gpu"
            taken = pool.slots_total - null - pool.slots_free - pool.slots_withdrawn - pool.slots_quarantined
            states = Counter(self._directory.state(handle, tier) for handle in self._all_handles())
            copies = states[State.FILLING] + states[State.READY]
            assert states[State.RECLAIMED] == pool.slots_quarantined, f"{level.name}: a slot in quarantine is nobody's"
            least, most = (private_slots, private_slots + unanswered_slots) if tier == 0 else (0, 0)
            assert least <= taken - copies <= most, (
                f"{level.name}: {taken} slots are taken, {copies} by copies, {least} to {most} by leases"
            )

    def private(self, slots: list[int]) -> int:
        """How many of a lease's slots are its own: never committed, or a duplicate."""
        pool = self._engine.core.residency.levels[0].slots
        held = [(slot, pool.occupant(slot)) for slot in slots]
        assert all(slot != NULL_SLOT or self._engine.setup.shape[0] != "gpu" for slot in slots)
        return sum(handle is None or self._directory.place(handle, 0) != slot for slot, handle in held)

    def _all_handles(self) -> range:
        """Those of overtaken blocks, too."""
        return range(self._directory._rows)

    def loads(self) -> None:
        """A disk that hangs holds at most half of the top tier's slots."""
        if self._engine.disk is None:
            return
        batches = [flying.batch for flying in self._engine.underway.flying]
        loading = sum(len(b.transfers) for b in batches if (b.source, b.target) == (self._engine.disk, 0))
        most = max(1, self._engine.setup.gpu_slots_max // 2)
        assert loading <= most, f"{loading} blocks of the top tier wait for the disk, {most} may"

    # ------------------------------------------------------------ disk

    def rows(self) -> list[Row]:
        """What the disk holds: all of it, or, where one cannot look into it, what the directory knows of."""
        if self._glass is not None:
            return list(self._glass.rows())
        return [] if self._engine.disk is None else self._read_rows(self._engine.disk)

    def _read_rows(self, tier: int) -> list[Row]:
        directory, store = self._directory, self._engine.store
        assert store is not None
        rows = []
        for handle in directory.ready_in(tier):
            place, generation = directory.place(handle, tier), directory.generation(handle, tier)
            into = slot_buffer(self._engine.setup.stride_bytes)
            length_bytes = directory.length_bytes(handle)
            (outcome,) = store.read([ReadItem(directory.key(handle), place, generation, length_bytes, into)])
            assert outcome.done, f"a block that was stored cannot be read: {outcome}"
            rows.append(Row(*self.named(handle), place, generation, bytes(into[:length_bytes])))
        return rows

    def disk(self) -> None:
        """Every row is a block that somebody has computed, none that was erased; and the directory knows them all."""
        tier = self._engine.disk
        if tier is None:
            return
        rows = {row.place: row for row in self.rows()}
        for row in rows.values():
            version = self._version_of(row)
            assert version >= self.gone[row.fingerprint], "a block lies on the disk that was erased for good"
        for handle in self._directory.ready_in(tier):
            place = self._directory.place(handle, tier)
            found, named = rows.get(place), self.named(handle)
            assert found is not None, f"nothing lies at place {place}"
            assert (found.fingerprint, found.key) == named, f"another block lies at place {place}"
            assert found.generation == self._directory.generation(handle, tier), f"place {place} was used again"
            assert self._version_of(found) == self._truth.alive.get(named), "a dropped block can be found on the disk"
        if self._glass is not None and not self._engine.underway.writes_to(tier):
            self._expect_all_known(tier, rows)

    def _expect_all_known(self, tier: int, rows: dict[int, Row]) -> None:
        """With no write under way every row is a copy, and every copy a row unless its namespace was erased."""
        directory = self._directory
        copies = {directory.place(h, tier): h for h in self._all_handles() if self._on_disk(h, tier)}
        assert copies.keys() >= rows.keys(), f"places {sorted(rows.keys() - copies.keys())} are nobody's"
        absent = [place for place, handle in copies.items() if place not in rows and directory.is_named(handle)]
        assert not absent, f"places {absent} are believed to hold blocks"

    def _on_disk(self, handle: int, tier: int) -> bool:
        return self._directory.state(handle, tier) not in (State.GONE, State.FILLING)

    def _version_of(self, row: Row) -> int:
        known = self._versions.get((row.place, row.generation))
        if known is None:
            known = self._truth.version_of(row)
            assert known is not None, f"place {row.place} of the disk holds what nobody has computed"
            self._versions[row.place, row.generation] = known
        return known
