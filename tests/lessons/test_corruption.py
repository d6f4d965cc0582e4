"""Wrong bytes: what other caches served that nobody had computed, and what must happen here instead."""

import dataclasses

import numpy as np
import pytest

import kvtier
from kvtier.blocks.hashing import hash_blocks
from kvtier.blocks.spec import LAYOUTS, block_specs
from kvtier.cache.leases import Lease
from kvtier.errors import InvariantError
from kvtier.testing.dict_tier import DictTier
from kvtier.types import DONE, BatchDone, Outcome, Status
from tests.cache_bench import config_for
from tests.engine_bench import BLOCK_BYTES, content_of, fill, make_engine, prompt, serve
from tests.lessons.places import (
    TIERS,
    at_rest,
    bytes_in,
    empty_gpu,
    mixed_model,
    prefix_in,
    refuse,
    run_but,
    serve_any,
    store_alone,
    unreadable,
)

BAD_READS = [Status.FAILED, Status.MISSING, Status.CORRUPT]
BAD_WRITES = [Status.FAILED, Status.NO_ROOM]


# ---------------------------------------------------------------- what is not written is not found


@pytest.mark.parametrize("status", BAD_WRITES)
@pytest.mark.parametrize("host", [None, 16])
@pytest.mark.parametrize("fails", [0, 1, 3])
def test_a_block_whose_store_failed_is_found_nowhere_below(host, fails, status):
    """A failed store stays visible, and every later hit is gibberish (LMCache#4991)."""
    disk, keys = DictTier(), prompt(1, 4)
    engine = make_engine(gpu=8, host=host, disk=disk)
    mend = refuse(disk, [keys.groups[0][fails]], status)
    serve(engine, keys)
    engine.core.submit_flush()
    at_rest(engine)
    restarted = make_engine(gpu=8, host=host, disk=disk)
    assert restarted.core.peek(keys).tokens == fails * 4
    lease = serve_any(restarted, keys)
    assert lease.tokens_ready == fails * 4
    mend()
    restarted.release(lease)
    restarted.core.submit_flush()
    at_rest(restarted)
    assert make_engine(gpu=8, host=host, disk=disk).core.peek(keys).tokens == 16


def test_a_block_whose_store_failed_is_gone_when_its_only_copy_goes():
    """The same inside one process: the memory is reused, and the lookup still names the block (LMCache#4991)."""
    disk, keys = DictTier(), prompt(1, 4)
    engine = make_engine(gpu=4, host=None, disk=disk, watermarks=(0.9, 0.95))
    disk.fail_write = Status.FAILED
    serve(engine, keys)
    at_rest(engine)
    serve(engine, prompt(2, 4))
    at_rest(engine)
    assert not disk.rows
    assert engine.core.peek(keys).tokens == 0
    assert serve(engine, keys).tokens_ready == 0
    engine.check()


@pytest.mark.parametrize("tier", ["gpu", "host"])
def test_a_copy_is_found_from_its_acknowledgement_on_and_not_before(tier):
    """Lookups are told of a block while its write is under way, and a failure makes that a lie (LMCache#4991)."""
    engine, keys = prefix_in(tier, host=16 if tier == "host" else None)
    engine.core.submit_flush()
    engine.plan()
    stores = [batch for batch in engine.held if batch.target == len(engine.tiers) - 1]
    assert {transfer.key[4:] for batch in stores for transfer in batch.transfers} <= set(keys.groups[0])
    for batch in stores:
        engine.finish(batch, [Outcome(Status.FAILED)] * batch.outcomes)
    assert engine.core.peek(keys).tiers["lmdb"] == 0
    assert engine.core.stats()["tiers"]["lmdb"]["blocks"] == 0
    assert make_engine(host=None, disk=engine.tiers[-1]).core.peek(keys).tokens == 0
    assert at_rest(engine)["tiers"]["lmdb"]["write_failed"] == 4
    assert make_engine(host=None, disk=engine.tiers[-1]).core.peek(keys).tokens == 16


