"""A block manager whose pages are an engine's own layer-first cache: what it stores below comes back as it was."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

import kvtier
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.specs import FullAttention, Group
from kvtier.engine.foreign_pages import ForeignPages
from kvtier.engine.managed import ManagedTop
from kvtier.kernels.launch_device import Images
from kvtier.tiers.foreign.places import HostPlaces
from tests.cache_bench import BLOCK_TOKENS, config_for
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.foreign_world import BLOCKS, Favouring, Layout, World, images

__all__ = ["fake_cuda", "images"]
LAYOUT = Layout("engine", (2, BLOCKS, BLOCK_TOKENS, 2, 16), 1, (0, 1, 2, 3, 4), item_bytes=4)
STEPS_MAX = 100_000


class Managed:
    """Steps of an engine with blocks 1 to 7 of its cache, over 32 host slots."""

    def __init__(self, fake: FakeCuda, images: Images, method: str) -> None:
        config = config_for()
        self.world = World(fake, LAYOUT)
        self.below = kvtier.open_sync(replace(config, tiers=config.tiers[1:], notes=()))
        clock = Favouring(fake, **{name: 1.0 if name == method else 5.0 for name in ("pieces", "direct", "staged")})
        self.pages = ForeignPages.on_device(
            [self.world.cache], HostPlaces.of_tier(self.below.top_tier), clock=clock, images=images
        )
        group = Group(FullAttention(block_tokens=BLOCK_TOKENS, kv_heads=2, head_dim=16, dtype="float32"))
        self.manager = KVCacheManager([group], BLOCKS, tokens_max=64, tiers_below=True)
        self.top = ManagedTop(self.manager, self.below, self.pages, ahead=0.9, load_deadline_s=30.0)
        self._streams = self.world.driver.streams
        self._stream, self._event = self._streams.make_stream(), self._streams.make_event()

    def step(self) -> list[object]:
        self._streams.record(self._event, self._stream)
        self.pages.follow(self._event)
        return self.top.step()

    def serve(self, number: int) -> tuple[int, list[bytes]]:
        """A prompt of five blocks: how many of its tokens came from below, and what its blocks hold in the end."""
        tokens = [1000 * number + i for i in range(5 * BLOCK_TOKENS)]
        request = self.manager.request(f"r{number}", tokens)
        lookup = self.top.get_computed_blocks(request)
        assert self.top.allocate_slots(request, len(tokens) - lookup.hit.tokens, lookup) is not None
        found = lookup.hit.tokens
        if self.top.is_loading(request):
            while self.step() != [request]:
                pass
            found = request.computed_tokens
            assert self.top.allocate_slots(request, len(tokens) - found) is not None
        table, memory = self.manager.block_ids(request)[0], self.world.get()
        for place, block in enumerate(table[found // BLOCK_TOKENS :], start=found // BLOCK_TOKENS):
            self.world.write(memory, block, bytes([number, place]) * (LAYOUT.block_bytes // 2))
        self.world.put(memory)
        request.computed_tokens = len(tokens)
        content = [self.world.block(block, memory) for block in table]
        self.top.free(request)
        return found, content

    def settle(self) -> None:
        self.top.flush()
        for _ in range(STEPS_MAX):
            self.step()
            if self.top.is_idle:
                return
        raise AssertionError("moves without end")

    def close(self) -> None:
        self.pages.close()
        self.below.close()
        self.world.close()


@pytest.fixture(params=["pieces", "direct", "staged"])
def managed(request: pytest.FixtureRequest, fake_cuda: FakeCuda, images: Images) -> Iterator[Managed]:
    fake_cuda.configure(1024 * GRANULE_BYTES, GRANULE_BYTES)
    made = Managed(fake_cuda, images, request.param)
    yield made
    made.close()


def test_a_prompt_that_the_engine_has_forgotten_comes_back(managed: Managed, fake_cuda: FakeCuda) -> None:
    """An engine computes again what lies below, or attends to the bytes of another prompt."""
    _, computed = managed.serve(0)
    managed.settle()
    for number in range(1, 4):
        managed.serve(number)
        managed.settle()
    found, content = managed.serve(0)
    assert found == 4 * BLOCK_TOKENS  # the last token is never taken from a cache, and its block with it
    assert content[:4] == computed[:4]
    assert managed.top.counters.loaded == 4
    assert managed.top.counters.lost == 0
    assert managed.top.check() == []
    assert fake_cuda.report == ""


def test_a_lost_device_ends_the_moves_and_keeps_what_lies_below(managed: Managed, fake_cuda: FakeCuda) -> None:
    """A step waits for a device that is gone, or a block counts as stored that never came down."""
    managed.serve(0)
    managed.settle()
    stored = managed.top.counters.stored
    managed.serve(1)
    managed.top.flush()
    fake_cuda.hold()
    while not managed.top._moving:
        managed.step()
    fake_cuda.lose()
    fake_cuda.go_on()
    for _ in range(STEPS_MAX):
        managed.top.step()
        if managed.top.counters.failed:
            break
    assert managed.top.counters.stored == stored == 5
    assert managed.top.counters.failed > 0
    assert managed.below.stats()["leases"] == 0
    assert managed.below.check() == []
