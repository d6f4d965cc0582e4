"""The order of eviction outlives the process: what `OrderLog` writes down, and what a restart makes of it."""

import random
import zlib
from array import array

import cbor2
import numpy as np
import pytest

from kvtier.cache import order_rows
from kvtier.cache.order_ghosts import Ghost, PackedGhosts
from kvtier.cache.order_replay import Recalled, recall, todays_key
from kvtier.policies import POLICIES as POLICY_MAKERS
from kvtier.policies.base import Access, Hint
from kvtier.policies.lru import LRU
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES, Status, block_key, store_key
from tests.engine_bench import make_engine, prompt, serve

POLICIES = ("lru", "arc")


def start(disk, policy):
    return make_engine(6, 5, disk, policies=("lru", "lru", policy))


def order_of(engine):
    return engine.core.residency.levels[-1].policy


def leaving(engine):
    """The keys in the disk's policy, first to leave first, and those of its ghosts."""
    key, order = engine.core.residency.directory.key, order_of(engine)
    return [key(h) for h in order.candidates(len(order))], {key(h) for h in order.ghosts()}


def use(engine, seed, requests=40):
    """Requests that overfill the disk, and come back to some prompts often."""
    rng = random.Random(seed)
    for _ in range(requests):
        serve(engine, prompt(min(rng.randrange(12), rng.randrange(12)), rng.randint(1, 4)))
        engine.run()


