"""The blocking face: views of every layout, many threads, misuse."""

import threading

import numpy as np
import pytest

import kvtier
from kvtier.blocks.spec import DTYPES, LAYOUTS
from kvtier.engine.oneshot import OneShot
from kvtier.engine.polled import Load, Reserve
from kvtier.errors import ClosedError, UsageError
from kvtier.types import BatchDone
from tests.cache_bench import LAYERS, compute, config_for, finish, prompt, serve


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_round_trip_in_every_layout_and_dtype(tmp_path, layout, dtype):
    """A block comes back transposed, or with another element size (LMCache#4463)."""
    config = config_for(tmp_path / "store", model={"layout": layout, "dtype": dtype, "head_dim": 32})
    keys = prompt(config, 1, 5)
    rng = np.random.default_rng(1)
    written = {}
    with kvtier.open_sync(config) as cache:
        lease = cache.reserve(cache.match(keys, owner="w"), 5)
        for layer in range(LAYERS):
            for name, view in cache.kv(0, layer).items():
                assert view.shape == (16, 4, 2, 32)
                assert view.dtype == DTYPES[dtype][1]
                data = rng.integers(0, 256, (5, 4, 2, 32 * view.itemsize), np.uint8).view(view.dtype)
                view[list(lease.slots())] = data
                written[layer, name] = data.tobytes()
        cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True)))
        cache.release(lease)
    with kvtier.open_sync(config) as cache:
        lease = cache.reserve(cache.match(keys, owner="r"), 5)
        assert lease.tiers["lmdb"] == 20
        for (layer, name), data in written.items():
            assert cache.kv(0, layer)[name][list(lease.slots())].tobytes() == data, (layer, name)


def test_views_outlive_a_sleep(tmp_path):
    """After a pause an engine's views show other memory, or the blocking face does not sleep like the other."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 5)
    with kvtier.open_sync(config) as cache:
        view = cache.kv(0, 0)["k"]
        serve(cache, keys)
        slept = cache.sleep()
        assert (slept.bytes_freed, slept.blocks_dropped) == (64 << 10, 0)
        stats = cache.stats()["tiers"]["gpu"]
        assert (stats["slots"], stats["capacity_bytes"]) == (0, 0)
        with pytest.raises(kvtier.Asleep, match="wake"):
            cache.reserve(cache.match(keys, owner="t"), 5)
        assert cache.kv(0, 0)["k"] is view
        woken = cache.wake()
        assert (woken.bytes, woken.bytes_missing) == (64 << 10, 0)
        assert serve(cache, keys).tokens_ready == 20
        assert cache.kv(0, 0)["k"] is view
        cache.sleep()
    with kvtier.open_sync(config) as cache:
        assert serve(cache, keys).tokens_ready == 20


def test_hybrid_models_keep_each_groups_blocks_apart(tmp_path):
    """A group's blocks are read as another's, or padded bytes are served as KV."""
    groups = [
        {"kind": "full", "layers": [0, 2], "kv_heads": 2, "head_dim": 16, "dtype": "float32"},
        {"kind": "mla", "layers": [1], "head_dim": 24, "dtype": "bfloat16"},
    ]
    config = kvtier.load_config(
        {
            "model": {"name": "hybrid", "weights_epoch": "v1", "block_tokens": 4, "groups": groups},
            "tiers": [
                {"type": "gpu", "capacity": "64KiB"},
                {"type": "lmdb", "path": str(tmp_path / "store"), "capacity": "16MiB"},
            ],
        }
    )
    tokens = list(range(20))
    keys = kvtier.hash_blocks(tokens, config.model)
    views = [(0, 0, "k"), (0, 0, "v"), (0, 2, "k"), (0, 2, "v"), (1, 1, "latent")]
    with kvtier.open_sync(config) as cache:
        lease = cache.reserve(cache.match(keys, owner="w"), 5)
        for number, (group, layer, name) in enumerate(views):
            for block, slot in enumerate(lease.slots(group)):
                cache.kv(group, layer)[name][slot] = 100 * number + block
        pairs = [pair for group in (0, 1) for pair in zip(lease.slots(group), keys.groups[group], strict=True)]
        cache.commit(lease, pairs)
        cache.release(lease)
    with kvtier.open_sync(config) as cache:
        lease = cache.reserve(cache.match(keys, owner="r", tokens_max=19), 5)
        assert lease.tokens_ready == 16
        assert lease.tiers == {"gpu": 0, "lmdb": 16}
        for number, (group, layer, name) in enumerate(views):
            for block, slot in enumerate(lease.slots(group)[:4]):
                assert (cache.kv(group, layer)[name][slot] == 100 * number + block).all()
        assert cache.check() == []


def test_many_threads_share_one_cache(tmp_path):
    """Concurrent callers corrupt each other's slots or deadlock."""
    config = config_for(tmp_path / "store", gpu="256KiB", host="256KiB", watermarks=(0.3, 0.6))
    prompts = [prompt(config, number, 6) for number in range(12)]
    errors = []
    with kvtier.open_sync(config) as cache:

        def work(seed):
            order = np.random.default_rng(seed).permutation(len(prompts))
            try:
                for number in [*order, *order]:
                    answer = cache.reserve(cache.match(prompts[number], owner=f"t{seed}"), 6)
                    if isinstance(answer, kvtier.Lease):
                        finish(cache, answer, prompts[number])
            except BaseException as error:  # noqa: BLE001 - shown below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert cache.check() == []
        assert cache.stats()["leases"] == 0