def test_a_slot_that_was_not_committed_is_never_copied_down():
    """A store reads KV before the forward pass that writes it has ended (ATOM PR#1807, vllm#45704, vllm#47282)."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=16, disk=disk, watermarks=(0.9, 0.95))
    keys = prompt(1, 4)
    lease = engine.reserve_now(engine.match(keys), 4)
    slots = list(zip(lease.slots(), keys.groups[0], strict=True))
    for slot, _ in slots:
        engine.tiers[0].slot(slot)[:BLOCK_BYTES] = b"\xab" * BLOCK_BYTES  # half a forward pass
    engine.core.submit_flush()
    at_rest(engine)
    assert not disk.rows
    for slot, key in slots[:2]:
        engine.tiers[0].slot(slot)[:BLOCK_BYTES] = content_of(key, BLOCK_BYTES)
    engine.core.commit(lease, slots[:2])
    engine.core.submit_flush()
    at_rest(engine)
    assert {key[4:]: data for key, _, data in disk.rows.values()} == {
        key: content_of(key, BLOCK_BYTES) for _, key in slots[:2]
    }
    engine.release(lease)


# ---------------------------------------------------------------- what failed is not served


class Breach:
    """Ways in which a tier may break its promise of one outcome per item."""

    @staticmethod
    def raises(items):
        scribble(items)
        raise OSError("the driver is gone")

    @staticmethod
    def answers_too_little(items):
        scribble(items)
        return [DONE] * (len(items) - 1)

    @staticmethod
    def answers_too_much(items):
        scribble(items)
        return [DONE] * (len(items) + 1)

    @staticmethod
    def answers_nothing(items):
        scribble(items)


def scribble(items):
    for item in items:
        item.into[:BLOCK_BYTES] = b"\xee" * BLOCK_BYTES


@pytest.mark.parametrize("breach", ["raises", "answers_too_little", "answers_too_much", "answers_nothing"])
@pytest.mark.parametrize("host", [None, 16])
def test_a_tier_that_breaks_its_promise_is_a_miss(breach, host, caplog):
    """A count of completions stands for success, or an exception is the end of the engine (dynamo#15079, vllm#39732,
    vllm PR#52838)."""
    engine, keys = prefix_in("lmdb", host=host)
    disk = engine.tiers[-1]
    read, disk.read = disk.read, getattr(Breach, breach)
    lease = engine.reserve(engine.match(keys), 4)
    assert isinstance(lease, Lease)
    assert lease.tokens_ready == 0
    assert engine.core.stats()["restored_tokens"] == 0
    fill(engine, lease, keys)
    engine.release(lease)
    disk.read = read
    at_rest(engine)
    lease = serve(engine, keys)  # looks at every byte
    assert lease.tokens_ready == 16
    assert "failed" in caplog.text


@pytest.mark.parametrize("breach", [OSError("gone"), None])
def test_a_store_that_breaks_its_promise_has_stored_nothing(breach, caplog):
    """The same on the way down: the block counts as clean, and its only copy is given away (dynamo#15079)."""
    disk, keys = DictTier(), prompt(1, 4)
    engine = make_engine(gpu=8, host=None, disk=disk)

    def write(batch):
        if breach:
            raise breach
        return [DONE]

    honest, disk.write = disk.write, write
    serve(engine, keys)
    engine.core.submit_flush()
    engine.run()
    assert engine.core.unsaved() == 4
    assert engine.core.stats()["tiers"]["lmdb"]["blocks"] == 0
    disk.write = honest
    engine.core.submit_flush()
    at_rest(engine)
    assert make_engine(gpu=8, host=None, disk=disk).core.peek(keys).tokens == 16


def test_outcomes_that_do_not_fit_a_batch_are_an_error():
    """One outcome stands for a whole batch (dynamo#15079)."""
    engine, keys = prefix_in("lmdb")
    engine.submit_reserve(engine.match(keys), 4)
    (batch,) = engine.plan()
    with pytest.raises(InvariantError, match="1 outcomes for 4 items"):
        engine.core.apply(BatchDone(batch.batch_id, (DONE,)), 0.0)
    assert engine.core.peek(keys).tiers["host"] == 0


@pytest.mark.parametrize("status", BAD_READS)
@pytest.mark.parametrize(
    ("group", "index", "tokens"), [(0, 0, 0), (0, 3, 8), (0, 5, 16), (1, 0, 0), (1, 1, 8), (1, 2, 16)]
)
def test_a_load_that_fails_in_one_group_cuts_all_of_them(group, index, tokens, status):
    """KV of one pool is used beside a sidecar that is not there, or the failure is met with one group only
    (sglang PR#31108, sglang PR#21125, vllm#50687, LMCache#3388)."""
    model, disk = mixed_model(), DictTier()
    keys = hash_blocks(list(range(24)), model)  # six blocks of 4, three of 8
    store_alone(disk, [keys], gpu=16, model=model)
    engine = make_engine(gpu=16, host=16, disk=disk, model=model)
    assert engine.core.peek(keys).tokens == 24
    mend = unreadable(disk, [keys.groups[group][index]], status)
    lease = serve_any(engine, keys)
    assert lease.tokens_ready == tokens
    engine.release(lease)
    mend()
    at_rest(engine)
    lease = serve_any(engine, keys)
    assert lease.tokens_ready == 24
    engine.release(lease)
    engine.check()


@pytest.mark.parametrize("first", [0, 1])
def test_a_subset_of_a_blocks_pools_is_a_miss(first):
    """The draft's or the indexer's KV is not restored with the target's (sglang PR#21125)."""
    model = mixed_model()
    engine = make_engine(gpu=16, host=16, disk=DictTier(), model=model)
    keys = hash_blocks(list(range(16)), model)
    lease = engine.reserve_now(engine.match(keys), 4)
    for group in (first, 1 - first):
        assert engine.core.peek(keys).tokens == 0
        pairs = list(zip(lease.slots(group), keys.groups[group], strict=True))
        for slot, key in pairs:
            engine.tiers[0].slot(slot)[:BLOCK_BYTES] = content_of(key, BLOCK_BYTES)
        engine.core.commit(lease, pairs)
    assert engine.core.peek(keys).tokens == 16
    engine.release(lease)


def test_whoever_joins_a_load_waits_for_all_of_it():
    """One of several readers skips the wait, and reads a block that is still written (sglang PR#22811)."""
    engine, keys = prefix_in("lmdb")
    tickets = [engine.submit_reserve(engine.match(keys), 4, deadline_s=9.0)]
    (to_host,) = engine.plan()
    tickets.append(engine.submit_reserve(engine.match(keys), 4, deadline_s=9.0))
    engine.finish(to_host)
    tickets.append(engine.submit_reserve(engine.match(keys), 4, deadline_s=9.0))
    (to_gpu,) = engine.plan()
    tickets.append(engine.submit_reserve(engine.match(keys), 4, deadline_s=9.0))
    assert (to_host.target, to_gpu.target) == (1, 0)
    assert not set(tickets) & set(engine.answers)
    engine.finish(to_gpu)
    for ticket in tickets:
        lease = engine.answers[ticket]
        assert lease.tokens_ready == 16
        for slot, key in zip(lease.slots(), keys.groups[0], strict=True):
            assert bytes_in(engine, 0, slot) == content_of(key, BLOCK_BYTES)
        engine.release(lease)
    assert engine.core.stats()["tiers"]["lmdb"]["read_blocks"] == 4


# ---------------------------------------------------------------- what is read stays


def under_way(path):
    """An engine with one batch under way, from one tier to another, and the prompt that it moves."""
    source, target = path
    engine, keys = prefix_in(TIERS[source], gpu=8, host=8, disk=DictTier(blocks_max=12))
    if source < target:
        engine.core.submit_flush()
    else:
        engine.submit_reserve(engine.match(keys), 4, deadline_s=1e9)
    for _ in range(10):
        engine.plan()
        wanted = [batch for batch in engine.held if (batch.source, batch.target) == path and batch.transfers]
        if wanted:
            return engine, keys, wanted
        engine.finish(engine.held[0])
    raise AssertionError("nothing moves that way")


@pytest.mark.parametrize("path", [(0, 1), (1, 2), (2, 1), (1, 0)])
def test_what_is_being_copied_is_neither_evicted_nor_overwritten(path):
    """A block is read without a lease on one of the tiers' paths, and its place is given to another one
    (Mooncake#4153, vllm#46951, vllm#54779)."""
    engine, _, batches = under_way(path)
    disk = engine.tiers[2]
    rows = dict(disk.rows)
    for number in range(20, 32):
        ticket = engine.submit_reserve(engine.match(prompt(number, 3)), 3)
        run_but(engine, batches)
        lease = engine.answers.pop(ticket)
        if isinstance(lease, Lease):
            fill(engine, lease, prompt(number, 3))
            engine.release(lease)
        engine.core.submit_flush()
        run_but(engine, batches)
        engine.clock.advance(1.0)
        engine.check()
    for batch in batches:
        for transfer in batch.transfers:
            if path[0] == 2:
                assert disk.rows[transfer.source_place] == rows[transfer.source_place]
            else:
                assert bytes_in(engine, path[0], transfer.source_place) == content_of(transfer.key[4:], BLOCK_BYTES)
        engine.finish(batch)
    at_rest(engine)


def test_a_load_lands_in_no_slot_that_somebody_reads():
    """A load overwrites KV that a running request still attends to (vllm#45704, vllm#47282)."""
    disk = DictTier()
    store_alone(disk, [prompt(number, 4) for number in range(6)])
    engine = make_engine(gpu=8, host=8, disk=disk)
    reading = engine.reserve(engine.match(prompt(0, 4)), 4)
    for number in range(1, 6):
        ticket = engine.submit_reserve(engine.match(prompt(number, 4)), 4)
        engine.plan()
        targets = {t.target_place for batch in engine.held if batch.target == 0 for t in batch.transfers}
        assert not targets & set(reading.slots())
        engine.run()
        engine.release(engine.answers.pop(ticket))
        for slot, key in zip(reading.slots(), prompt(0, 4).groups[0], strict=True):
            assert bytes_in(engine, 0, slot) == content_of(key, BLOCK_BYTES)
    engine.release(reading)
    engine.check()


@pytest.mark.parametrize("path", [(0, 1), (1, 2)])
@pytest.mark.parametrize("store_first", [True, False])
@pytest.mark.parametrize("status", [Status.DONE, Status.FAILED])
def test_a_block_may_be_asked_for_while_it_is_stored(path, status, store_first):
    """A request that was preempted comes back while its blocks are on their way down, and an assertion fails
    (vllm#46014)."""
    source = path[0]
    engine, keys = prefix_in(TIERS[source], host=16)
    engine.core.submit_flush()
    for _ in range(5):
        engine.plan()
        stores = [batch for batch in engine.held if (batch.source, batch.target) == path and batch.transfers]
        if stores:
            break
        engine.finish(engine.held[0])
    if source:
        empty_gpu(engine, 8)
    ticket = engine.submit_reserve(engine.match(keys), 4, deadline_s=9.0)
    engine.plan()
    loads = [batch for batch in engine.held if batch.target == 0]
    assert len(loads) == source
    for batch in stores + loads if store_first else loads + stores:
        failing = status is Status.FAILED and batch in stores
        engine.finish(batch, [Outcome(status)] * batch.outcomes if failing else None)
    engine.run()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 16
    for slot, key in zip(lease.slots(), keys.groups[0], strict=True):
        assert bytes_in(engine, 0, slot) == content_of(key, BLOCK_BYTES)
    engine.release(lease)
    assert at_rest(engine)["leases"] == 0


# ---------------------------------------------------------------- one name, one meaning


def test_layouts_that_no_shape_tells_apart_are_kept_apart(tmp_path):
    """KV of a packed layout is read as the old one: as many heads as tokens, as many layers as K and V, and only
    the name of the layout says which axis is which (LMCache#4463, LMCache PR#4467)."""
    shape = {"kv_heads": 4, "head_dim": 8, "block_tokens": 4}
    shapes = {layout: config_for(model=shape | {"layout": layout}).model for layout in LAYOUTS}
    assert len({tuple(s.shape for s in block_specs(model)[0].segments) for model in shapes.values()}) == 1
    written = {}
    for seed, layout in enumerate(LAYOUTS):
        config = config_for(tmp_path / "store", model=shape | {"layout": layout})
        keys = kvtier.hash_blocks(list(range(20)), config.model)
        with kvtier.open_sync(config) as cache:
            assert cache.peek(keys).tokens == 0, f"{layout} finds what another layout wrote"
            lease = cache.reserve(cache.match(keys, owner="w"), 5)
            for layer in range(2):
                for name, view in cache.kv(0, layer).items():
                    data = np.random.default_rng([seed, layer, name == "v"]).random(view[list(lease.slots())].shape)
                    view[list(lease.slots())] = written[layout, layer, name] = data.astype(view.dtype)
            cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True)))
            cache.release(lease)
    for layout in LAYOUTS:  # in a cache whose gpu tier is empty: what is compared comes from disk
        config = config_for(tmp_path / "store", model=shape | {"layout": layout})
        with kvtier.open_sync(config) as cache:
            lease = cache.reserve(cache.match(keys, owner="r"), 5)
            assert lease.tiers["lmdb"] == 20
            for layer in range(2):
                for name, view in cache.kv(0, layer).items():
                    assert (view[list(lease.slots())] == written[layout, layer, name]).all(), (layout, layer, name)
            cache.release(lease)


