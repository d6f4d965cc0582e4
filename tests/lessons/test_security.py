"""What one tenant may learn of another, what may be sent to us, and how fast something is forgotten."""

import ast
from pathlib import Path

import pytest

import kvtier
from kvtier.testing.dict_tier import DictTier
from tests.cache_bench import BLOCK_TOKENS, config_for, prompt, serve
from tests.engine_bench import make_engine
from tests.engine_bench import prompt as polled_prompt
from tests.engine_bench import serve as serve_polled
from tests.lessons.places import at_rest

PACKAGE = Path(kvtier.__file__).parent


def salted(config, salt, blocks=6):
    extra = kvtier.ExtraKeys(cache_salt=salt) if salt else None
    return kvtier.hash_blocks(list(range(blocks * BLOCK_TOKENS)), config.model, extra)


@pytest.mark.parametrize("place", ["gpu", "host", "lmdb"])
@pytest.mark.parametrize("owner", [None, "a"])
def test_a_salt_is_not_lost_on_the_way_down(tmp_path, place, owner):
    """Salts are dropped on the way to an external cache, and a tenant can time what another has asked
    (sglang#37160, vllm PR#53347): the same salt hits, another one never does, wherever the block lies, and a miss
    reads nothing."""
    config = config_for(tmp_path / "store")
    with kvtier.open_sync(config) as cache:
        serve(cache, salted(config, owner))
    with kvtier.open_sync(config) as cache:
        if place == "gpu":
            serve(cache, salted(config, owner))
        elif place == "host":
            serve(cache, salted(config, owner))
            cache.release(cache.reserve(cache.match(prompt(config, 9, 15), owner="x"), 15))
        assert cache.peek(salted(config, owner)).tiers[place] == 24
        reads = cache.stats()["tiers"]["lmdb"]["read_blocks"]
        for other in {None, "a", "b", "A", "a "} - {owner}:
            match = cache.match(salted(config, other), owner="spy")
            assert (match.tokens, set(match.tiers.values())) == (0, {0})
            lease = cache.reserve(match, 6)
            assert lease.tokens_ready == 0
            cache.release(lease)
        assert cache.stats()["tiers"]["lmdb"]["read_blocks"] == reads
        assert serve(cache, salted(config, owner)).tokens_ready == 24


def modules():
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_nothing_that_comes_in_is_executed():
    """A peer or a file sends a pickle, and its code runs (LMCache PR#926): nothing here reads one or evaluates text."""
    readers = {"load", "loads", "Unpickler", "eval", "exec", "literal_eval", "unsafe_load", "full_load"}
    found = []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                owner, _, verb = name.rpartition(".")
                if verb in readers and (owner in ("pickle", "marshal", "yaml", "torch", "dill", "cloudpickle", "")):
                    found.append(f"{path.relative_to(PACKAGE)}: {name}")
        assert not {"marshal", "shelve", "dill", "cloudpickle", "jsonpickle"} & set(imported(tree)), path
    assert found == []


def test_a_pickle_in_a_store_is_bytes_like_any_other(tmp_path):
    """The same with a hostile store: rows that are pickles are damage (LMCache PR#926)."""
    from kvtier.tiers.lmdb.index import Change, Index

    mark = tmp_path / "ran"
    attack = b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    config = config_for(tmp_path / "store")
    with kvtier.open_sync(config) as cache:
        serve(cache, prompt(config, 1, 4))
    index = Index.open(tmp_path / "store" / "index", "none", 1 << 20)
    index.commit(Change(sidecar={b"policy/head": attack, b"policy/snapshot/a": attack, b"counters": attack}))
    index.close()
    with kvtier.open_sync(config) as cache:
        assert serve(cache, prompt(config, 1, 4)).tokens_ready == 16
    assert not mark.exists()


def test_a_cache_listens_to_nobody(tmp_path):
    """Administration is open to the network without a password (LMCache PR#2757): an embedded cache has no socket,
    and its files are its user's."""
    before = set(sockets())
    with kvtier.open_sync(config_for(tmp_path / "store")) as cache:
        serve(cache, prompt(cache.config, 1, 4))
        assert set(sockets()) == before
        for path in (tmp_path / "store", *(tmp_path / "store").rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path


def sockets():
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue  # the listing's own
        if target.startswith("socket:"):
            yield target


def test_new_weights_see_nothing_of_the_old_ones_at_once_and_lose_nothing():
    """After an update of weights the external cache still answers for the old ones (llm-d-kv-cache#396, vllm#9744,
    FlexKV PR#258); or it has to be emptied, which some do not want (slime PR#1694): another epoch is both."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=16, disk=disk)
    keys = polled_prompt(1, 4)
    serve_polled(engine, keys)
    engine.core.submit_flush()
    engine.run()
    match = engine.match(keys)
    engine.core.set_weights_epoch("step-2")
    assert engine.plan() == []  # there is nothing to do for it, however much is stored
    assert engine.core.peek(keys).tokens == 0
    assert engine.reserve_now(match, 4).tokens_ready == 0
    assert len(disk.rows) == 4
    engine.core.set_weights_epoch("v1")
    assert engine.core.peek(keys).tokens == 16


def test_a_reset_is_immediate_and_durable_and_spares_the_others(tmp_path):
    """A reset is done when the disk is, or not even then (FlexKV PR#258): what is dropped is not found from the call
    on, also after a restart, and what other weights or models have stays."""
    old, new = (config_for(tmp_path / "store", model={"weights_epoch": epoch}) for epoch in ("v1", "v2"))
    with kvtier.open_sync(new) as cache:
        serve(cache, prompt(new, 1, 4))
    with kvtier.open_sync(old) as cache:
        serve(cache, prompt(old, 1, 4))
        found, disk = [], cache._running._tiers[2]
        erase = disk.drop

        def drop(namespace):
            found.append(cache.peek(prompt(old, 1, 4)).tokens)  # the disk still has all of it
            return erase(namespace)

        disk.drop = drop
        assert cache.reset().durable
        assert found == [0]
    with kvtier.open_sync(old) as cache:
        assert cache.peek(prompt(old, 1, 4)).tokens == 0
    with kvtier.open_sync(new) as cache:
        assert cache.peek(prompt(new, 1, 4)).tokens == 16


def test_a_dropped_block_is_not_brought_back_by_what_was_under_way():
    """A store that began before the reset ends after it, and the old block is back (vllm#9744)."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk)
    keys = polled_prompt(1, 4)
    serve_polled(engine, keys)
    engine.core.submit_flush()
    stores = [batch for batch in engine.plan() if batch.transfers]
    engine.core.submit_drop()
    for store in stores:
        engine.finish(store)
    assert disk.rows  # they did end after it
    at_rest(engine)
    assert engine.core.peek(keys).tokens == 0
    assert not disk.rows