def test_views_are_refused_for_layers_that_are_not_there():
    """A wrong layer number shows another layer's memory."""
    with kvtier.open_sync(config_for()) as cache:
        for group, layer in ((0, 2), (1, 0), (0, -1), (-1, 0)):
            with pytest.raises(UsageError, match=r"no layer|use 0 or more"):
                cache.kv(group, layer)


def test_bad_calls_say_what_is_wrong():
    """A mistake ends in a traceback from the engine's inside, or stops the engine."""
    config = config_for()
    other = config_for(model={"block_tokens": 8})
    keys = prompt(config, 1, 3)
    with kvtier.open_sync(config) as cache:
        with pytest.raises(UsageError, match="not made for this model"):
            cache.match(kvtier.hash_blocks(list(range(32)), other.model), owner="x")
        with pytest.raises(UsageError, match="not made for this model"):
            cache.match([b"key"], owner="x")
        match = cache.match(keys, owner="x")
        lease = cache.reserve(match, 1)
        slot, key = lease.slots()[0], keys.groups[0][0]
        mistakes = {
            "ttl_s": lambda: cache.match(keys, owner="x", ttl_s=-1),
            "one tuple of keys": lambda: cache.match(kvtier.Keys((), (4,)), owner="x"),
            "one block size": lambda: cache.match(kvtier.Keys(5, (4,)), owner="x"),
            "no key of it": lambda: cache.match(kvtier.Keys(((5,),), (4,)), owner="x"),
            "not made for": lambda: cache.peek(kvtier.Keys(((), ()), (4, 4))),
            "request is": lambda: cache.submit(None),
            "match is None": lambda: cache.submit(Reserve(None, 1)),
            "blocks_total is 1.5": lambda: cache.submit(Reserve(match, 1.5)),
            "load_deadline_s is": lambda: cache.submit(Load(match, "x")),
            "batch_id": lambda: cache.apply(BatchDone([], ())),
            "done is": lambda: cache.apply(None),
            "not a key": lambda: cache.commit(lease, [(slot, b"x" * 300)]),
            "group is": lambda: cache.kv("x", 0),
            "no group": lambda: lease.slots(1),
            "epoch '.udc00'": lambda: cache.set_weights_epoch("\udc00"),
            "tokens_max": lambda: cache.match(keys, owner="x", tokens_max="5"),
            "tokens_max is": lambda: cache.peek(keys, tokens_max=2.5),
            "blocks_total": lambda: cache.reserve(match, 0),
            "blocks_total is": lambda: cache.reserve(match, None),
            "match is": lambda: cache.reserve(keys, 1),
            "load_deadline_s": lambda: cache.reserve(match, 1, load_deadline_s="soon"),
            "load_deadline_s=nan": lambda: cache.reserve(match, 1, load_deadline_s=float("nan")),
            "lease is": lambda: cache.commit(match, []),
            "pairs is": lambda: cache.commit(lease, 5),
            "pairs holds": lambda: cache.commit(lease, [slot]),
            "slot is": lambda: cache.commit(lease, [("a", key)]),
            "key is": lambda: cache.commit(lease, [(slot, "a")]),
            "held is": lambda: cache.release(None),
            "no namespace": lambda: cache.drop(b"?" * 32),
            "namespace is": lambda: cache.drop("all"),
            "epoch": lambda: cache.set_weights_epoch(""),
            "epoch is": lambda: cache.set_weights_epoch(2),
        }
        for problem, mistake in mistakes.items():
            with pytest.raises(UsageError, match=problem):
                mistake()
        cache.release(lease)
        assert cache.match(keys, owner="x", tokens_max=-1).tokens == 0  # len([]) - 1
        assert serve(cache, keys).tokens_ready == 0
        assert serve(cache, keys).tokens_ready == 12  # and the engine goes on
        assert cache.check() == []
    with pytest.raises(ClosedError):
        cache.reserve(cache.match(keys, owner="x"), 3)


def test_matches_and_leases_of_another_cache_are_refused(tmp_path):
    """A match kept over a restart, or mixed up between two caches, serves another prompt's KV."""
    config, other = config_for(tmp_path / "a"), config_for(tmp_path / "b")
    keys = prompt(config, 1, 3)
    with kvtier.open_sync(config) as first:
        serve(first, keys)
        old = first.match(keys, owner="x")
    with kvtier.open_sync(config) as cache, kvtier.open_sync(other) as stranger:
        serve(stranger, prompt(config, 2, 3))
        match = cache.match(keys, owner="x")
        lease = cache.reserve(match, 3)
        theirs = stranger.reserve(stranger.match(prompt(config, 2, 3), owner="x"), 3)
        for wrong in (
            lambda: cache.reserve(old, 3),
            lambda: cache.release(old),
            lambda: stranger.reserve(match, 3),
            lambda: stranger.release(match),
            lambda: stranger.commit(lease, [(lease.slots()[0], keys.groups[0][0])]),
            lambda: stranger.release(lease),
            lambda: cache.release(theirs),
            lambda: cache.submit(Reserve(old, 3)),
        ):
            with pytest.raises(UsageError, match="another cache"):
                wrong()
        assert (cache.stats()["leases"], stranger.stats()["leases"]) == (1, 1)
        cache.release(lease)
        stranger.release(theirs)
        assert cache.check() == stranger.check() == []


