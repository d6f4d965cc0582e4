"""vLLM's blocks come back from kvtier as they were. Needs vLLM 0.32: `make test-vllm` brings it.

The manager and the workers as vLLM drives them, call by call; whole engines are in `test_offload_engines.py`.
"""

import importlib.util
import threading
import warnings

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run `make test-vllm`"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def vllm_bench():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn of each other
        from tests.compat import offload_bench
    return offload_bench


@pytest.fixture
def make(vllm_bench):
    """Makes benches, of which nothing may be held in the end."""
    made = []

    def bench(tiers, **options):
        made.append(vllm_bench.Bench(tiers, **options))
        return made[-1]

    yield bench
    for each in made:
        if not each.manager.cache._engine.closed:
            assert each.held() == {}
            each.close()


def disk(folder, **changes):
    return {"type": "lmdb", "path": str(folder / "store"), "capacity": "16MiB", "durability": "none"} | changes


def request(name="req"):
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(name)


def looks(bench, keys, name="req"):
    """What a request of its own finds in the end."""
    context = request(name)
    hits = bench.found(context, keys)
    bench.manager.on_request_finished(context)
    return hits


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3])
def test_blocks_come_back_as_they_were(make, vllm_bench, ranks, chunk):
    """A rank gets another rank's bytes, or a layer or block of a chunk lies where another one is read."""
    bench = make([vllm_bench.host(8, chunk, ranks)], ranks=ranks, chunk=chunk)
    keys = vllm_bench.keys_of(1, 5)
    bench.store(keys[:2])
    bench.store(keys)
    context = request()
    assert bench.found(context, keys) == 5
    ids = bench.load(context, keys)
    assert bench.wrong(keys, ids) == []
    bench.manager.on_request_finished(context)


def test_a_load_may_begin_inside_a_chunk(make, vllm_bench):
    """The blocks that the GPU has already shift all others by their number."""
    bench = make([vllm_bench.host(8, 3)], chunk=3)
    keys = vllm_bench.keys_of(1, 3)
    bench.store(keys)
    context = request()
    assert bench.found(context, keys) == 3
    assert bench.wrong(keys, bench.load(context, keys, skip=2), skip=2) == []


def test_a_later_process_finds_what_lies_on_disk(make, vllm_bench, tmp_path):
    """A restart begins cold, or its blocks are read wrongly."""
    keys = vllm_bench.keys_of(1, 6)
    tiers = [vllm_bench.host(8, ranks=2), disk(tmp_path)]
    first = make(tiers, ranks=2)
    first.store(keys)
    first.close()
    later = make(tiers, ranks=2)
    context = request()
    assert later.look(context, keys) is None
    assert later.found(context, keys) == 6
    assert later.wrong(keys, later.load(context, keys)) == []


def test_stores_of_other_parallel_sizes_are_not_shared(make, vllm_bench, tmp_path):
    """A row with the parts of two ranks is read as the parts of one."""
    keys = vllm_bench.keys_of(1, 2)
    first = make([vllm_bench.host(8, ranks=2), disk(tmp_path)], ranks=2)
    first.store(keys)
    first.close()
    assert looks(make([vllm_bench.host(8, 2), disk(tmp_path)], chunk=2), keys) == 0


def pages_for(layers, slab):
    """What an adapter for a device would hand in, on host memory."""
    from kvtier.engine.foreign_pages import ForeignPages
    from kvtier.tiers.foreign.cache import ForeignCache
    from kvtier.tiers.foreign.places import HostPlaces

    slots = slab.memory.numel() // slab.stride_bytes
    geometry = (slab.stride_bytes, slots, slab.offset_bytes, slab.part_bytes, slab.parts)
    return ForeignPages.on_host(
        [ForeignCache.of(layers, blocks=len(layers[0]))], HostPlaces(slab.memory.data_ptr(), *geometry)
    )


