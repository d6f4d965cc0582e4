"""Which hash functions there are, which can be added, and where a configuration may name them."""

import copy
import hashlib
import itertools

import pytest

from kvtier.blocks.algorithms import HASHES, ROOT_SEED, register_hash, vllm_seed
from kvtier.blocks.chain import chain
from kvtier.config import load_config
from kvtier.errors import ConfigError, UsageError

CONFIG = {
    "model": {"name": "m", "weights_epoch": "v1", "layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float16"},
    "tiers": [{"type": "gpu", "capacity": "1MiB"}, {"type": "host", "capacity": "2MiB"}],
}
LMDB = {"type": "lmdb", "path": "./store", "capacity": "64MiB"}


@pytest.fixture(autouse=True)
def _own_hashes(monkeypatch):
    monkeypatch.setattr(HASHES, "_entries", {name: HASHES.get(name) for name in HASHES})


def config_of(hash_name, *more_tiers):
    data = copy.deepcopy(CONFIG)
    data["model"]["hash"] = hash_name
    data["tiers"] += more_tiers
    return load_config(data, environ={})


@pytest.mark.parametrize("hash_name", ["sha256", "xxhash"])
def test_pickled_keys_stay_out_of_persistent_tiers(hash_name):
    """A store fills with blocks whose names nobody will make again."""
    assert config_of(hash_name).model.hash == hash_name
    with pytest.raises(ConfigError, match=rf"tiers\[2\].*Use {hash_name}_cbor") as caught:
        config_of(hash_name, LMDB)
    assert caught.value.path == "model.hash"
    assert config_of(f"{hash_name}_cbor", LMDB).model.hash == f"{hash_name}_cbor"


def test_a_registered_hash_can_be_named_everywhere():
    """A hash function that an application adds is unknown to its configuration."""
    with pytest.raises(ConfigError, match="unknown hash 'blake2b'"):
        config_of("blake2b")
    register_hash("blake2b", lambda data: hashlib.blake2b(data).digest(), collision_resistant=True)
    assert config_of("blake2b", LMDB).model.hash == "blake2b"
    hashes = list(chain(range(32), 16, "blake2b"))
    assert {len(h) for h in hashes} == {64}
    assert vllm_seed("blake2b", {}) == ROOT_SEED
    register_hash("pickled", lambda data: hashlib.md5(data).digest(), encoding="pickle")
    with pytest.raises(ConfigError, match="not outlive"):
        config_of("pickled", LMDB)
    assert len(next(chain(range(16), 16, "pickled"))) == 16


def test_a_hash_that_cannot_name_blocks_is_refused():
    """A name is taken over, or keys get lengths that no record holds."""
    counter = itertools.count()
    digests = {
        "empty": lambda data: b"",
        "long": lambda data: b"x" * 65,
        "text": lambda data: "x" * 32,
        "array": lambda data: bytearray(32),
        "failing": lambda data: 1 // 0,
        "random": lambda data: bytes([next(counter)]),
        "number": 5,
    }
    for name, digest in digests.items():
        with pytest.raises(UsageError):
            register_hash(name, digest)
        assert name not in HASHES
    for name in ("sha256", "xxhash_cbor", "", None, "two words"):
        with pytest.raises(UsageError, match="hash"):
            register_hash(name, lambda data: b"x" * 32)
    with pytest.raises(UsageError, match="encoding"):
        register_hash("fine", lambda data: b"x" * 32, encoding="json")
    register_hash("fine", lambda data: b"x" * 32)
    with pytest.raises(UsageError, match="already"):
        register_hash("fine", lambda data: b"y" * 32)


def test_a_hash_that_changes_its_length_is_told_off():
    """A key's length depends on its block, and records mix up hash and group."""
    register_hash("moody", lambda data: b"x" * (1 + bool(data)))
    with pytest.raises(UsageError, match="always as many"):
        chain(range(4), 4, "moody")


def test_a_hash_that_fails_later_is_named():
    """A request ends in a traceback from code that the reader has never heard of."""
    register_hash("brittle", lambda data: bytes([1 // (1 - bool(data))]) * 32)
    with pytest.raises(UsageError, match=r"hash 'brittle' fails on .* bytes: ZeroDivisionError") as caught:
        chain(range(4), 4, "brittle")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_seed_is_vllms_on_request():
    """An engine beside vLLM takes another root than vLLM does."""
    for hash_name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        assert vllm_seed(hash_name, {"PYTHONHASHSEED": "0"}) == "0"
        assert vllm_seed(hash_name, {"PYTHONHASHSEED": ""}) == ""
    assert vllm_seed("sha256", {}) == vllm_seed("sha256_cbor", {}) == ROOT_SEED
    random_seeds = {vllm_seed(name, {}) for name in ("xxhash", "xxhash_cbor") for _ in range(2)}
    assert len(random_seeds) == 4
    assert {len(bytes.fromhex(seed)) for seed in random_seeds} == {32}
    with pytest.raises(UsageError, match="unknown hash"):
        vllm_seed("sha265", {})


def test_nothing_is_ever_unpickled(monkeypatch):
    """A pickle-based hash runs code that a request brought along."""
    import pickle

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    assert len(list(chain(range(32), 16, "sha256"))) == 2
