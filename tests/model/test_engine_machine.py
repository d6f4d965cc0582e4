"""The whole engine under random requests, faults and orders, against a dict that shares no code with it."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.blocks.hashing import hash_blocks
from kvtier.cache.leases import Lease, NoRoom
from kvtier.testing.dict_tier import DictTier
from kvtier.types import Status
from tests.engine_bench import BLOCK_BYTES, BLOCK_TOKENS, content_of, make_engine, tiny_model

GPU, HOST, DISK = 6, 5, 12


class EngineMachine(RuleBasedStateMachine):
    """Requests share prefixes: a prompt is `depth` blocks of one of three families, the last one of its own branch."""

    @initialize(host=st.booleans(), groups=st.integers(1, 2))
    def start(self, host, groups):
        self.model = tiny_model(groups=groups)
        self.host = HOST * groups if host else None
        self.groups = groups
        self.disk = DictTier(blocks_max=DISK * groups)
        self.computed = set()  # keys somebody has committed and nobody dropped since
        self.pending = {}  # ticket -> keys
        self.leases = {}  # ticket -> (lease, keys, whether committed)
        self.open()

    def open(self):
        if hasattr(self, "engine"):
            self.engine.close()
        self.engine = make_engine(GPU * self.groups, self.host, self.disk, self.model)
        self.pending.clear()
        self.leases.clear()

    def keys_of(self, family, depth, branch):
        tokens = [family * 100 + i for i in range((depth - 1) * BLOCK_TOKENS)] + [1000 + branch] * BLOCK_TOKENS
        return hash_blocks(tokens, self.model)

    def collect(self):
        """Look at every answer: what is said to be ready must hold the bytes of its key."""
        for ticket in [t for t in self.pending if t in self.engine.answers]:
            keys = self.pending.pop(ticket)
            answer = self.engine.answers.pop(ticket)
            if isinstance(answer, Lease):
                ready = answer.tokens_ready // BLOCK_TOKENS
                for group, row in enumerate(keys.groups):
                    for slot, key in list(zip(answer.slots(group), row, strict=False))[:ready]:
                        assert key in self.computed, "a block nobody has computed is served"
                        self.same_bytes(slot, key)
                self.leases[ticket] = (answer, keys, False)
            else:
                assert isinstance(answer, NoRoom)

    def same_bytes(self, slot, key):
        assert bytes(self.engine.tiers[0].slot(slot)[:BLOCK_BYTES]) == content_of(key, BLOCK_BYTES)

    @rule(
        family=st.integers(0, 2),
        depth=st.integers(1, 5),
        branch=st.integers(0, 1),
        deadline=st.sampled_from([1.0, 9.0]),
    )
    def request(self, family, depth, branch, deadline):
        keys = self.keys_of(family, depth, branch)
        match = self.engine.match(keys)
        ticket = self.engine.submit_reserve(match, depth, deadline)
        self.pending[ticket] = keys
        self.collect()

    @rule(family=st.integers(0, 2), depth=st.integers(1, 5))
    def look_and_leave(self, family, depth):
        match = self.engine.match(self.keys_of(family, depth, 0), ttl_s=3.0)
        if depth % 2:
            self.engine.core.release_match(match)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), late=st.booleans())
    def compute(self, data, late):
        """Write and commit what a lease has to compute."""
        ticket = data.draw(st.sampled_from(sorted(self.leases)))
        lease, keys, committed = self.leases[ticket]
        if committed:
            return
        ready = lease.tokens_ready // BLOCK_TOKENS
        for group, row in enumerate(keys.groups):
            pairs = list(zip(lease.slots(group), row, strict=False))[ready:]
            for slot, key in pairs:
                self.engine.tiers[0].slot(slot)[:BLOCK_BYTES] = content_of(key, BLOCK_BYTES)
                self.computed.add(key)
            self.engine.core.commit(lease, pairs)
        self.leases[ticket] = (lease, keys, True)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        """A lease's slots hold what they held until it is given back."""
        ticket = data.draw(st.sampled_from(sorted(self.leases)))
        lease, keys, committed = self.leases.pop(ticket)
        ready = len(keys.groups[0]) if committed else lease.tokens_ready // BLOCK_TOKENS
        for group, row in enumerate(keys.groups):
            for slot, key in list(zip(lease.slots(group), row, strict=False))[:ready]:
                self.same_bytes(slot, key)
        self.engine.release(lease)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.pending)))
        del self.pending[ticket]
        self.engine.core.release_lease(ticket)

    @rule()
    def plan(self):
        self.engine.plan()
        self.collect()

    @precondition(lambda self: self.engine.held)
    @rule(data=st.data())
    def finish(self, data):
        """Batches end in any order, except that a store's writes keep theirs."""
        held = self.engine.held
        lowest = len(self.engine.tiers) - 1
        writes = [batch for batch in held if batch.target == lowest]
        candidates = [batch for batch in held if batch.target != lowest] + writes[:1]
        self.engine.finish(data.draw(st.sampled_from(candidates)))
        self.collect()

    @rule(status=st.sampled_from([None, None, Status.FAILED, Status.NO_ROOM]))
    def break_writes(self, status):
        self.disk.fail_write = status

    @rule(status=st.sampled_from([None, None, Status.FAILED, Status.MISSING, Status.CORRUPT]))
    def break_reads(self, status):
        self.disk.fail_read = status

    @rule(place=st.integers(0, DISK - 1))
    def damage(self, place):
        if place in self.disk.rows:
            self.disk.corrupt.add(place)

    @rule(seconds=st.sampled_from([0.3, 2.0, 40.0]))
    def wait(self, seconds):
        self.engine.clock.advance(seconds)

    @rule(family=st.integers(0, 2))
    def prefetch(self, family):
        self.engine.core.prefetch(self.keys_of(family, 4, 0), self.engine.clock.now())

    @rule()
    def flush(self):
        self.engine.core.submit_flush()

    @rule()
    def reset(self):
        self.engine.core.submit_drop()
        self.computed.clear()

    @precondition(lambda self: not self.engine.held)
    @rule()
    def restart(self):
        """The process ends; the store stays. Dropped blocks may come back only if their drop was not durable."""
        if self.engine.core.planner._dropping or self.engine.core.planner._drops:
            return
        if any(self.engine.core.residency.evictions):
            return
        self.open()

    @invariant()
    def bookkeeping_agrees(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        """When everybody has left, every slot can be had again."""
        if not hasattr(self, "engine"):
            return
        self.disk.fail_write = self.disk.fail_read = None
        for ticket in list(self.pending):
            self.engine.core.release_lease(ticket)
        for lease, _, _ in self.leases.values():
            self.engine.release(lease)
        for _ in range(5):
            self.engine.clock.advance(60.0)
            self.engine.run()
        self.engine.check()
        stats = self.engine.core.stats()
        assert stats["leases"] == 0
        gpu = stats["tiers"]["gpu"]
        assert gpu["slots_free"] + gpu["blocks_idle"] == GPU * self.groups
        if self.host is not None:
            host = stats["tiers"]["host"]
            assert host["slots_free"] + host["blocks_idle"] == self.host
        assert len(self.disk.rows) == stats["tiers"]["lmdb"]["blocks"]
        self.engine.close()


class TestEngine(EngineMachine.TestCase):
    settings = settings(
        max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.soak
class TestEngineForLong(EngineMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=120, deadline=None, suppress_health_check=list(HealthCheck)
    )