@pytest.mark.parametrize(("ranks", "chunk"), [(1, 1), (2, 3)])
def test_pages_of_a_foreign_engine_copy_the_same(make, vllm_bench, ranks, chunk):
    """Blocks that torch has stored come back otherwise through the copies that a device's adapter is built on."""
    bench = make([vllm_bench.host(8, chunk, ranks)], ranks=ranks, chunk=chunk)
    keys = vllm_bench.keys_of(1, 5)
    bench.store(keys[:3])
    for worker in bench.workers:
        worker.shutdown()
        worker._copies_for, worker._mapped_path = pages_for, ""
    bench.store(keys)
    context = request()
    assert bench.found(context, keys) == 5
    assert bench.wrong(keys, bench.load(context, keys)) == []
    bench.manager.on_request_finished(context)
    for worker in bench.workers:
        worker.shutdown()


class LateCopies:
    """`BlockCopies` of a device: over when it is said."""

    def __init__(self):
        self.begun, self.over, self.joined, self.closed = {}, [], [], False

    def begin(self, move_id, kind, blocks, places):
        self.begun[move_id] = kind, blocks, places

    def finished(self):
        over, self.over = self.over, []
        return over

    def join(self, move_ids):
        self.joined += move_ids

    def close(self):
        self.closed = True


