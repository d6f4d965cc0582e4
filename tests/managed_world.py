"""Pages, an engine and tiers below for tests of managed caches: no threads, and nothing moves before the test says so.

Each token of a page has a stamp that follows from its group and from all tokens up to it, so that a wrong, late or
lost byte is seen by whoever reads. Shares no code with the package but its tiers, its core and the polled surface.
Units: tokens, blocks, seconds of a clock that the test moves.
"""

import hashlib
from collections import Counter
from types import SimpleNamespace

from kvtier.allocator.slot_pool import SlotPool
from kvtier.blocks.hashing import Keys
from kvtier.blocks.namespace import NamespaceTable
from kvtier.cache.level import Level, Room
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.specs import FullAttention, Group, Mla
from kvtier.engine.core import Core
from kvtier.engine.executor import carry_out
from kvtier.engine.managed import ManagedTop
from kvtier.engine.polled import PolledSurface, Reserve
from kvtier.policies.lru import LRU
from kvtier.testing.dict_tier import DictTier
from kvtier.tiers.host import HostTier
from kvtier.types import DONE, PAGE_BYTES, BatchDone, GroupSpec, ModelSpec, Outcome, Status, group_of

STAMP_BYTES = 8  # what one layer of one head keeps of a token: 4 bytes of K and 4 of V, or a latent of 8
TOKENS_MAX = 64
TURNS_MAX = 300
FULL, MLA = ("full", 4), ("mla", 4)


def model_of(groups=(FULL,), hash_name="sha256_cbor"):
    """A layer per group, whose blocks have `STAMP_BYTES` per token."""
    rows = [
        GroupSpec(kind, (i,), 1, 2 if kind == "mla" else 1, "float32", size) for i, (kind, size) in enumerate(groups)
    ]
    return ModelSpec("stamps", "v1", tuple(rows), hash=hash_name)


def group_for(kind, size):
    if kind == "mla":
        return Group(Mla(block_tokens=size, latent_dim=2, dtype="float32"))
    return Group(FullAttention(block_tokens=size, kv_heads=1, head_dim=1, dtype="float32"))


class Below:
    """The tiers: a host tier, and a disk that is a dict. `held`: the core's batches that are under way."""

    def __init__(self, model, host_slots=16, disk=None):
        self.disk = disk or DictTier()
        self.host = HostTier.create(
            name="host",
            capacity_bytes=host_slots * PAGE_BYTES,
            length_bytes_max=PAGE_BYTES,
            pin="off",
            hugepages="off",
        )
        self.tiers = [self.host, self.disk]
        host = Level("host", LRU(host_slots), "lru", host_slots, 1 << 16, host_slots * PAGE_BYTES, PAGE_BYTES)
        host.pool = SlotPool(host_slots, null_slot=False)
        disk = Level("lmdb", LRU(self.disk.blocks_max), "lru", self.disk.blocks_max, 1 << 16, 1 << 30, 0)
        disk.room = Room(self.disk.room, self.disk.neighbours, self.disk.used_bytes, self.disk.excess_bytes)
        self.core = Core(model, [host, disk], NamespaceTable())
        self.core.adopt(1, self.disk.scan(), self.disk.sidecar())
        self.surface = PolledSurface(self.core)
        self.config = SimpleNamespace(model=model)
        self.now_s = 0.0
        self.held = []
        self.own = {}  # tickets of the test's own, with their answers

    # ---------------------------------------------------------------- what a managed cache asks

    def peek(self, keys, *, tokens_max=None):
        return self.core.peek(keys, tokens_max)

    def match(self, keys, owner, *, tokens_max=None):
        return self.core.match(keys, owner, tokens_max, self.now_s + 30)

    def release(self, held):
        self.core.release_match(held)

    def submit(self, request):
        return self.surface.submit(request, self.now_s)

    def poll(self):
        answers = self.surface.poll()
        self.own.update(pair for pair in answers if pair[0] in self.own)
        return [pair for pair in answers if pair[0] not in self.own]

    def apply(self, done):
        self.surface.apply(done)

    # ---------------------------------------------------------------- what a test does

    def plan(self):
        self.held += self.core.plan(self.now_s)

    def finish(self, index=0):
        """Carry out a batch that is under way, and report it."""
        self.core.apply(carry_out(self.tiers, self.held.pop(index)), self.now_s)

    def run(self):
        """Until nothing moves any more."""
        for _ in range(TURNS_MAX):
            self.plan()
            if not self.held:
                return
            self.finish()
        raise AssertionError("the tiers never come to rest")

    def occupy(self, slots):
        """Somebody else takes slots of the host tier, until `give_up`. Returns the ticket."""
        groups = self.config.model.groups
        no_keys = Keys(tuple(() for _ in groups), tuple(group.block_tokens for group in groups))
        nothing = self.core.blank_match(no_keys, "test", 0)
        ticket = self.submit(Reserve(nothing, slots))
        self.own[ticket] = None
        return ticket

    def give_up(self, ticket):
        """Give back what `occupy` took."""
        self.core.give_up(ticket)

    def flush(self):
        """Copy all to disk."""
        self.own[self.core.submit_flush()] = None
        self.run()

    def forget_host(self):
        """What is in the host tier goes to disk, and leaves it."""
        self.flush()
        ticket = self.occupy(self.host.traits.slots)
        assert self.poll() == []
        self.give_up(ticket)

    def forget_all(self):
        """No tier has anything any more."""
        self.own[self.core.submit_drop()] = None
        self.run()