def test_a_change_of_weights_reaches_requests_in_flight(tmp_path):
    """KV of the old weights is published under the new ones, or the other way round (vllm#42125)."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 4)
    with kvtier.open_sync(config) as cache:
        lease = cache.reserve(cache.match(keys, owner="x"), 4)
        cache.set_weights_epoch("v2")
        compute(cache, lease, keys)
        assert cache.stats()["stale_commits"] == 4
        for epoch in ("v2", "v1"):
            cache.set_weights_epoch(epoch)
            assert cache.peek(keys).tokens == 0
        cache.release(lease)
        serve(cache, keys)
        match = cache.match(keys, owner="x")
        assert match.tokens == 16
        cache.set_weights_epoch("v3")
        lease = cache.reserve(match, 4)
        assert lease.tokens_ready == 0
        cache.release(lease)
        assert cache.check() == []
        assert cache.stats()["tiers"]["gpu"]["slots_free"] + cache.stats()["tiers"]["gpu"]["blocks_idle"] == 15


def test_a_bug_stops_the_cache_and_not_its_host(caplog):
    """An internal error hangs every later call, or is swallowed."""
    config = config_for()
    with kvtier.open_sync(config) as cache:

        def bug(core, now_s):
            raise ZeroDivisionError("planted")

        with pytest.raises(kvtier.InvariantError, match="planted"):
            cache._engine.call(bug)
        with pytest.raises(kvtier.InvariantError, match="planted"):
            cache.stats()
        with pytest.raises(kvtier.InvariantError, match="planted"):
            cache.flush()
    assert "please report" in caplog.text


def test_weights_can_change_while_the_cache_is_open(tmp_path):
    """KV of the old weights is served after an update (vllm#42125)."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 4)
    with kvtier.open_sync(config) as cache:
        serve(cache, keys)
        cache.set_weights_epoch("v2")
        assert serve(cache, keys).tokens_ready == 0
        cache.set_weights_epoch("v1")
        assert serve(cache, keys).tokens_ready == 16
    with kvtier.open_sync(config_for(tmp_path / "store", model={"weights_epoch": "v2"})) as cache:
        assert serve(cache, keys).tiers["lmdb"] == 16


def test_a_cache_that_is_never_closed_is_mentioned():
    """A leaked cache keeps its thread and its store's lock in silence."""
    cache = kvtier.open_sync(config_for())
    engine = cache._running
    with pytest.warns(ResourceWarning, match="never closed"):
        del cache
    engine.close()


@pytest.mark.parametrize("waits", [1, 2])
def test_an_interrupt_while_reserving_leaves_no_lease_behind(tmp_path, monkeypatch, waits):
    """Ctrl-C leaks slots until everything ends in NoRoom; or the next verb hangs."""
    receive = OneShot.receive
    left = []

    def interrupted(self, timeout_s=None):
        value = receive(self, timeout_s)
        left.append(1)
        if len(left) == waits:  # the engine has done its part: when it took the question in, or when it answered
            raise KeyboardInterrupt
        return value

    config = config_for(tmp_path / "store")
    with kvtier.open_sync(config) as cache:
        match = cache.match(prompt(config, 1, 4), owner="t")
        with monkeypatch.context() as patch:
            patch.setattr(OneShot, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cache.reserve(match, 4)
        assert cache.stats()["leases"] == 0
        assert not cache._engine._waiters
        assert cache.check() == []


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, match: cache.prefilled(10**400, 1.0),
        lambda cache, match: cache.prefilled(10**80, 1.0),
        lambda cache, match: cache.prefilled(5, 1.0, start=10**400),
        lambda cache, match: cache.prefilled(10, 1.7e308),
        lambda cache, match: cache.prefilled(10, 10**400),
        lambda cache, match: cache.reserve(match, 1, load_deadline_s=10**400),
        lambda cache, match: cache.submit(Reserve(match, 1, load_deadline_s=10**400)),
        lambda cache, match: cache.submit(Load(match, load_deadline_s=10**400)),
    ],
)
def test_numbers_beyond_all_measure_are_refused_and_the_cache_lives(call, tmp_path):
    """A mistake in one call stops the cache for everybody."""
    config = config_for(tmp_path)
    with kvtier.open_sync(config) as cache:
        cache.prefilled(100, 1.0)
        match = cache.match(prompt(config, 1, 2), owner="me")
        with pytest.raises(kvtier.UsageError):
            call(cache, match)
        serve(cache, prompt(config, 1, 2))
        assert cache.peek(prompt(config, 1, 2)).tokens == 8
        assert cache.check() == []