def test_copies_that_end_later_are_told_later(make, vllm_bench):
    """vLLM takes a block for loaded while a device still copies it; or a failed copy for one that went well."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    from kvtier.errors import DeviceLost, KvtierError
    from kvtier.types import DONE, BatchDone, Outcome, Status

    bench = make([vllm_bench.host(8, 2)], chunk=2)
    keys, context, (worker,), late = vllm_bench.keys_of(1, 2), request(), bench.workers, LateCopies()
    worker._copies_for = lambda layers, slab: late
    specs = bench.manager.prepare_store(keys, context).store_spec, GPULoadStoreSpec([9, 4, 6], [3], [1])
    assert worker.submit_store(7, specs[1], specs[0])
    slots = specs[0].slots
    assert late.begun == {7: ("store", [9, 4, 6], [slots[0] * 2 + 1, slots[1] * 2, slots[1] * 2 + 1])}
    assert worker.get_finished() == []
    worker.wait({7})
    assert late.joined == [7]
    late.over.append(BatchDone(7, (DONE,) * 3))
    (told,) = worker.get_finished()
    assert (told.job_id, told.success, told.transfer_size) == (7, True, 3 * 3 * vllm_bench.PAGE_BYTES)
    for status, error in ((Status.FAILED, KvtierError), (Status.DEVICE_LOST, DeviceLost)):
        assert worker.submit_load(8, specs[0], specs[1])
        late.over.append(BatchDone(8, (DONE, Outcome(status, detail="refused"), DONE)))
        with pytest.raises(error, match="job 8: refused"):
            worker.get_finished()
    worker.shutdown()
    assert late.closed
    bench.manager.complete_store(keys, context, False)
    bench.manager.on_request_finished(context)


# ---------------------------------------------------------------- what a lookup promises


def test_a_hit_stays_until_it_is_loaded(make, vllm_bench):
    """Between lookup and load a store takes the slots, and other bytes are loaded."""
    bench = make([vllm_bench.host(4)])
    keys = vllm_bench.keys_of(1, 3)
    bench.store(keys)
    context = request()
    assert bench.found(context, keys) == 3
    assert bench.begin_store(request("other"), vllm_bench.keys_of(2, 2)) is None
    assert bench.wrong(keys, bench.load(context, keys)) == []
    bench.store(vllm_bench.keys_of(2, 3), "other")
    assert looks(bench, keys, "later") == 0 or looks(bench, vllm_bench.keys_of(2, 3)) == 3


def test_a_store_under_way_is_pending(make, vllm_bench):
    """A block is computed twice, or read before it is there."""
    from vllm.v1.kv_offload.base import LookupResult

    bench = make([vllm_bench.host(8)])
    keys = vllm_bench.keys_of(1, 2)
    end = bench.begin_store(request("writer"), keys)
    assert bench.manager.lookup(keys[0], request()) is LookupResult.HIT_PENDING
    assert bench.manager.prepare_store(keys, request("second")).keys_to_store == []
    end()
    assert looks(bench, keys) == 2


def test_a_failed_store_is_not_found(make, vllm_bench):
    """Bytes that were never written are served."""
    bench = make([vllm_bench.host(8)])
    keys = vllm_bench.keys_of(1, 2)
    bench.begin_store(request("writer"), keys)(success=False)
    assert looks(bench, keys) == 0


def test_a_store_that_does_not_fit_is_refused(make, vllm_bench):
    """vLLM waits for a store that never comes, or half a request is evicted by its other half."""
    bench = make([vllm_bench.host(4)])
    assert bench.manager.prepare_store(vllm_bench.keys_of(1, 6), request()) is None


@pytest.mark.parametrize("how", ["finished", "running", "preempted"])
def test_what_a_request_does_not_load_is_let_go(make, vllm_bench, how):
    """A request that was aborted, or that found its blocks in the GPU after all, keeps slots for good."""
    bench = make([vllm_bench.host(4)])
    keys = vllm_bench.keys_of(1, 3)
    bench.store(keys)
    context = request()
    assert bench.found(context, keys) == 3
    assert bench.held()["leases"] == 1
    if how == "finished":
        bench.manager.on_request_finished(context)
    else:
        bench.step(**{"new" if how == "running" else "preempted": ["req"]})
    bench.store(vllm_bench.keys_of(2, 4))
    assert looks(bench, vllm_bench.keys_of(2, 4)) == 4


# ---------------------------------------------------------------- disks that fail


def test_a_damaged_block_is_a_miss(make, vllm_bench, tmp_path):
    """Wrong bytes are served, or the request asks again for ever."""
    keys = vllm_bench.keys_of(1, 4)
    tiers = [vllm_bench.host(8), disk(tmp_path)]
    first = make(tiers)
    first.store(keys)
    first.close()
    damage(tmp_path, first.page(keys[2], 0, 0, 1))
    later = make(tiers)
    context = request()
    assert later.found(context, keys) == 2
    assert later.wrong(keys[:2], later.load(context, keys[:2])) == []
    assert looks(later, keys, "second") == 2


def damage(folder, page):
    """Change one bit of a block on disk, known by a page of it."""
    slab = next(path for path in (folder / "store").iterdir() if path.stat().st_size >= 4096 and path.is_file())
    content = bytearray(slab.read_bytes())
    at = content.find(bytes(page.numpy()))
    assert at >= 0
    content[at] ^= 1
    slab.write_bytes(content)


def over_held_disk(make, vllm_bench, tmp_path, monkeypatch, load_deadline):
    """A bench whose four stored keys lie on a disk that does not answer; the keys, what lets it, and its reads."""
    from kvtier.tiers.lmdb.store import LmdbTier

    keys = vllm_bench.keys_of(1, 4)
    tiers = [vllm_bench.host(8), disk(tmp_path)]
    first = make(tiers)
    first.store(keys)
    first.close()
    answers, read, reads = threading.Event(), LmdbTier.read, []

    def held(self, items):
        reads.append(len(items))
        answers.wait(60)
        return read(self, items)

    monkeypatch.setattr(LmdbTier, "read", held)
    return make(tiers, kvtier={"limits": {"load_deadline": load_deadline}}), keys, answers, reads


def loading(*where):
    """A bench over a held disk, the context of a request that waits for it, its keys, and what lets the disk answer."""
    later, keys, answers, _ = over_held_disk(*where, "30s")
    context = request()
    assert later.look(context, keys) is None
    later.step()
    return later, context, keys, answers


def test_a_disk_that_hangs_is_a_miss(make, vllm_bench, tmp_path, monkeypatch):
    """A request waits for a disk that does not answer, and each of its lookups starts another load."""
    later, keys, answers, reads = over_held_disk(make, vllm_bench, tmp_path, monkeypatch, "20ms")
    context = request()
    assert later.found(context, keys) == 0
    later.step()
    assert [later.look(context, keys) for _ in range(3)] == [0, 0, 0]
    assert sum(reads) <= 4
    answers.set()
    later.manager.on_request_finished(context)
    assert looks(later, keys, "second") in (0, 4)
    later.manager.cache.flush()  # what hung has ended


def test_a_request_that_ends_while_it_loads_leaves_nothing(make, vllm_bench, tmp_path, monkeypatch):
    """The lease of a load that nobody waits for is never given back."""
    later, context, _, answers = loading(make, vllm_bench, tmp_path, monkeypatch)
    later.manager.on_request_finished(context)
    assert later.manager.has_pending_work()
    answers.set()
    later.settle()


def test_what_has_come_is_found_in_the_same_step(make, vllm_bench, tmp_path, monkeypatch):
    """A load that ended while the model ran costs its request one step more."""
    later, context, keys, answers = loading(make, vllm_bench, tmp_path, monkeypatch)
    answers.set()
    assert later.found(context, keys, steps=False) == 4
    later.manager.on_request_finished(context)


def test_a_load_without_room_is_a_miss(make, vllm_bench, tmp_path):
    """A request waits for room that nobody promised, or its pins stay after the refusal."""
    keys = vllm_bench.keys_of(1, 4)
    tiers = [vllm_bench.host(4), disk(tmp_path)]
    first = make(tiers)
    first.store(keys)
    first.close()
    later = make(tiers)
    end = later.begin_store(request("writer"), vllm_bench.keys_of(2, 3))
    context = request()
    assert later.found(context, keys) == 0
    assert later.held() == {"leases": 1, "asked": 1, "jobs": 3}  # the writer's, and that the request has its answer
    end()
    later.manager.on_request_finished(context)


def test_an_answer_that_cannot_be_had_is_a_miss(make, vllm_bench, monkeypatch):
    """Requests wait for ever for a cache that answers no more, or the lease that it gave after all is nobody's."""
    from kvtier.errors import InvariantError

    def broken():
        raise InvariantError("for a moment")

    bench = make([vllm_bench.host(8)])
    keys = vllm_bench.keys_of(1, 2)
    bench.store(keys)
    context = request()
    assert bench.look(context, keys) is None
    with monkeypatch.context() as patch:
        patch.setattr(bench.manager.cache, "poll", broken)
        bench.step()
        assert bench.look(context, keys) == 0
    bench.step()
    assert "leases" not in bench.held()
    bench.manager.on_request_finished(context)