class Pages:
    """The memory of an arena of pages, and who copies to and from it. `moves`: those under way.

    A copy overwrites its target from its start on, and reads its source at its end: whoever reuses either meanwhile
    finds or makes a wrong byte.
    """

    def __init__(self, below, groups, blocks_total):
        self.below, self.sizes = below, [size for _, size in groups]
        self.bytes = [bytearray(b"\xee" * max(self.sizes) * STAMP_BYTES) for _ in range(blocks_total)]
        self.moves, self._done = [], []
        self.met = Counter()

    def read(self, block, offset):
        """A stamp, as the engine's kernels see it."""
        return bytes(self.bytes[block][offset : offset + STAMP_BYTES])

    def write(self, block, offset, stamp):
        self.bytes[block][offset : offset + STAMP_BYTES] = stamp

    def begin_step(self):
        """Before each step; in this memory all that was read and written is over."""

    def start(self, move):
        self.moves.append(move)
        for key, block, slot in zip(move.keys, move.blocks, move.slots, strict=True):
            self._part(key, block, slot, move.kind == "load")[0][:] = b"\xdd" * (
                self.sizes[group_of(key)] * STAMP_BYTES
            )

    def end(self, index=0, fails=()):
        """Carry a move out. fails: the positions of blocks that cannot be copied, "all" for every one."""
        move = self.moves.pop(index)
        outcomes = []
        for i, (key, block, slot) in enumerate(zip(move.keys, move.blocks, move.slots, strict=True)):
            failed = fails == "all" or i in fails
            if not failed:
                target, source = self._part(key, block, slot, move.kind == "load")
                target[:] = source
            outcomes.append(Outcome(Status.FAILED) if failed else DONE)
            self.met[f"{move.kind} {'failed' if failed else 'done'}"] += 1
        self._done.append(BatchDone(move.move_id, tuple(outcomes)))

    def answer(self, done):
        """An answer that no copy gave."""
        self._done.append(done)

    def finished(self):
        done, self._done = self._done, []
        return done

    def moving(self):
        """The blocks that copies under way read or write."""
        return {block for move in self.moves for block in move.blocks}

    def _part(self, key, block, slot, loads):
        length = self.sizes[group_of(key)] * STAMP_BYTES
        page, below = memoryview(self.bytes[block])[:length], self.below.host.slot(slot)[:length]
        return (page, below) if loads else (below, page)


