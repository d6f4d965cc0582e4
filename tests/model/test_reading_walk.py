"""Random walks of requests over leases that are streamed, stalled or read in place: bytes, books, and an idle end."""

import random

import pytest

from kvtier.cache.leases import Lease, NoRoom
from kvtier.cache.transitions import State
from kvtier.testing.dict_tier import DictTier
from kvtier.types import Outcome, Status
from tests.engine_bench import BLOCK_BYTES, content_of, make_engine, prompt, serve

STEPS = 100
FAMILIES = 4


def stored():
    """A disk that has every prompt of the walk."""
    engine = make_engine(gpu=8, host=16, disk=DictTier())
    for family in range(FAMILIES):
        serve(engine, prompt(family, 6))
        engine.core.submit_flush()
        engine.run()
    return engine.tiers[2]


class Coming:
    """Copies on a stream that has taken them."""

    def __init__(self, handles):
        self.handles = set(handles)
        self.over = False

    def wait(self, stream, layer):
        stream |= set() if self.over else self.handles


class Walk:
    """One engine, and requests against it. `kind`: in_place, device (no disk reads into it, streams), or both."""

    def __init__(self, seed, kind):
        self.rng = random.Random(seed)
        self.engine = make_engine(
            gpu=self.rng.choice([6, 10]),
            host=self.rng.choice([3, 5, 12]),
            disk=self.rng.choice([None, DictTier(), stored(), stored()]),
            device="device" in kind,
            in_place="in_place" in kind,
        )
        self.pending, self.leases, self.coming = {}, [], {}
        self.seen = set()

    def step(self):
        chances = {"reserve": 4, "plan": 6, "finish": 6, "enqueue": 4, "commit": 3, "release": 3}
        chances |= {"tick": 1, "reset": 0.2, "give_up": 0.5, "hint": 0.5}
        verb = self.rng.choices(list(chances), list(chances.values()))[0]
        getattr(self, verb)()
        self.collect()
        self.engine.check()
        for lease, keys in self.leases:
            self.compare(lease, keys)

    def keys(self):
        return prompt(self.rng.randrange(FAMILIES), self.rng.randrange(1, 7))

    def reserve(self):
        keys = self.keys()
        blocks = len(keys.groups[0]) + self.rng.randrange(2)
        deadline_s, streamed = self.rng.choice([0.0, 0.5, 2.0]), self.rng.random() < 0.6
        ticket = self.engine.submit_reserve(self.engine.match(keys, ttl_s=3.0), blocks, deadline_s, streamed=streamed)
        self.pending[ticket] = keys

    def hint(self):
        self.engine.core.prefetch(self.keys(), self.engine.clock.now())

    def plan(self):
        self.engine.plan()

    def tick(self):
        self.engine.clock.advance(self.rng.choice([0.1, 1.0]))

    def reset(self):
        self.engine.core.submit_drop()

    def give_up(self):
        if self.pending:
            ticket = self.rng.choice(list(self.pending))
            del self.pending[ticket]
            self.engine.core.give_up(ticket)
            self.engine.answers.pop(ticket, None)

    def enqueue(self):
        taken = [b for b in self.engine.held if b.parts and b.batch_id not in self.coming]
        if taken:
            batch = self.rng.choice(taken)
            self.coming[batch.batch_id] = Coming(transfer.handle for transfer in batch.transfers)
            self.engine.enqueue(batch, self.coming[batch.batch_id])

    def finish(self):
        if not self.engine.held:
            return
        batch = self.rng.choice(self.engine.held)
        coming = self.coming.pop(batch.batch_id, None)
        if coming is None and batch.transfers and self.rng.random() < 0.1:
            self.engine.finish(batch, [Outcome(Status.FAILED)] * batch.outcomes)
            return
        self.engine.finish(batch)
        if coming is not None:
            coming.over = True

    def commit(self):
        if self.leases:
            lease, keys = self.rng.choice(self.leases)
            pairs = list(zip(lease.table(), keys.groups[0], strict=False))[lease.tokens_ready // 4 :]
            for slot, key in pairs:
                assert slot >= 0, "a slot to be written lies in host memory"
                self.engine.tiers[0].slot(slot)[:BLOCK_BYTES] = content_of(key, BLOCK_BYTES)
            self.engine.core.commit(lease, pairs)

    def release(self):
        if self.leases:
            lease, _ = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.engine.release(lease)

    def collect(self):
        for ticket in [ticket for ticket in self.engine.answers if ticket in self.pending]:
            answer, keys = self.engine.answers.pop(ticket), self.pending.pop(ticket)
            assert isinstance(answer, Lease | NoRoom)
            if isinstance(answer, Lease):
                self.leases.append((answer, keys))

    def compare(self, lease, keys):
        """What a kernel that has waited as it should would read."""
        directory, expected = self.engine.core.residency.directory, set()
        lease.wait(expected)
        for entry, key in list(zip(lease.table(), keys.groups[0], strict=False))[: lease.tokens_ready // 4]:
            if entry < 0:
                self.seen.add("in place")
                assert bytes(self.engine.tiers[1].slot(~entry)[:BLOCK_BYTES]) == content_of(key, BLOCK_BYTES)
                continue
            handle = self.engine.core.residency.levels[0].slots.occupant(entry)
            if handle in expected:
                self.seen.add("streamed")
                continue
            assert directory.state(handle, 0) is not State.FILLING, "nobody would wait for it"
            assert bytes(self.engine.tiers[0].slot(entry)[:BLOCK_BYTES]) == content_of(key, BLOCK_BYTES)

    def end(self):
        """Everything is given back, and nothing is held or forgotten."""
        self.seen |= {"stalled"} if self.engine.core.planner.promotions._stalled else set()
        while self.engine.held:
            self.coming.pop(self.engine.held[0].batch_id, None)
            self.engine.finish(self.engine.held[0])
        self.engine.clock.advance(100.0)
        self.engine.run()
        self.collect()
        for lease, _ in self.leases:
            self.engine.release(lease)
        for _ in range(6):  # matches, and what hints have brought or still wait for
            self.engine.clock.advance(100.0)
            self.engine.run()
        self.engine.check()
        assert self.pending == {}
        stats, levels = self.engine.core.stats(), self.engine.core.residency.levels
        assert (stats["leases"], stats["matches"], stats["batches_in_flight"]) == (0, 0, 0)
        for level, tier in zip(levels, stats["tiers"].values(), strict=True):
            assert tier["blocks_idle"] == tier["blocks"], level.name
            if level.pool is not None:
                assert tier["slots_free"] + tier["blocks"] == tier["slots"] - (level is levels[0]), level.name


@pytest.mark.parametrize(
    ("kind", "seeds", "must_see"),
    [
        ("device", range(20), {"streamed", "stalled"}),
        ("in_place", range(100, 112), {"in place"}),
        ("in_place device", range(200, 212), {"in place"}),
    ],
)
def test_walks_end_idle_and_read_nothing_false(kind, seeds, must_see):
    """Some order of loads, waits, cuts, resets and releases leaves a slot held, or shows another block's bytes."""
    seen = set()
    for seed in seeds:
        walk = Walk(seed, kind)
        for step in range(STEPS):
            try:
                walk.step()
            except Exception as error:
                raise AssertionError(f"walk {seed} of {kind}, step {step}: {error!r}") from error
            if walk.engine.core.planner.promotions._stalled:
                walk.seen.add("stalled")
        walk.end()
        walk.engine.close()
        seen |= walk.seen
    assert must_see <= seen