def flushed(engine):
    engine.core.submit_flush()
    engine.run()
    return engine


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_a_restart_finds_the_order_of_the_last_commit(policy, seed):
    """After a restart the blocks that are used most leave first, because they were written first."""
    disk = DictTier(blocks_max=16)
    for _ in range(3):
        engine = start(disk, policy)
        use(engine, seed)
        before = leaving(flushed(engine))
        again = start(disk, policy)
        again.check()
        assert leaving(again) == before
    assert before[0] != sorted(before[0])  # it is an order of use, not one that comes about by itself
    assert (policy == "arc") == bool(before[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_committed_is_not_known_and_what_is_enters_last(policy):
    """A process that was killed leaves an order that mentions blocks which are not there, or lacks those that are."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, policy)
    use(engine, 1)
    flushed(engine)
    known = leaving(engine)[0]
    serve(engine, prompt(50, 3))
    engine.core.submit_flush()
    while any(key not in disk_keys(disk) for key in store_keys(engine, prompt(50, 3))):
        engine.plan()
        engine.finish(engine.held[0])  # and now it is killed: nobody has noted yet that these blocks were written
    again = start(disk, policy)
    again.check()
    order = leaving(again)[0]
    assert set(order) == disk_keys(disk)
    assert set(order) - set(known) == set(store_keys(again, prompt(50, 3)))
    if policy == "lru":  # in ARC's order, where new blocks stand depends on how many there are
        assert [key for key in order if key in known] == [key for key in known if key in order]
        assert set(order[-3:]) == set(store_keys(again, prompt(50, 3)))


def disk_keys(disk):
    return {key for key, _, _ in disk.rows.values()}


def store_keys(engine, keys):
    return [(0).to_bytes(4, "big") + key for key in keys.groups[0]]


@pytest.mark.parametrize("seed", range(4))
def test_arc_goes_on_as_if_there_had_been_no_restart(seed):
    """Ghosts, their kind or p are lost: the policy has to learn anew."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, "arc")
    use(engine, seed)
    flushed(engine)
    again = start(disk, "arc")
    rng = random.Random(seed)
    for _ in range(300):
        resident, ghosts = leaving(engine)
        key, what = rng.choice(resident), rng.choice([Access.REUSE, Access.REUSE, Access.FILL])
        for each in (engine, again):
            order, find = order_of(each), each.core.residency.directory.find
            if what is Access.REUSE or not ghosts:
                order.touch([find(key)], Access.REUSE)
            else:
                back = find(min(ghosts))
                order.evict(order.candidates(1, incoming=back), back)
                order.touch([back], Access.FILL, PAGE_BYTES)
        assert leaving(again) == leaving(engine)


@pytest.mark.parametrize("policy", [*POLICIES, "hit_density"])
@pytest.mark.parametrize("seed", range(3))
def test_hints_are_part_of_the_order(policy, seed):
    """After a restart sessions that are over leave as late as those that go on, or in another order."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, policy)
    use(engine, seed)
    flushed(engine)  # from here on the log alone tells
    order, rng = order_of(engine), random.Random(seed)
    for _ in range(12):
        some = rng.sample(order.candidates(len(order)), 3)
        order.hint(
            some, rng.choice([Hint(ends=True), Hint(ends=True, shared=True), Hint(returns_in=rng.randrange(99))])
        )
        if not rng.randrange(3):
            order.touch(some[:1], Access.REUSE)
    before = leaving(flushed(engine))
    again = start(disk, policy)
    again.check()
    assert leaving(again) == before


@pytest.mark.parametrize("before", POLICIES)
@pytest.mark.parametrize("after", POLICIES)
def test_another_policy_takes_over_the_order(before, after):
    """Whoever changes the policy in the YAML starts with an order of writing."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, before)
    use(engine, 3)
    expected = leaving(flushed(engine))[0]
    again = start(disk, after)
    again.check()
    assert leaving(again)[0] == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_damage_costs_order_and_nothing_else(policy):
    """A damaged row of the sidecar keeps the cache from opening, or makes it serve nonsense."""
    disk = DictTier(blocks_max=16)
    use(flushed(start(disk, policy)), 5)
    rng = random.Random(0)
    whole = dict(disk.notes)
    damaged = {name: row for name, row in whole.items() if name.startswith(order_rows.PREFIX)}
    assert len(damaged) > 3
    for name, row in damaged.items():
        for change in (None, b"", row[:-1], flip(row, rng), flip(row, rng), cbor2.dumps([1, {}]), cbor2.dumps({})):
            disk.notes = whole | {name: change} if change is not None else without(whole, name)
            engine = start(disk, policy)
            engine.check()
            assert set(leaving(engine)[0]) == disk_keys(disk)


def flip(row, rng):
    at = rng.randrange(len(row))
    return row[:at] + bytes([row[at] ^ (1 << rng.randrange(8))]) + row[at + 1 :]


def without(rows, name):
    return {key: row for key, row in rows.items() if key != name}


def test_a_gap_in_the_log_ends_it():
    """Calls that follow a lost batch are told to a policy that does not know their blocks."""
    disk = DictTier(blocks_max=16)
    use(start(disk, "arc"), 5)
    logs = sorted(name for name in disk.notes if name.startswith(order_rows.LOG_KEY))
    assert len(logs) > 4
    whole = recall(disk.notes)
    cut = recall(without(disk.notes, logs[2]))
    assert places_of(cut) != places_of(whole)
    assert cut.policy.check() == []


def test_a_log_behind_a_lost_snapshot_fits_no_older_one():
    """What was planned while a snapshot was on its way is told to the policy of the snapshot before."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, "lru")
    use(engine, 5)
    order = order_of(flushed(engine))
    before = recall(disk.notes).policy
    order._snapshot_due = order.changed = True
    lost = order.piece()
    assert any(name.startswith(order_rows.SNAPSHOT_KEY) for name in lost)
    order.touch(order.candidates(1), Access.REUSE, 1)
    behind = order.piece()
    assert [name.startswith(order_rows.LOG_KEY) for name in behind] == [True]
    after = recall(disk.notes | behind).policy
    assert after.candidates(len(after)) == before.candidates(len(before))


def test_a_failed_batch_is_followed_by_a_snapshot():
    """After a failing disk the log has a hole for good."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, "arc")
    use(engine, 2)
    disk.fail_write = Status.FAILED
    use(engine, 3, requests=5)
    disk.fail_write = None
    engine.clock.advance(100)
    use(engine, 4)
    before = leaving(flushed(engine))
    assert leaving(start(disk, "arc")) == before


def test_the_log_is_bounded_and_old_rows_go():
    """The index fills up with what the policy was told years ago."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, "lru")
    sizes = []
    for round_ in range(60):
        use(engine, round_, requests=20)
        order_of(engine)._log_bytes += 8 << 10  # as if it were long
        sizes.append(sum(name.startswith(order_rows.PREFIX) for name in disk.notes))
    assert max(sizes[30:]) < max(sizes[:30]) * 1.1
    assert min(sizes[30:]) < max(sizes) / 4
    assert sum(name.startswith(order_rows.SNAPSHOT_KEY) for name in disk.notes) == 1


def test_touches_alone_are_written_down_too():
    """A cache that only reads for a week has an order of last week after a restart."""
    disk = DictTier(blocks_max=16)
    engine = flushed(start(disk, "lru"))
    serve(engine, prompt(1, 4))
    flushed(engine)
    batches = len(disk.notes)
    for _ in range(3000):
        serve(engine, prompt(1, 4))
        engine.run()
        if len(disk.notes) > batches:
            break
    else:
        pytest.fail("nothing was written down")


def test_a_full_index_is_left_alone_for_a_while():
    """Every batch carries a snapshot that does not fit."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, "lru")
    order = order_of(engine)
    rows = []
    for _ in range(40):
        order.touch([], Access.REUSE)
        piece = order.piece()
        rows.append(bool(piece))
        if piece:
            order.settled(piece, kept=False, no_room=True)
    assert rows.count(True) < 8
    assert rows[0]


def test_ghosts_keep_their_namespace():
    """After a restart, whose namespaces have other numbers, a ghost comes back as another model's block."""
    namespaces = {0: b"a" * 32, 1: b"b" * 32}
    recalled = Recalled("arc", None, namespaces)
    today = {b"b" * 32: 0, b"c" * 32: 1}
    mine, gone = (Ghost(5, 100, store_key(number, block_key(b"hash", 0))) for number in (1, 0))
    assert todays_key(recalled, mine, today.get) == store_key(0, block_key(b"hash", 0))
    assert todays_key(recalled, gone, today.get) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_handles_of_then_cost_no_memory(policy):
    """A hostile store with handles near 2**31 makes its policy gigabytes long."""
    disk = DictTier(blocks_max=16)
    use(flushed(start(disk, policy)), 5)
    huge = 2**31 - 100
    snapshot = order_rows.Snapshot("lru", 16, lru_of(huge), np.array([[huge, 3]], np.uint32), PackedGhosts(), {})
    disk.notes |= order_rows.encode_snapshot(1000, snapshot)
    recalled = recall(disk.notes)
    assert places_of(recalled) == {0: 3}
    assert len(recalled.policy) == 1
    engine = start(disk, policy)
    engine.check()
    assert set(leaving(engine)[0]) == disk_keys(disk)


def places_of(recalled):
    handles, places = recalled.places.known()
    return dict(zip(handles.tolist(), places.tolist(), strict=True))


def lru_of(handle):
    """The snapshot of a policy that knows this handle, made without paying for it."""
    small = POLICY_MAKERS.get("lru")(16)
    small.touch([7], Access.FILL, PAGE_BYTES)
    body = small.snapshot()[:-4].replace((7).to_bytes(4, "little"), handle.to_bytes(4, "little"))
    return body + zlib.crc32(body).to_bytes(4, "little")


HOSTILE = {
    "a policy of a later version": {
        order_rows.HEAD_KEY: cbor2.dumps({"policy": "later", "snapshot": 1, "chunks": 0, "crc": 0})
    },
    "a log that cannot go on": {order_rows.LOG_KEY + b"\xff" * 8: b"x"},
    "a snapshot that cannot go on": {order_rows.SNAPSHOT_KEY + b"\xff" * 12: b"x"},
}


@pytest.mark.parametrize("rows", HOSTILE.values(), ids=HOSTILE)
def test_rows_of_others_cost_order_and_nothing_else(rows):
    """A store of a later version does not open, or stops the engine at its first batch."""
    disk = DictTier(blocks_max=16)
    use(flushed(start(disk, "lru")), 5)
    disk.notes |= rows
    engine = start(disk, "lru")
    use(engine, 6)
    before = leaving(flushed(engine))
    engine.check()
    assert leaving(start(disk, "lru")) == before


def test_calls_that_disagree_with_themselves_cost_order_and_nothing_else():
    """A block that the policy does not know can never leave."""
    disk = DictTier(blocks_max=16)
    use(flushed(start(disk, "lru")), 5)
    number, snapshot = order_rows.decode_snapshot(disk.notes)
    unknown = order_rows.Snapshot(
        snapshot.policy, snapshot.blocks, POLICY_MAKERS.get("lru")(16).snapshot(), snapshot.places, PackedGhosts(), {}
    )
    disk.notes = order_rows.encode_snapshot(number, unknown)
    engine = start(disk, "lru")
    engine.check()
    assert set(leaving(engine)[0]) == disk_keys(disk)
    handles = snapshot.places[:2, 0].tolist()
    twice = [["evict", -1, array("I", [handle, handle]).tobytes(), b"", b""] for handle in handles]
    disk.notes = order_rows.encode_snapshot(number, snapshot) | {
        order_rows.log_key(number): order_rows.encode_log(number, twice, {})
    }
    engine = start(disk, "lru")
    engine.check()
    assert set(leaving(engine)[0]) == disk_keys(disk)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_batch_of_a_process_carries_its_order(policy):
    """Until something is used, the store has the handles of a process that is gone, which mean others by now."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, policy)
    use(engine, 5)
    flushed(engine)
    again = start(disk, policy)
    before = leaving(again)
    assert not order_of(again).changed
    rows = order_of(again).piece()
    assert order_rows.HEAD_KEY in rows
    disk.notes = without_nones(disk.notes | rows)
    assert leaving(start(disk, policy)) == before


def without_nones(rows):
    return {key: row for key, row in rows.items() if row is not None}


def test_a_place_that_went_to_another_size_is_not_its_forerunners():
    """Who looks for room of a size finds a block that has another: the size class is that of who lay there before."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, "lru")
    use(engine, 5)
    known = leaving(flushed(engine))[0]
    place = next(place for place, row in disk.rows.items() if row[0] == known[0])  # the next to leave
    key, generation, _ = disk.rows[place]
    disk.rows[place] = key, generation, bytes(2 * PAGE_BYTES)
    again = start(disk, "lru")
    again.check()
    assert leaving(again)[0] == [*known[1:], known[0]]  # as one that nobody knew
    handle = again.core.residency.directory.find(key)
    assert order_of(again).candidates(1, (), 2 * PAGE_BYTES) == [handle]


def test_a_block_that_the_policy_knows_as_a_ghost_has_come_back():
    """A block whose return was not noted any more enters as one that was never seen."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, "arc")
    use(engine, 2)
    ghost = sorted(leaving(flushed(engine))[1])[0]
    place, (gone, _, payload) = min(disk.rows.items(), key=lambda row: row[1][1])
    del disk.rows[place]
    disk.rows[disk.blocks_max] = ghost, disk.generation + 1, payload
    order, find = order_of(engine), engine.core.residency.directory.find
    order.forget([find(gone)])
    order.touch([find(ghost)], Access.FILL, PAGE_BYTES)
    again = start(disk, "arc")
    again.check()
    assert leaving(again) == leaving(engine)
    assert order_of(again)._policy.p == order._policy.p


def test_a_policy_that_broke_is_not_used(monkeypatch):
    """A policy that a hostile log has left half changed loses blocks, or names them for ever."""
    disk = DictTier(blocks_max=16)
    engine = start(disk, "lru")
    use(engine, 5)
    flushed(engine)
    assert recall(disk.notes) is not None

    def broken(self, handles, access, size_class=0):
        self._orders.lens[1] += 1
        raise ValueError

    monkeypatch.setattr(LRU, "touch", broken)
    assert recall(disk.notes) is None