class World:
    """An engine that computes what it has got blocks for, at once, and looks at every byte it reads."""

    def __init__(self, groups=(FULL,), blocks=12, host_slots=16, disk=None, ahead=0.99, below=None, **settings):
        self.model = model_of(groups, settings.get("hash_name", "sha256_cbor"))
        self.below = below or Below(self.model, host_slots, disk)
        self.pages = Pages(self.below, groups, blocks + 1)
        self.manager = KVCacheManager(
            [group_for(*group) for group in groups], blocks + 1, tokens_max=TOKENS_MAX, tiers_below=True, **settings
        )
        self.pool = self.manager.pool
        self.top = ManagedTop(self.manager, self.below, self.pages, ahead=ahead)
        self.sizes = [size for _, size in groups]
        self.running, self.loading, self.loaded = {}, {}, {}  # by id; loaded: has not gone on yet
        self.loads, self.returned = {}, Counter()  # by id: how often a load began and was not given up, and came back
        self._number = 0

    # ---------------------------------------------------------------- requests

    def request(self, tokens, name=None):
        self._number += 1
        return self.manager.request(name or f"r{self._number}", tokens)

    def admit(self, request):
        """As a scheduler does. True: it runs, and all its tokens are computed, or it loads."""
        lookup = self.top.get_computed_blocks(request)
        new = self.top.allocate_slots(request, len(request.tokens) - lookup.hit.tokens, lookup)
        if new is None:
            return False
        if self.top.is_loading(request):
            self.loading[request.request_id] = request
            self.loads[request.request_id] = self.loads.get(request.request_id, 0) + 1
            self._read(request, lookup.hit.tokens)
            return True
        self._run(request, lookup.hit.tokens)
        return True

    def proceed(self, request, tokens=()):
        """Compute the next tokens of a request that has got its load, or runs. False if there are no blocks."""
        request.append(list(tokens))
        if self.top.allocate_slots(request, len(request.tokens) - request.computed_tokens) is None:
            return False
        self._run(request, request.computed_tokens)
        return True

    def serve(self, tokens):
        """From lookup to end, with as many turns as it takes. Returns how many tokens were not computed."""
        request = self.request(tokens)
        self._until(lambda: self.admit(request))
        if request.request_id in self.loading:
            self._until(lambda: request.request_id in self.loaded)
            self._until(lambda: self.proceed(request))
        kept = request.read_tokens
        self.free(request)
        return kept

    def free(self, request):
        self._leave(request)
        self.top.free(request)

    def preempt(self, request):
        self._leave(request)
        self.top.preempt(request)

    def check_content(self):
        """All that those who run have computed still stands in their blocks."""
        for request in (*self.running.values(), *self.loaded.values()):
            self._read(request, request.computed_tokens)

    def _leave(self, request):
        name = request.request_id
        self.running.pop(name, None)
        self.loaded.pop(name, None)
        if self.loading.pop(name, None) is not None:
            self.loads[name] -= 1

    def _run(self, request, start):
        self._read(request, start)
        request.read_tokens = start
        self._write(request, start)
        request.computed_tokens, request.running = len(request.tokens), True
        self.loaded.pop(request.request_id, None)
        self.running[request.request_id] = request

    def _read(self, request, end):
        for place, stamp in self._stamps(request, 0, end):
            block, offset = place
            found = self.pages.read(block, offset)
            assert found == stamp, f"{request.request_id}: block {block} has other bytes at {offset}"

    def _write(self, request, start):
        for (block, offset), stamp in self._stamps(request, start, len(request.tokens)):
            assert block not in self.pages.moving(), f"{request.request_id} writes into block {block}, which moves"
            self.pages.write(block, offset, stamp)

    def _stamps(self, request, start, end):
        """(block, offset) and what is to stand there, for the tokens [start, end) in every group."""
        tables = self.manager.block_ids(request)
        for group, (table, size) in enumerate(zip(tables, self.sizes, strict=True)):
            for i, stamp in enumerate(stamps(group, request.tokens)[:end]):
                if i >= start:
                    yield (table[i // size], i % size * STAMP_BYTES), stamp

    # ---------------------------------------------------------------- turns

    def step(self):
        """The manager's step; returns the requests that were loading."""
        self.pages.begin_step()
        ready = self.top.step()
        for request in ready:
            name = request.request_id
            assert self.loading.pop(name, None) is request, f"{name} did not load"
            self.loaded[name] = request
            self.returned[name] += 1
            self._read(request, request.computed_tokens)
        self.check()
        return ready

    def turn(self):
        """Everything that is under way ends; then a step."""
        self.below.run()
        while self.pages.moves:
            self.pages.end()
        return self.step()

    def end_loads(self):
        """Turns until nobody loads."""
        self._until(lambda: not self.loading)

    def settle_stores(self):
        """Turns until nothing is worth to be copied, however long it takes to be tried."""
        self._until(lambda: self.top.is_idle and not self.pool.dirty(self.pool.blocks_free))

    def settle(self):
        """Turns until nothing moves."""
        self.turn()
        self._until(lambda: self.top.is_idle and not self.below.core.busy)

    def _until(self, done):
        for _ in range(TURNS_MAX):
            if done():
                return
            self.turn()
        raise AssertionError("the engine waits in vain")

    def flush(self):
        """All that nobody uses is copied to the disk."""
        self.top.flush()
        self.settle()
        self.below.flush()

    def check(self):
        assert self.top.check() == []
        assert self.pool.blocks_free == len(self.pool.free_blocks())
        assert self.below.core.check() == []
        assert not self.pages.moving() & set(self.pool.free_blocks()), "a block is free and moves"
        for request in self.loading.values():
            assert self.top.is_loading(request)

    def drain(self):
        """All requests leave and all moves end: nothing is held any more."""
        for request in [*self.running.values(), *self.loading.values(), *self.loaded.values()]:
            self.free(request)
        self.below.disk.fail_read = self.below.disk.fail_write = None
        for ticket in self.below.own:
            self.below.give_up(ticket)
        self.settle()
        assert sorted(self.pool.free_blocks()) == list(range(1, self.pool.blocks_total))
        stats = self.below.core.stats()
        assert (stats["leases"], stats["batches_in_flight"]) == (0, 0)
        assert +Counter(self.loads) == self.returned


def stamps(group, tokens):
    """Of each token: its group, and all tokens up to it."""
    state, found = hashlib.blake2b(bytes([group]), digest_size=STAMP_BYTES), []
    for token in tokens:
        state.update(token.to_bytes(4, "big"))
        found.append(state.copy().digest())
    return found
