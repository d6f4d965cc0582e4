"""Planted bugs around what a cache is told and what it does unasked: hints, gates and budgets, scrubs, streams, and
blocks that are read in host memory. Chosen by hand; docs/testing.md has the seed that caught each.
"""

from tests.mutants.mutant import Mutant

HINTS = (
    Mutant(
        "hints: one pin too many",
        "cache/ranks.py",
        "self.kept(tier) >= self._quota(tier):",
        "self.kept(tier) > self._quota(tier):",
        "pins keep one block more than their quota",
    ),
    Mutant(
        "hints: a tier shrinks",
        "engine/resizing.py",
        "            self._residency.ranks.shrunk(tier)\n",
        "",
        "the pins of a large tier hold in what is left of it",
    ),
    Mutant(
        "hints: a ttl without end",
        "engine/hints.py",
        "            self._rank(session, 0)\n\n    #",
        "\n    #",
        "a pin holds beyond its time",
    ),
    Mutant(
        "hints: a pin outlives its session",
        "engine/hints.py",
        "        self._rank(session, 0)\n        own",
        "        own",
        "blocks are kept for a session that is over",
    ),
    Mutant(
        "hints: a pin stays behind",
        "engine/hints.py",
        "        self._let_go(session.keys, before)\n",
        "",
        "blocks of a session's earlier turns are kept for it as well",
    ),
    Mutant(
        "hints: a pin costs a request",
        "cache/ranks.py",
        "        chosen += last[: count - len(chosen)]\n",
        "",
        "a lease is refused for want of slots that a pin keeps idle",
    ),
    Mutant(
        "hints: ended and in use",
        "policies/lru.py",
        "self._sizes.eligible(self._walk(), pinned, size_class), count)",
        "self._sizes.eligible(self._walk(), () if self._rings.lens[_ENDED] else pinned, size_class), count)",
        "blocks of a session that is over leave though somebody uses them",
    ),
    Mutant(
        "hints: ended leave last",
        "policies/lru.py",
        "_LISTS = _ENDED, _SHARED, _ORDER = 1, 2, 3",
        "_ENDED, _SHARED, _ORDER = 1, 2, 3\n_LISTS = 3, 2, 1",
        "what nobody will come for stays, and what others need leaves",
    ),
)
GATES = (
    Mutant(
        "gates: refused and dirty",
        "cache/residency.py",
        "return Reason.NOT_KEPT if self.directory.is_clean(handle, tier) else Reason.DROPPED_DIRTY",
        "return Reason.DROPPED_DIRTY",
        "a block that nobody wanted counts as lost before it was saved",
    ),
    Mutant(
        "gates: one use is enough",
        "policies/admission.py",
        "return self.of(handle) >= 2",
        "return self.of(handle) >= 1",
        "a second access is not waited for",
    ),
    Mutant(
        "gates: a flush of refused blocks",
        "engine/demotion.py",
        "        self._directory.reconsider(dirty)  # whoever was refused must not leave before it is written\n",
        "",
        "what a flush is to save may go before it is written",
    ),
    Mutant(
        "budget: refills twice",
        "policies/wear.py",
        "saved = self._saved_bytes + (now_s",
        "saved = self._saved_bytes + 2 * (now_s",
        "a disk is written twice as much as its budget allows",
    ),
    Mutant(
        "budget: a restart refills it",
        "engine/wear.py",
        'budget.resume(row["saved"], (self._ms(now_s) - row["at_ms"]) / 1000, now_s)',
        "pass",
        "whoever restarts often enough has no budget",
    ),
    Mutant(
        "budget: what is under way is free",
        "engine/wear.py",
        "return budget.saved_bytes(now_s) - writing_bytes if",
        "return budget.saved_bytes(now_s) if",
        "the same bytes are spent by every batch until the first is acknowledged",
    ),
    Mutant(
        "budget: refused for good",
        "engine/admitting.py",
        "            self._residency.reconsider(tier)\n",
        "            pass\n",
        "a budget has been saved up, and those whom it refused are not asked about",
    ),
)
SCRUBS = (
    Mutant(
        "scrub: a good block goes",
        "engine/scrubbing.py",
        "elif outcome.status is Status.MISSING:",
        "elif outcome.status is not Status.MISSING:",
        "what was found whole is forgotten",
    ),
    Mutant(
        "scrub: a bad block stays",
        "engine/scrubbing.py",
        "            self._residency.lose(copy.handle, tier, Move.RECLAIM, Reason.CONDEMNED)\n",
        "",
        "what was found rotten waits for somebody who asks for it",
    ),
    Mutant(
        "scrub: no limit",
        "engine/scrubbing.py",
        "walk.due_s = now_s + piece_bytes / self._residency.levels[tier].scrub_bytes_per_s",
        "walk.due_s, walk.handle = now_s, 0",
        "the disk is read as fast as it goes, again and again",
    ),
    Mutant(
        "scrub: beside loads",
        "engine/scrubbing.py",
        "moves = flight.loads(tier) or flight.writes(tier)",
        "moves = flight.writes(tier)",
        "whoever waits for the disk waits for its scrub as well",
    ),
)
READING = (
    Mutant(
        "streams: nothing to wait for",
        "engine/settlement.py",
        "Lease(record, tokens, tiers, list(dict.fromkeys(a for a in coming if a is not None)))",
        "Lease(record, tokens, tiers, [])",
        "kernels read slots that a stream has not filled yet",
    ),
    Mutant(
        "streams: who did not ask",
        "engine/settlement.py",
        "return record.streamed and self._promotions.arrival(handle) is not None",
        "return self._promotions.arrival(handle) is not None",
        "a lease whose kernels do not wait is given blocks that are still to come",
    ),
    Mutant(
        "in place: the wrong memory",
        "engine/settlement.py",
        "slots[index] = ~self._directory.place(handle, self._goal)",
        "slots[index] = self._directory.place(handle, self._goal)",
        "a slot of host memory is read on the device",
    ),
    Mutant(
        "in place: nobody holds it",
        "engine/reservations.py",
        "                self._hold_in_place(record, handle)\n                self._settle_if_complete(record)",
        "                record.in_place.add(handle)\n                self._settle_if_complete(record)",
        "a block that came into host memory for a lease may leave under it",
    ),
)
EVIDENCE = (*HINTS, *GATES, *SCRUBS, *READING)
