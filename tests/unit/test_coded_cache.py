"""The whole cache with codecs on its tiers: what comes back, from where, and what is refused."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvtier
from kvtier.blocks.hashing import Keys
from kvtier.blocks.spec import block_specs
from kvtier.cache.leases import Lease
from kvtier.config import Config
from kvtier.config.codecs import coded_model
from kvtier.engine.build import start
from kvtier.engine.managed_cache import open_managed
from kvtier.errors import ConfigError
from kvtier.kernels import quantize
from kvtier.kernels.arrays import item_bytes
from kvtier.kernels.floats import float_to_bfloat16
from tests.kernels.bit_patterns import normal, specials

BLOCK_TOKENS, GPU_BLOCKS = 16, 15
FULL: dict[str, Any] = {"kind": "full", "layers": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
MLA: dict[str, Any] = {"kind": "mla", "layers": 4, "head_dim": 576, "dtype": "float16"}


def config_of(path: Path | None, *, host: str | None = None, lmdb: str | None = None, **more: Any) -> Config:
    """Blocks of 64 KiB. host, lmdb: a codec; "" is a tier that says none; None: no such tier."""
    groups = more.pop("groups", [FULL])
    model = {"name": "m", "weights_epoch": "v1", "block_tokens": BLOCK_TOKENS, "groups": groups}
    tiers: list[dict[str, Any]] = [{"type": "gpu", "capacity": more.pop("gpu", "1MiB")}]
    if host is not None:
        tiers.append({"type": "host", "capacity": more.pop("capacity", "4MiB"), "hugepages": "off", "pin": "off"})
        tiers[-1] |= {"codec": host} if host else {}
    if lmdb is not None:
        tiers.append({"type": "lmdb", "path": str(path), "capacity": more.pop("disk", "32MiB"), "durability": "none"})
        tiers[-1] |= {"codec": lmdb} if lmdb else {}
    limits = {"load_deadline": "60s", "governor": False}
    return kvtier.load_config({"model": model | more.pop("model", {}), "tiers": tiers, "limits": limits})


class Blocks:
    """Blocks of a configuration's groups by number: their bytes, and what is left of them once they were coded."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.specs = block_specs(config.model)
        self.made: dict[tuple[int, int], NDArray[Any]] = {}

    def key(self, number: int) -> Keys:
        """The name of one block, as that of a prompt of one block."""
        return Keys.opaque([[number.to_bytes(32, "little")] for _ in self.specs], self.config.model)

    def bits(self, group: int, number: int) -> NDArray[Any]:
        """Random values, and all special ones."""
        dtype = self.config.model.groups[group].dtype
        bits = normal(np.random.default_rng(number), dtype, self.specs[group].block_bytes // item_bytes(dtype))
        some = specials(dtype)
        bits[: len(some)] = some
        return bits

    def restored(self, group: int, number: int) -> bytes:
        """The block as it comes back from below."""
        spec, codec = self.config.model.groups[group], self.config.model.codec
        bits = self.bits(group, number)
        if codec == "none":
            return bits.tobytes()
        rows = bits.reshape(-1, spec.head_dim)
        rows = rows if spec.dtype == "bfloat16" else rows.view(spec.dtype)
        with np.errstate(invalid="ignore"):
            coded = quantize.encode(rows, spec.dtype, codec)
        return quantize.decode(coded, spec.dtype, *rows.shape, codec).tobytes()

    def put(self, cache: Any, numbers: range) -> None:
        """Compute these blocks, each a prompt of its own, and have them copied below."""
        array = cache.top_tier.array()
        for number in numbers:
            keys = self.key(number)
            lease = cache.reserve(cache.match(keys, "w"), 1)
            assert isinstance(lease, Lease)
            for group, row in enumerate(keys.groups):
                (slot,) = lease.slots(group)
                payload = self.bits(group, number).view(np.uint8)
                array[slot, : len(payload)] = payload
                cache.commit(lease, [(slot, row[0])])
            cache.release(lease)
            if number % 4 == 3:
                cache.flush()

    def get(self, cache: Any, number: int) -> tuple[list[bytes], dict[str, int]]:
        """What the block is now, by group (none: a miss), and where it came from."""
        keys = self.key(number)
        lease = cache.reserve(cache.match(keys, "r"), 1)
        assert isinstance(lease, Lease)
        array = cache.top_tier.array()
        found = [
            bytes(array[lease.slots(group)[0], : spec.block_bytes])
            for group, spec in enumerate(self.specs)
            if lease.tokens_ready
        ]
        cache.release(lease)
        return found, {name: tokens for name, tokens in lease.tiers.items() if tokens}


@pytest.mark.parametrize(
    ("host", "lmdb"),
    [(None, "exp4"), (None, "int8"), ("", "exp4"), ("", "fp8"), ("int8", ""), ("fp8", "fp8"), ("none", "none")],
)
def test_blocks_come_back_from_every_tier(tmp_path: Path, host: str | None, lmdb: str) -> None:
    """A block comes back with codes in it, coded twice, or lossy although its codec is not."""
    config = config_of(tmp_path / "s", host=host, lmdb=lmdb)
    blocks = Blocks(config)
    with kvtier.open_sync(config) as cache:
        blocks.put(cache, range(20))
        for number in range(4):  # pushed out of the gpu tier by those after it
            found, tiers = blocks.get(cache, number)
            as_it_was = "host" in tiers and config.tiers[1].codec == "none"
            wanted = blocks.bits(0, number).tobytes() if as_it_was else blocks.restored(0, number)
            assert found == [wanted], (number, tiers)
            assert "gpu" not in tiers
    with kvtier.open_sync(config) as cache:
        for number in range(20):
            found, tiers = blocks.get(cache, number)
            assert found == [blocks.restored(0, number)], number
            assert tiers == {"lmdb": BLOCK_TOKENS}
        assert cache.stats()["tiers"]["lmdb"].get("corrupt", 0) == 0


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_memory_holds_more_coded_blocks(codec: str) -> None:
    """The codec of a host tier saves nothing, or its blocks do not come back without a disk."""
    config = config_of(None, host=codec)
    plain = config_of(None, host="")
    with kvtier.open_sync(plain) as cache:
        slots = cache.stats()["tiers"]["host"]["slots"]
    blocks = Blocks(config)
    with kvtier.open_sync(config) as cache:
        assert cache.stats()["tiers"]["host"]["slots"] > 1.7 * slots
        blocks.put(cache, range(8))
        for number in range(8, 40):  # one at a time, so that what is written can be copied below
            blocks.put(cache, range(number, number + 1))
            settle(cache)
        found, tiers = blocks.get(cache, 2)
        assert tiers == {"host": BLOCK_TOKENS}
        assert found == [blocks.restored(0, 2)]
        assert cache.check() == []


def settle(cache: Any) -> None:
    """Wait until nothing is on its way down."""
    while cache.stats()["tiers"]["gpu"]["blocks_idle_clean"] == 0 and cache.stats()["tiers"]["gpu"]["slots_free"] == 0:
        cache.peek(Keys.opaque([[b"x" * 32]], cache.config.model))


@pytest.mark.parametrize("host", [None, "int8"])
def test_groups_of_several_shapes(tmp_path: Path, host: str | None) -> None:
    """A latent is coded in rows of another group, or its block is taken for as long as theirs."""
    groups = [FULL, MLA, FULL | {"head_dim": 32, "kv_heads": 4, "dtype": "float32"}]
    config = config_of(tmp_path / "s", host=host, lmdb="" if host else "exp4", groups=groups, gpu="4MiB")
    blocks = Blocks(config)
    with kvtier.open_sync(config) as cache:
        blocks.put(cache, range(8))
        assert cache.flush().failed == 0
    with kvtier.open_sync(config) as cache:
        for number in range(8):
            found, _ = blocks.get(cache, number)
            assert found == [blocks.restored(group, number) for group in range(3)], number


def test_turning_exp4_on_and_off(tmp_path: Path) -> None:
    """A store is cold, or wrong, after its codec was changed in the YAML."""
    path = tmp_path / "s"
    for first, codec in ((0, ""), (4, "exp4"), (8, "none")):
        config = config_of(path, lmdb=codec)
        blocks = Blocks(config)
        with kvtier.open_sync(config) as cache:
            blocks.put(cache, range(first, first + 4))
    with kvtier.open_sync(config_of(path, lmdb="exp4")) as cache:
        assert [blocks.get(cache, n)[0] for n in range(12)] == [[blocks.restored(0, n)] for n in range(12)]


def test_lossy_blocks_have_a_namespace_of_their_own(tmp_path: Path) -> None:
    """Blocks that lost precision are served to who asked for exact ones, or the other way round."""
    path = tmp_path / "s"
    exact, lossy = config_of(path, lmdb="none"), config_of(path, lmdb="int8")
    blocks = Blocks(exact)
    with kvtier.open_sync(exact) as cache:
        blocks.put(cache, range(4))
    with kvtier.open_sync(lossy) as cache:
        assert cache.peek(blocks.key(1)).tokens == 0
        Blocks(lossy).put(cache, range(4))
    with kvtier.open_sync(exact) as cache:
        assert blocks.get(cache, 1)[0] == [blocks.restored(0, 1)]


def test_a_block_in_memory_that_does_not_decode_is_a_miss() -> None:
    """Its bytes are served, or it is found and fails again and again."""
    config = config_of(None, host="int8")
    blocks = Blocks(config)
    with kvtier.open_sync(config) as cache:
        for number in range(2 * GPU_BLOCKS):
            blocks.put(cache, range(number, number + 1))
            settle(cache)
        host = cache._running._tiers[1]
        for slot in range(host.traits.slots):
            host.slot(slot)[0] ^= 0x40
        assert cache.peek(blocks.key(2)).tokens == BLOCK_TOKENS
        assert blocks.get(cache, 2) == ([], {})
        assert cache.peek(blocks.key(2)).tokens == 0
        assert cache.stats()["tiers"]["host"]["corrupt"] == 1


def test_blocks_that_do_not_shrink_find_room_in_a_full_store(tmp_path: Path) -> None:
    """One block that exp4 cannot code stops all stores of a store that is full of coded ones."""
    config = config_of(tmp_path / "s", lmdb="exp4", disk="4MiB")
    blocks = Blocks(config)
    blocks.bits = lambda group, number: (  # type: ignore[method-assign]
        np.random.default_rng(number).integers(0, 1 << 16, 32_768, np.uint16)
        if number >= 80 or number % 7 == 5
        else Blocks.bits(blocks, group, number)
    )
    with kvtier.open_sync(config) as cache:
        blocks.put(cache, range(160))
        assert cache.flush().failed == 0
        newest = [blocks.get(cache, number)[0] for number in range(150, 160)]
    assert newest == [[blocks.restored(0, number)] for number in range(150, 160)]
    with kvtier.open_sync(config) as cache:
        assert [blocks.get(cache, number)[0] for number in range(156, 160)] == newest[6:]


class Exact(Blocks):
    """Blocks of which no codec loses anything, among them some that exp4 cannot shorten."""

    def bits(self, group: int, number: int) -> NDArray[Any]:
        rng, spec = np.random.default_rng(number), self.config.model.groups[group]
        if self.config.model.codec == "none":
            return rng.integers(0, 1 << 16, 32_768, np.uint16) if number % 9 == 4 else super().bits(group, number)
        values = rng.integers(-8, 8, (32_768 // spec.head_dim, spec.head_dim)).astype(np.float32)
        values[:, 0] = {"int8": 127, "fp8": 448}[self.config.model.codec]  # so that the scale of each row is 1
        return float_to_bfloat16(values).reshape(-1)


@pytest.mark.parametrize(
    ("host", "lmdb", "seed"), [("", "exp4", 1), ("int8", "", 2), ("fp8", "", 3), ("", "int8", 4), (None, "exp4", 5)]
)
def test_a_long_day(tmp_path: Path, host: str | None, lmdb: str, seed: int) -> None:
    """After some thousand moves between full tiers a block is served with another's bytes, or the books disagree."""
    rng = random.Random(seed)
    config = config_of(tmp_path / "s", host=host, lmdb=lmdb, disk="6MiB", capacity="1536KiB")
    blocks, found = Exact(config), Counter[str]()
    for _ in range(3):  # each in a new process, as it were
        with kvtier.open_sync(config) as cache:
            for _ in range(100):
                number = min(rng.randrange(200), rng.randrange(200))
                payloads, tiers = blocks.get(cache, number)
                found.update(tiers or ["miss"])
                assert payloads in ([], [blocks.restored(0, number)]), (number, tiers)
                if not payloads:
                    blocks.put(cache, range(number, number + 1))
                if rng.random() < 0.1:
                    cache.flush()
                if rng.random() < 0.03:
                    cache.resize("gpu", rng.choice((512 << 10, 1 << 20)))
            assert cache.check() == []
            assert cache.stats()["tiers"]["lmdb"].get("corrupt", 0) == 0
    assert found["lmdb"] > 10
    assert found["miss"] > 10
    assert found["host"] > 3 or host is None


def test_size_classes_are_those_of_the_stored_bytes(tmp_path: Path) -> None:
    """Who needs room for a block evicts others of another size, before or after a restart."""
    config = config_of(tmp_path / "s", lmdb="exp4")
    blocks = Exact(config)
    coded_bytes = coded_model(config.model, config.tiers)[1].slot_bytes(65_536)
    for _ in range(2):
        with kvtier.open_sync(config) as cache:
            blocks.put(cache, range(3, 5))  # of which exp4 cannot shorten the last
            cache.flush()
            policy = cache._engine._core.residency.levels[-1].policy
            assert [len(policy.candidates(1, (), size)) for size in (coded_bytes, 65_536)] == [1, 1]
            assert policy.candidates(2, (), coded_bytes) == policy.candidates(2, (), 65_536) == []


def test_one_block_that_does_not_shrink_empties_an_extent_and_no_more(tmp_path: Path) -> None:
    """A store full of coded blocks is emptied, two at a time, for one that needs another slot; or that one fails."""
    config = config_of(tmp_path / "s", lmdb="exp4", disk="4MiB")
    blocks = Exact(config)
    with kvtier.open_sync(config) as cache:
        numbers = [n for n in range(120) if n % 9 != 4]
        for number in numbers:
            blocks.put(cache, range(number, number + 1))
            cache.flush()
        for number in random.Random(1).sample(numbers[-60:], 60):
            blocks.get(cache, number)  # so that the order is not that of the extents any more
        before = cache.stats()["tiers"]["lmdb"]["evicted"]
        blocks.put(cache, range(121, 122))
        assert cache.flush().failed == 0
        assert cache.stats()["tiers"]["lmdb"]["evicted"] - before <= 12, "an extent of nine, and the first attempt"


# ---------------------------------------------------------------- who runs the tier above


def test_pages_of_a_manager_over_a_coded_store(tmp_path: Path) -> None:
    """A mover fills a coded host tier with blocks as they are; or pages do not come back from a coded store."""
    refused = config_of(tmp_path / "s", host="int8", lmdb="")
    with pytest.raises(ConfigError, match=r"tiers\[1\].codec: its slots are read and written as they are"):
        open_managed(refused, tokens_max=256)
    config, tokens = config_of(tmp_path / "s", host="", lmdb="exp4"), list(range(100))
    with open_managed(config, tokens_max=256) as cache:
        request = cache.request("a", tokens)
        (table,) = cache.allocate_slots(request, 100) or ((),)
        for at, page in enumerate(table):
            cache._pages.array()[page, :65_536] = Blocks(config).bits(0, at).view(np.uint8)
        request.computed_tokens = 100
        cache.free(request)
        assert cache.flush()
    with open_managed(config, tokens_max=256) as cache:
        request = cache.request("b", tokens)
        lookup = cache.get_computed_blocks(request)
        assert lookup.external_tokens == 96
        (table,) = cache.allocate_slots(request, 4, lookup) or ((),)
        assert cache.step(30.0) == [request]
        for at, page in enumerate(table[:6]):
            assert bytes(cache._pages.array()[page, :65_536]) == Blocks(config).bits(0, at).tobytes()
        cache.free(request)


def test_a_configuration_made_by_hand_must_agree(tmp_path: Path) -> None:
    """Lossy blocks are kept under the name of exact ones."""
    config = config_of(tmp_path / "s", lmdb="int8")
    wrong = replace(config, model=replace(config.model, codec="none"))
    with pytest.raises(ConfigError, match=r"model.codec: none, and the tiers' is int8"):
        start(wrong)