# ---------------------------------------------------------------- reset, and the end


def test_a_reset_overtakes_jobs(make, vllm_bench):
    """A store of before the reset is found after it, or its late copy writes into a slot that has another block."""
    bench = make([vllm_bench.host(6)])
    old, new = vllm_bench.keys_of(1, 3), vllm_bench.keys_of(2, 3)
    bench.store(old)
    loaded, sought = request("loaded"), request("sought")
    assert bench.found(loaded, old) == 3
    bench.manager.prepare_load(old, loaded)
    assert bench.found(sought, old) == 3
    store = bench.begin_store(request("writer"), vllm_bench.keys_of(3, 3))
    bench.manager.reset_cache()
    assert [looks(bench, keys) for keys in (old, vllm_bench.keys_of(3, 3))] == [0, 0]
    assert bench.begin_store(request("new"), new) is None  # workers may be at any slot
    bench.step()
    bench.fill(vllm_bench.keys_of(3, 3))
    store.late()
    assert bench.manager.has_pending_work()
    bench.settle()
    bench.store(new)
    context = request()
    assert bench.found(context, new) == 3
    assert bench.wrong(new, bench.load(context, new)) == []
    assert [looks(bench, keys) for keys in (old, vllm_bench.keys_of(3, 3))] == [0, 0]


def test_an_error_of_kvtier_is_a_miss(make, vllm_bench):
    """A cache that has failed takes vLLM with it, or lets requests wait for ever."""
    bench = make([vllm_bench.host(8)])
    keys = vllm_bench.keys_of(1, 2)
    bench.store(keys)
    waiting, sure = request("waiting"), request("sure")
    assert bench.found(sure, keys) == 2
    assert bench.look(waiting, keys) is None
    end = bench.begin_store(request("writer"), vllm_bench.keys_of(2, 2))
    spec = bench.manager.prepare_load(keys, sure)
    bench.close()
    bench.step()
    assert bench.look(waiting, keys) == 0
    assert bench.look(request("new"), keys) == 0
    assert bench.manager.prepare_store(keys, request("new")) is None
    assert len(spec.slots) == 2
    bench.manager.complete_load(set(keys), sure)
    end(success=False)
    bench.manager.on_request_finished(waiting)
    bench.manager.reset_cache()
    assert bench.manager.requests.errors
    assert not bench.manager.has_pending_work()
    bench.close()


# ---------------------------------------------------------------- what is refused


def group(layers=3, group_id=0):
    from vllm.v1.kv_offload.config import OffloadingGroupConfig

    return OffloadingGroupConfig(4, tuple(f"layer.{i}" for i in range(layers)), group_id)


