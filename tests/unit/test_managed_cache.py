"""ManagedCache: a configuration's tiers with a block manager on the GPU tier, from opening to closing."""

import threading

import numpy as np
import pytest

from kvtier.engine.managed_cache import open_managed
from kvtier.errors import ConfigError, KvtierError, UsageError

MODEL = {"name": "m", "weights_epoch": "v1", "layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
GPU = {"type": "gpu", "capacity": "132KiB"}  # 32 blocks of 16 tokens, and the null block
HOST = {"type": "host", "capacity": "256KiB", "hugepages": "off", "pin": "off"}
LMDB = {"type": "lmdb", "capacity": "16MiB", "path": "store"}
PROMPT = [7 * i % 100 for i in range(100)]  # 6 blocks of 16, and 4 tokens
STEPS_MAX = 10_000


@pytest.fixture(autouse=True)
def _in_a_folder_and_no_thread_left(tmp_path, monkeypatch):
    """Everything a test opens is closed: no thread of ours, and the store can be opened again."""
    monkeypatch.chdir(tmp_path)
    before = set(threading.enumerate())
    yield
    assert {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("kvtier")} == set()


def config_of(*tiers, **model):
    return {"model": MODEL | model, "tiers": list(tiers)}


def opened(*tiers, model=(), **settings):
    return open_managed(config_of(*tiers, **dict(model)), tokens_max=512, **settings)


def wanted(tokens, index, layer):
    """A number that follows from all tokens up to the end of block `index`."""
    return hash(tuple(tokens[: 16 * (index + 1)])) % 1000 + 1000 * layer


def begin(cache, name, tokens=PROMPT):
    """A request that has got what there was, and blocks. Returns it."""
    request = cache.request(name, tokens)
    lookup = cache.get_computed_blocks(request)
    assert cache.allocate_slots(request, len(tokens) - lookup.hit.tokens, lookup) is not None
    if not cache.is_loading(request):
        request.computed_tokens = lookup.hit.tokens
    return request


def end_load(cache, request):
    """Wait for its load, if it has one; `step` returns it."""
    while cache.is_loading(request):
        if cache.step(1.0) == [request]:
            assert not cache.is_loading(request)
            assert cache.allocate_slots(request, len(request.tokens) - request.computed_tokens) is not None


def compute(cache, request):
    """Check what is there, write the rest. Returns how many tokens were there."""
    found = request.computed_tokens
    for group, table in enumerate(cache.manager.block_ids(request)):
        for layer in range(2):
            for view in cache.kv(group, layer).values():
                for index, block in enumerate(table):
                    if index < found // 16:
                        assert (view[block] == wanted(request.tokens, index, layer)).all(), (index, block)
                    else:
                        view[block] = wanted(request.tokens, index, layer)
    request.computed_tokens = len(request.tokens)
    return found


def serve(cache, name, tokens=PROMPT):
    request = begin(cache, name, tokens)
    end_load(cache, request)
    found = compute(cache, request)
    cache.free(request)
    assert cache.check() == []
    return found


def fill(cache, count=8):
    """Other prompts, until the pages have nothing of earlier ones."""
    for number in range(count):
        serve(cache, f"fill{number}", [number] * 64 + list(range(17)))
        assert cache.flush()


# ---------------------------------------------------------------- tiers


def test_a_gpu_tier_alone_is_a_manager_with_memory():
    """An engine with no tiers below cannot use it, or waits for something."""
    with opened(GPU) as cache:
        assert cache.manager.pool.blocks_total == 33
        assert serve(cache, "a") == 0
        assert serve(cache, "b") == 96
        assert cache.step() == []
        assert cache.step(1000.0) == []
        assert cache.flush()
        request = begin(cache, "c")
        assert not cache.is_loading(request)
        cache.preempt(request)
        assert cache.check() == []


def test_what_the_pages_lost_comes_back_from_host_memory():
    """A prompt is computed again although the host tier has it."""
    with opened(GPU, HOST) as cache:
        assert serve(cache, "a") == 0
        assert cache.flush()
        fill(cache)
        request = cache.request("look", PROMPT)
        lookup = cache.get_computed_blocks(request)
        assert (lookup.hit.tokens, lookup.external_tokens) == (0, 96)
        assert serve(cache, "b") == 96
        assert cache.top.counters.loaded == 6
        assert cache.manager.pool.dropped_dirty == 0


def test_with_eagle_the_last_block_is_computed_again_wherever_it_lies():
    """A draft model reads hidden states of a block that nobody has computed."""
    with opened(GPU, HOST, eagle=True) as cache:
        assert serve(cache, "a") == 0
        assert serve(cache, "here") == 80
        assert cache.flush()
        fill(cache)
        assert serve(cache, "below") == 80


def test_reset_reaches_below():
    """KV of the old weights comes back from the tiers after they were changed."""
    with opened(GPU, HOST, LMDB) as cache:
        assert serve(cache, "a") == 0
        assert cache.flush()
        request = begin(cache, "holds")
        assert not cache.reset()
        cache.free(request)
        assert cache.reset()
        assert serve(cache, "b") == 0


@pytest.mark.parametrize("model", [{}, {"hash": "xxhash_cbor"}, {"dtype": "bfloat16"}, {"layout": "token_major"}])
def test_a_second_process_finds_what_the_first_one_kept(model):
    """A restart computes everything again, or reads other bytes."""
    model = dict(model)
    if model.get("dtype") == "bfloat16":
        model["head_dim"] = 16  # numpy shows the bits as integers
    with opened(GPU, HOST, LMDB, model=model.items()) as cache:
        assert serve(cache, "a") == 0
    with opened(GPU, HOST, LMDB, model=model.items()) as cache:
        assert serve(cache, "a") == 96
        assert serve(cache, "b") == 96
        assert cache.top.counters.loaded == 6


def test_two_groups_are_kept_and_found():
    """The blocks of one group stand in those of the other."""
    groups = {"groups": [{"layers": [0], "kv_heads": 2, "head_dim": 8}, {"layers": [1], "kv_heads": 1, "head_dim": 8}]}
    model = {key: MODEL[key] for key in ("name", "weights_epoch", "dtype")} | groups
    config = {"model": model, "tiers": [GPU | {"capacity": "264KiB"}, HOST, LMDB]}
    for found in (0, 96):
        with open_managed(config, tokens_max=512) as cache:
            request = begin(cache, "a")
            end_load(cache, request)
            assert request.computed_tokens == found
            for group, table in enumerate(cache.manager.block_ids(request)):
                for view in cache.kv(group, group).values():
                    for index, block in enumerate(table):
                        if index < found // 16:
                            assert (view[block] == 10 * index + group).all()
                        else:
                            view[block] = 10 * index + group
            request.computed_tokens = 100
            cache.free(request)


def test_weights_of_another_epoch_find_nothing():
    """KV of the old weights is served for the new ones."""
    with opened(GPU, HOST, LMDB) as cache:
        serve(cache, "a")
    with opened(GPU, HOST, LMDB, model={"weights_epoch": "v2"}.items()) as cache:
        assert serve(cache, "a") == 0


# ---------------------------------------------------------------- views


def test_views_show_every_block_and_copy_nothing():
    """The kernels write somewhere else than the tiers read."""
    with opened(GPU, HOST) as cache:
        keys = cache.kv(0, 1)
        assert {name: view.shape for name, view in keys.items()} == {"k": (33, 16, 2, 8), "v": (33, 16, 2, 8)}
        assert all(view.dtype == np.float32 and view.flags.writeable for view in keys.values())
        keys["k"][3] = 5.0
        assert (cache.kv(0, 1)["k"][3] == 5.0).all()
        assert (cache.kv(0, 1)["v"][3] == 0.0).all()
        assert (cache.kv(0, 0)["k"][3] == 0.0).all()
        del keys


@pytest.mark.parametrize(("group", "layer"), [(0, 2), (0, -1), (1, 0), (-1, 0)])
def test_a_view_of_a_layer_that_is_none_is_refused(group, layer):
    """The last group's pages are shown for group -1."""
    with opened(GPU) as cache, pytest.raises(UsageError, match=f"no layer {layer} in group {group}"):
        cache.kv(group, layer)


def test_views_after_close_are_refused():
    """A closed cache shows memory that is gone."""
    cache = opened(GPU)
    cache.close()
    with pytest.raises(KvtierError, match="closed"):
        cache.kv()


# ---------------------------------------------------------------- what cannot be opened


def test_a_disk_directly_below_the_pages_is_refused():
    """Blocks are copied through slots that do not exist."""
    with pytest.raises(ConfigError, match="Put a host tier between") as caught:
        opened(GPU, LMDB)
    assert caught.value.path == "tiers[1].type"
    with opened(GPU, HOST, LMDB) as cache:  # nothing was left behind
        serve(cache, "a")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tokens_max": 0}, "tokens_max"),
        ({"tokens_max": "512"}, "tokens_max"),
        ({"tokens_max": 512, "watermark": 2.0}, "watermark"),
        ({"tokens_max": 512, "events": "yes"}, "events"),
        ({"tokens_max": 512, "caching": False}, "caching"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, text):
    """An open that fails keeps memory, threads or the store's lock."""
    with pytest.raises(UsageError, match=text):
        open_managed(config_of(GPU, HOST, LMDB), **settings)
    with opened(GPU, HOST, LMDB) as cache:
        assert serve(cache, "a") == 0


def test_a_configuration_without_a_gpu_tier_is_refused():
    """There are no pages to run."""
    with pytest.raises(ConfigError, match="no tier of type 'gpu'"):
        opened(HOST, LMDB)


def test_a_device_that_is_not_there_is_told_by_its_place():
    """A user does not find what to change."""
    with pytest.raises(ConfigError, match="device") as caught:
        opened(GPU | {"device": "cuda:99"})
    assert caught.value.path == "tiers[0].device"


def test_a_store_that_is_open_already_is_refused():
    """Two writers spoil one store; or the failed open takes the lock of the first with it."""
    with opened(GPU, HOST, LMDB) as cache:
        with pytest.raises(KvtierError, match="one writer"):
            opened(GPU, HOST, LMDB)
        assert serve(cache, "a") == 0


@pytest.mark.parametrize(
    ("tiers", "path"),
    [
        ((GPU | {"capacity": "500TiB"},), "tiers[0].capacity"),
        ((GPU, HOST | {"capacity": "500TiB"}), "tiers[1].capacity"),
        ((GPU, HOST, LMDB | {"min_free": "500TiB"}), "tiers[2].min_free"),
    ],
)
def test_what_a_tier_cannot_work_with_is_told_by_its_place(tiers, path):
    """A user is sent to the wrong tier of the configuration."""
    with pytest.raises(ConfigError) as caught:
        opened(*tiers)
    assert caught.value.path == path


# ---------------------------------------------------------------- closing


@pytest.mark.parametrize("tiers", [(GPU,), (GPU, HOST), (GPU, HOST, LMDB)])
def test_close_is_idempotent(tiers):
    """A second close raises, in the middle of somebody's clean-up."""
    with opened(*tiers) as cache:
        serve(cache, "a")
        cache.close()
        cache.close()
        cache.close(flush_s=0)


@pytest.mark.parametrize("flush_s", [0, 20.0])
def test_close_with_a_request_running(flush_s):
    """A shutdown waits for ever for a request that nobody ends."""
    cache = opened(GPU, HOST, LMDB)
    request = begin(cache, "a")
    compute(cache, request)
    serve(cache, "b", [1] * 40)
    cache.close(flush_s)
    with opened(GPU, HOST, LMDB) as again:
        assert serve(again, "b", [1] * 40) == (32 if flush_s else 0)


@pytest.mark.parametrize("flush_s", [0, 20.0])
def test_close_with_a_load_under_way(flush_s):
    """Copies go on into memory that is gone."""
    with opened(GPU, HOST, LMDB) as cache:
        serve(cache, "a")
    cache = opened(GPU, HOST, LMDB)
    request = begin(cache, "b")
    assert cache.is_loading(request)
    cache.close(flush_s)
    with opened(GPU, HOST, LMDB) as again:
        assert serve(again, "c") == 96


def test_without_a_flush_nothing_more_is_copied():
    """A fast shutdown is none."""
    cache = opened(GPU, HOST, LMDB)
    serve(cache, "a")
    cache.close(flush_s=0)
    with opened(GPU, HOST, LMDB) as again:
        assert serve(again, "a") == 0


def test_a_request_whose_load_ends_during_a_flush_is_returned():
    """A request waits for ever, because somebody flushed."""
    with opened(GPU, HOST, LMDB) as cache:
        serve(cache, "a")
    with opened(GPU, HOST, LMDB) as cache:
        request = begin(cache, "b")
        assert cache.is_loading(request)
        assert cache.flush()
        assert cache.step(0.0) == [request]
        assert request.computed_tokens == 96


@pytest.mark.parametrize("verb", ["free", "preempt"])
def test_a_request_that_left_after_such_a_flush_is_not_returned(verb):
    """An engine is given a request that it has ended."""
    with opened(GPU, HOST, LMDB) as cache:
        serve(cache, "a")
    with opened(GPU, HOST, LMDB) as cache:
        request = begin(cache, "b")
        assert cache.flush()
        getattr(cache, verb)(request)
        assert cache.step(0.0) == []
        assert cache.check() == []


def test_a_request_that_began_again_after_such_a_flush_waits_for_its_new_load():
    """The end of its first load counts for its second, and the engine reads blocks that are still written."""
    with opened(GPU, HOST, LMDB) as cache:
        serve(cache, "a")
    with opened(GPU, HOST, LMDB) as cache:
        request = begin(cache, "b")
        assert cache.flush()
        cache.preempt(request)
        assert cache.manager.reset()  # so that it has to load again
        lookup = cache.get_computed_blocks(request)
        assert lookup.external_tokens == 96
        assert cache.allocate_slots(request, 4, lookup) is not None
        while cache.is_loading(request):
            ready = cache.step()
            assert ready == ([] if cache.is_loading(request) else [request])
        assert request.computed_tokens == 96


def test_a_flush_with_a_copy_that_failed_says_so(monkeypatch):
    """A flush that lost blocks is taken for a whole one."""
    with opened(GPU, HOST, LMDB) as cache:
        serve(cache, "a")

        def broken(move):
            raise OSError

        with monkeypatch.context() as bad:
            bad.setattr(cache._mover, "_store", broken)
            assert cache.flush() is False
        assert cache.flush() is True
        assert cache.top.counters.stored == 6


def test_a_load_whose_copy_fails_is_computed(monkeypatch):
    """An error in the mover's thread leaves a request waiting for ever."""
    with opened(GPU, HOST) as cache:
        serve(cache, "a")
        cache.flush()
        fill(cache)

        def broken(move):
            raise OSError

        with monkeypatch.context() as bad:
            bad.setattr(cache._mover, "_load", broken)
            assert serve(cache, "b") == 0
        assert cache.top.counters.failed == 6


def too_late():
    raise TimeoutError


def test_a_flush_that_takes_too_long_says_so(monkeypatch):
    """Half a flush is taken for a whole one, or a traceback ends the engine."""
    with opened(GPU, HOST, LMDB) as cache:
        serve(cache, "a")
        with monkeypatch.context() as slow:
            slow.setattr(cache._below, "flush", lambda timeout_s: too_late())
            assert cache.flush(0.2) is False
        assert cache.flush() is True


def test_a_close_whose_flush_takes_too_long_still_closes(monkeypatch):
    """A slow disk keeps the threads and the store's lock of a cache that was closed."""
    cache = opened(GPU, HOST, LMDB)
    serve(cache, "a")
    try:
        with monkeypatch.context() as slow:
            slow.setattr(cache._below, "flush", lambda timeout_s: too_late())
            cache.close()
        with opened(GPU, HOST, LMDB):
            pass
    finally:
        cache.close(flush_s=0)


def test_a_close_that_is_interrupted_can_be_repeated(monkeypatch):
    """A second Ctrl-C leaves the store locked for good."""
    cache = opened(GPU, HOST, LMDB)
    serve(cache, "a")

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.top, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    cache.close(flush_s=0)
    with opened(GPU, HOST, LMDB):
        pass
