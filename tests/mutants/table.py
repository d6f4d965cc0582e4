"""The planted bugs that the explorer must see. docs/testing.md has the seed that caught each.

Three lists: the four bugs that such an engine must never have, some of them at more than one place, and those of
`evidence`, chosen by hand; and those of the first thirty of `draw` that a seed caught, taken over as text, so that they
stay what they are while the sources move. Their names are their numbers.
"""

from tests.mutants.evidence import EVIDENCE
from tests.mutants.mutant import Mutant

NAMED = (
    Mutant(
        "drop the quarantine",
        "cache/residency.py",
        "        if not self.directory.is_held(handle, tier):",
        "        if True:",
        "the slot of a dropped block is free while a transfer still writes to it",
    ),
    Mutant(
        "skip the generation check: acknowledgement",
        "engine/flight.py",
        "self._underway.pop(done.batch_id, None)",
        "self._underway.get(done.batch_id)",
        "an acknowledgement that comes twice is applied twice",
    ),
    Mutant(
        "skip the generation check: eviction",
        "engine/flight.py",
        "directory.place(handle, tier),\n            directory.generation(handle, tier),",
        "directory.place(handle, tier),\n            0,",
        "a place is evicted without saying which block it held",
    ),
    Mutant(
        "skip the generation check: commit",
        "engine/core.py",
        " or self._leases.is_stale(lease)",
        "",
        "a lease from before a drop publishes what it computed",
    ),
    Mutant(
        "publish before commit: store job",
        "engine/polled.py",
        'job = self._job(answer, "store", placed)',
        'job = self._job(answer, "store", placed)\n'
        "            self._core.commit(answer, list(zip(job.slots, job.keys, strict=True)))",
        "blocks can be found before the foreign side has written them",
    ),
    Mutant(
        "publish before commit: load",
        "engine/settlement.py",
        "return self._directory.is_ready(handle, 0) or self.comes(record, handle)",
        "return True",
        "a lease counts blocks as ready whose load is under way",
    ),
    Mutant(
        "release twice: lease",
        "engine/reservations.py",
        "        del self._records[record.lease_id]",
        "        pass",
        "a lease that was given back is given back again",
    ),
    Mutant(
        "release twice: match",
        "cache/pins.py",
        "    match.pins.clear()",
        "    pass",
        "the pins of a match are let go at each release",
    ),
    Mutant(
        "release twice: dead owner",
        "engine/polled.py",
        " and lease.record.phase is Phase.ACTIVE",
        "",
        "the late answer of a dead owner's job is applied to a lease that was given back",
    ),
)
DRAWN = (
    Mutant(
        "drawn 1",
        "cache/order_log.py",
        "self._snapshot_due = self.changed = True",
        "self._snapshot_due = self.changed = False",
        "an order that has to be written anew counts as written",
    ),
    Mutant(
        "drawn 2",
        "cache/directory.py",
        "ready = [NO_TIER if (tier := self.fastest(handle)) is None else tier for handle in known]",
        "ready = [NO_TIER if (tier := self.fastest(handle)) is not None else tier for handle in known]",
        "beside a tier that is left alone, blocks of the others are not found",
    ),
    Mutant(
        "drawn 3",
        "engine/promotion.py",
        "handles.append(handle)",
        "pass",
        "a load leaves its queue and is never carried out",
    ),
    Mutant(
        "drawn 4",
        "engine/matches.py",
        "self.held.pop(match.match_id, None)",
        "pass",
        "a match that was given back stays in the books",
    ),
    Mutant(
        "drawn 7",
        "cache/residency.py",
        "slot = self.directory.place(handle, tier)",
        "slot = self.directory.place(tier, handle)",
        "slot and tier are taken for each other when a copy ends",
    ),
    Mutant(
        "drawn 8",
        "engine/demotion.py",
        "self.flushes.tried(handle, self._directory.key(handle), lowest=False, done=False)",
        "pass",
        "a flush waits for ever for a block that finds no room",
    ),
    Mutant(
        "drawn 11",
        "engine/promotion.py",
        "self._hop(handle, (source, target), deadline_s)",
        "self._hop(handle, (source, source), deadline_s)",
        "a block on its way up comes from the tier that it goes to",
    ),
    Mutant(
        "drawn 14",
        "engine/resizing.py",
        "if not waiting:",
        "if not (not waiting):",
        "granules with blocks to be saved count as empty, and empty ones as full",
    ),
    Mutant(
        "drawn 15",
        "cache/adoption.py",
        "recalled = recall(rows)",
        "recalled = None",
        "after a restart, blocks leave in the order of their writing",
    ),
    Mutant(
        "drawn 17",
        "engine/demotion.py",
        "None if starved and level.sizes_vary else size, incoming=handles[0])",
        "None if starved and level.sizes_vary else size, incoming=handles[1])",
        "the policy hears of the second block of a batch, not of the first",
    ),
    Mutant(
        "drawn 18",
        "cache/residency.py",
        "return False",
        "return True",
        "a block that is gone counts as inherited, and its handle is lost",
    ),
    Mutant(
        "drawn 19",
        "engine/reservations.py",
        "loading = (r.deadline_s for r in self._records.values() if r.phase is Phase.LOADING)",
        "loading = (r.deadline_s for r in self._records.values() if r.phase is not Phase.LOADING)",
        "a reservation is not woken at its deadline",
    ),
    Mutant(
        "drawn 24",
        "engine/settlement.py",
        "return self._directory.is_ready(handle, 0) or self.comes(record, handle)",
        "return self._directory.is_ready(handle, 1) or self._comes(record, handle)",
        "a lease asks the tier below whether its blocks are there",
    ),
    Mutant(
        "drawn 26",
        "engine/reservations.py",
        "record.waiting.discard(handle)",
        "pass",
        "a lease waits on for a load that has ended",
    ),
    Mutant(
        "drawn 28",
        "cache/residency.py",
        "if victims is None:",
        "if not (victims is None):",
        "where there is nobody to make room, nobody leaves all the same",
    ),
    Mutant(
        "drawn 29",
        "engine/drops.py",
        "if not outcome.done:",
        "if not (not outcome.done):",
        "a drop that failed is reported as durable, and one that was done as failed",
    ),
)
MUTANTS = (*NAMED, *EVIDENCE, *DRAWN)