def model(dtype):
    from vllm.v1.kv_offload.config import OffloadingModelConfig

    return OffloadingModelConfig("tiny", dtype)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (lambda: {"groups": (group(), group(group_id=1))}, "several groups"),
        (lambda: {"groups": (group(group_id=1),)}, "several groups"),
        (lambda: {"groups": (group(layers=5),)}, "6144 bytes for 5 layers"),
        (lambda: {"worker_kv_bytes_per_block": 0}, "0 bytes"),
        (lambda: {"kv_cache_layout": "BLHNC"}, "layout BLHNC"),
        (lambda: {"kv_cache_layout": None}, "layout None"),
        (lambda: {"model": model("fp8_inc")}, "dtype fp8_inc"),
        (lambda: {"parallel": {"pp_size": 2, "world_size": 2}}, "ranks that share"),
        (lambda: {"parallel": {"dcp_size": 2}}, "ranks that share"),
        (lambda: {"canonical_layout": True}, "ranks that share"),
        (lambda: {"replicated_layout": True}, "ranks that share"),
        (lambda: {"extra_config": {}}, "begin with host"),
        (lambda: {"extra_config": {"kvtier": "1GiB"}}, "begin with host"),
        (lambda: {"extra_config": {"kvtier": {"tiers": "host"}}}, "begin with host"),
        (lambda: {"extra_config": {"kvtier": {"tiers": [{"type": "host", "capacity": "8KiB"}]}}}, "less than 2 blocks"),
        (
            lambda: {"extra_config": {"kvtier": {"tiers": [{"type": "host", "capacity": "1MiB"}], "x": 1}}},
            "unknown key",
        ),
    ],
)
def test_what_is_not_known_is_refused(vllm_bench, changes, told):
    """vLLM starts over blocks whose bytes nobody has checked, and other models' or layouts' KV is read as its own."""
    from kvtier import ConfigError

    config = vllm_bench.offloading_config([vllm_bench.host(8)], **changes())
    with pytest.raises(ConfigError, match=told):
        vllm_bench.KvtierOffloadingSpec(config)


def test_a_store_needs_an_epoch_and_a_lasting_hash(vllm_bench, tmp_path):
    """After an update of the weights the old weights' KV is served, or no key is ever found again."""
    from kvtier import ConfigError

    tiers = [vllm_bench.host(8), disk(tmp_path)]
    for section, told in ({}, "weights_epoch"), ({"weights_epoch": "1", "hash": "sha256"}, "pickle"):
        config = vllm_bench.offloading_config(tiers, kvtier={"model": section})
        with pytest.raises(ConfigError, match=told):
            vllm_bench.KvtierOffloadingSpec(config)
    vllm_bench.KvtierOffloadingSpec(vllm_bench.offloading_config(tiers[:1], kvtier={"model": {}}))


def test_a_worker_compares_its_memory_with_the_configuration(vllm_bench):
    """Ranks write over each other's parts of a slot."""
    from kvtier import ConfigError

    spec = vllm_bench.KvtierOffloadingSpec(vllm_bench.offloading_config([vllm_bench.host(8)]))
    for memory in vllm_bench.caches(page_bytes=1024), vllm_bench.caches(padded_bytes=4096):
        with pytest.raises(ConfigError, match="or padded"):
            spec.get_worker(memory)


def test_a_copy_that_cannot_be_made_is_no_success(make, vllm_bench):
    """vLLM computes with blocks that were never filled."""
    from kvtier import UsageError

    bench = make([vllm_bench.host(8)])
    keys = vllm_bench.keys_of(1, 3)
    bench.store(keys)
    context = request()
    assert bench.found(context, keys) == 3
    spec = bench.manager.prepare_load(keys, context)
    (worker,) = bench.workers
    target = vllm_bench.GPULoadStoreSpec([1, 2], [2], [0])
    with pytest.raises(UsageError, match="3 slots"):
        worker.submit_load(1, spec, target)
    (fresh,) = bench.new_workers()
    gone = type(spec)(spec.path + "0000", spec.stride_bytes, spec.slots[:2])
    with pytest.raises(OSError, match="No such file"):
        fresh.submit_load(1, gone, target)
    assert worker.get_finished() + fresh.get_finished() == []
    bench.manager.complete_load(set(keys), context)