def test_an_adapter_that_was_reloaded_finds_nothing_of_before():
    """Another adapter is loaded under the name of the first, and reads its KV (vllm#42125): a path that says which
    content it is keeps them apart, and so does a new epoch, which reaches adapters, too."""
    engine = make_engine(gpu=16, host=None, disk=DictTier())
    tokens = list(range(16))

    def keys_of(path):
        return hash_blocks(tokens, engine.core.model, kvtier.ExtraKeys(lora=("summaries", path)))

    serve(engine, keys_of("adapters/summaries@1"))
    assert engine.core.peek(keys_of("adapters/summaries@1")).tokens == 16
    assert engine.core.peek(keys_of("adapters/summaries@2")).tokens == 0
    assert engine.core.peek(hash_blocks(tokens, engine.core.model)).tokens == 0
    engine.core.set_weights_epoch("v1, summaries@2")
    assert engine.core.peek(keys_of("adapters/summaries@1")).tokens == 0


def test_a_layout_that_nobody_knows_is_refused():
    """A layout of tomorrow is guessed from its shape (LMCache#4463, dynamo#14416)."""
    model = dataclasses.replace(config_for().model, layout="packed")
    with pytest.raises(ValueError, match="unknown layout 'packed'"):
        block_specs(model)
    with pytest.raises(kvtier.ConfigError, match="layout"):
        config_for(model={"layout": "packed"})


