"""A polled engine and a dict that says what may be served: every operation compares the two, byte for byte.

The dict is the set of keys that somebody has committed and nobody has dropped. It shares no code with the engine.
Prompts share prefixes: `depth` blocks of one of a few families, the last block of one of two branches.
"""

from kvtier.blocks.hashing import hash_blocks
from kvtier.cache.leases import Lease, NoRoom
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES, block_key_of
from tests.engine_bench import BLOCK_BYTES, BLOCK_TOKENS, content_of, make_engine, tiny_model

GPU, HOST, DISK = 6, 5, 12  # slots and blocks per group


class World:
    """Operations that a test, or chance, may call in any order."""

    def __init__(self, host, groups, policies=("lru", "lru", "lru")):
        self.model = tiny_model(groups=groups)
        self.policies = policies if host else (policies[0], policies[2])
        self.gpu = GPU * groups
        self.host = HOST * groups if host else None
        self.disk = DictTier(blocks_max=DISK * groups)
        self.computed = set()
        self.pending = {}  # ticket -> keys
        self.leases = {}  # ticket -> (lease, keys, whether committed)
        self.drops = {}  # ticket -> generation of the last row before it
        self.resizes = {}  # ticket -> usable slots asked for
        self.engine = self.start()

    def start(self):
        return make_engine(self.gpu, self.host, self.disk, self.model, policies=self.policies, gpu_max=2 * self.gpu)

    def keys_of(self, family, depth, branch):
        tokens = [family * 100 + i for i in range((depth - 1) * BLOCK_TOKENS)] + [1000 + branch] * BLOCK_TOKENS
        return hash_blocks(tokens, self.model)

    # ------------------------------------------------------------ requests

    def request(self, keys, deadline_s):
        """Ask for a prompt; its promotions are under way when this returns."""
        ticket = self.engine.submit_reserve(self.engine.match(keys), len(keys.groups[0]), deadline_s)
        self.pending[ticket] = keys
        self._collect()
        return ticket

    def serve(self, keys, keep):
        """A whole request in one go."""
        ticket = self.request(keys, 9.0)
        self.run()
        if ticket in self.leases:
            self.compute(ticket)
            if not keep:
                self.release(ticket)

    def compute(self, ticket):
        """Write and commit what a lease has to compute."""
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

    def release(self, ticket):
        """Give a lease back; until now its slots must have held what they held."""
        lease, keys, committed = self.leases.pop(ticket)
        self._compare(lease, keys, len(keys.groups[0]) if committed else lease.tokens_ready // BLOCK_TOKENS)
        self.engine.release(lease)

    def cancel(self, ticket):
        del self.pending[ticket]
        self.engine.core.give_up(ticket)

    def look(self, keys, release):
        match = self.engine.match(keys, ttl_s=3.0)
        if release:
            self.engine.core.release_match(match)

    def _collect(self):
        """Look at every answer: what is said to be ready must hold the bytes of its key."""
        for ticket in [t for t in self.pending if t in self.engine.answers]:
            keys, answer = self.pending.pop(ticket), self.engine.answers.pop(ticket)
            if isinstance(answer, Lease):
                ready = answer.tokens_ready // BLOCK_TOKENS
                for row in keys.groups:
                    assert self.computed.issuperset(row[:ready]), "a block nobody has computed is served"
                self._compare(answer, keys, ready)
                self.leases[ticket] = (answer, keys, False)
            else:
                assert isinstance(answer, NoRoom)

        for ticket in [t for t in self.resizes if t in self.engine.answers]:
            self.resizes.pop(ticket)
            assert self.engine.answers.pop(ticket).bytes <= (2 * self.gpu + 1) * PAGE_BYTES

        for ticket in [t for t in self.drops if t in self.engine.answers]:
            before, answer = self.drops.pop(ticket), self.engine.answers.pop(ticket)
            if answer.durable:
                assert all(generation > before for _, generation, _ in self.disk.rows.values())

    def _compare(self, lease, keys, blocks):
        for group, row in enumerate(keys.groups):
            for slot, key in list(zip(lease.slots(group), row, strict=False))[:blocks]:
                found = bytes(self.engine.tiers[0].slot(slot)[:BLOCK_BYTES])
                assert found == content_of(key, BLOCK_BYTES), f"wrong bytes in slot {slot}"

    # ------------------------------------------------------------ movement

    def plan(self):
        self.engine.plan()
        self._collect()

    def finishable(self):
        """Batches that may end now: any, but writes to the disk keep their order."""
        lowest = len(self.engine.tiers) - 1
        writes = [batch for batch in self.engine.held if batch.target == lowest]
        return [batch for batch in self.engine.held if batch.target != lowest] + writes[:1]

    def finish(self, batch):
        self.engine.finish(batch)
        self._collect()

    def run(self):
        self.engine.run()
        self._collect()

    def resize(self, slots):
        """Ask for so many usable slots; what comes of it is looked at when it is answered."""
        self.resizes[self.engine.core.submit_resize("gpu", (slots + 1) * PAGE_BYTES)] = slots

    def squeeze(self, blocks):
        """Others leave so much of the disk."""
        self.disk.allowed_bytes = None if blocks is None else blocks * BLOCK_BYTES

    def reset(self):
        self.drops[self.engine.core.submit_drop()] = self.disk.generation
        self.computed.clear()

    def restart(self):
        """The process ends between batches and the store stays; unless a drop is not durable yet, and may be undone."""
        stored = {block_key_of(key) for key, _, _ in self.disk.rows.values()}
        if self.engine.held or not stored <= self.computed:
            return
        before = self.leaving()
        all_known = {key for key, _, _ in self.disk.rows.values()} == set(before[0])  # none was on its way out
        written_down = not self.order().changed and all_known
        self.engine.close()
        self.pending.clear()
        self.leases.clear()
        self.drops.clear()
        self.resizes.clear()
        self.engine = self.start()
        if written_down:
            assert self.leaving() == before, "a restart has changed the order of eviction"

    def order(self):
        """The policy of the disk."""
        return self.engine.core.residency.levels[-1].policy

    def leaving(self):
        """What would leave the disk, in order, and what its policy remembers."""
        key, order = self.engine.core.residency.directory.key, self.order()
        return [key(h) for h in order.candidates(len(order))], {key(h) for h in order.ghosts()}

    # ------------------------------------------------------------ the end

    def check(self):
        self.engine.check()
        gpu, level = self.engine.tiers[0], self.engine.core.residency.levels[0]
        assert gpu.check() == []
        if not any(batch.remap for batch in self.engine.held):
            assert gpu.granules_mapped == level.granules
            assert gpu._driver.used_bytes == len(level.granules) * PAGE_BYTES, "memory did not go back"
            assert level.capacity_bytes == gpu.traits.capacity_bytes

    def wind_up(self):
        """When everybody has left and the disk works, every slot can be had again, and nothing is lost track of."""
        self.disk.fail_write = self.disk.fail_read = None
        self.disk.allowed_bytes = 3 * BLOCK_BYTES
        for ticket in list(self.pending):
            self.cancel(ticket)
        for ticket in list(self.leases):
            self.release(ticket)
        for _ in range(5):
            self.engine.clock.advance(60.0)
            self.run()
        assert self.disk.used_bytes() <= 3 * BLOCK_BYTES, "nobody holds what has to make way"
        self.disk.allowed_bytes = None
        self.engine.clock.advance(60.0)
        self.run()
        self.resize(self.gpu)
        [asked] = self.resizes
        self.engine.run()
        assert self.engine.answers[asked].bytes == (self.gpu + 1) * PAGE_BYTES, "nobody holds a slot any more"
        self.check()
        stats = self.engine.core.stats()
        assert (stats["leases"], stats["batches_in_flight"], stats["tiers"]["gpu"]["slots"]) == (0, 0, self.gpu + 1)
        for name, slots in (("gpu", self.gpu), ("host", self.host)):
            if slots is not None:
                tier = stats["tiers"][name]
                assert tier["slots_free"] + tier["blocks_idle"] == slots, name
        assert len(self.disk.rows) == stats["tiers"]["lmdb"]["blocks"]
        self.engine.close()
        return stats