@pytest.mark.torch
@pytest.mark.parametrize("status", [*BAD_READS, "late"])
def test_a_model_answers_the_same_when_its_load_fails(tmp_path, status, monkeypatch):
    """Recomputing after a rejected load gives other tokens (vllm#49250); a load-back garbles them (sglang#27504,
    sglang#38031). The end token is heeded: a benchmark that ignores it hides loops."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvtier.integrations.transformers import PrefixSession
    from tests.tiny_llama import open_cache, prompt_of, tiny_llama

    model, tokens = tiny_llama(), prompt_of(42)
    reference = model.generate(tokens, max_new_tokens=12, do_sample=False)
    with open_cache(model, tmp_path) as cache, PrefixSession(cache, model, tokens) as session:
        model.generate(tokens, max_new_tokens=12, do_sample=False, **session.generate_kwargs)
    for bad in range(0, 10, 3):
        with open_cache(model, tmp_path) as cache:
            disk = cache._running._tiers[2]
            read = disk.read

            def refusing(items, bad=bad, read=read):
                outcomes = read(items)
                if status == "late":
                    return outcomes
                bad_key = kvtier.hash_blocks(tokens[0].tolist(), cache.config.model).groups[0][bad]
                for index, item in enumerate(items):
                    if item.key[4:] == bad_key:
                        item.into[:] = b"\xee" * len(item.into)
                        outcomes[index] = Outcome(status)
                return outcomes

            disk.read = refusing
            if status == "late":
                reserve = cache.reserve
                monkeypatch.setattr(cache, "reserve", lambda match, n, r=reserve, **_: r(match, n, load_deadline_s=0.0))
            with PrefixSession(cache, model, tokens) as session:
                output = model.generate(tokens, max_new_tokens=12, do_sample=False, **session.generate_kwargs)
            assert session.tokens_restored == (0 if status == "late" else bad * 4)
            assert torch.equal(output, reference)
            disk.read = read
