"""A flush of blocks of two sizes, over memory that is full of what the disk has no place for."""

from random import Random

from kvtier.engine.answers import Flushed
from kvtier.testing.exploring.dict_disk import DictDisk
from kvtier.testing.exploring.setup import Setup
from kvtier.testing.exploring.world import World


def small_world():
    """Blocks of one page and of two; memory for two blocks under the top, and a disk of one extent under that."""
    setup = Setup(
        shape=("gpu", "host", "disk"),
        groups=((4, 2), (4, 6)),
        policies=("lru", "lru", "lru"),
        gpu_slots=16,
        host_slots=2,
        extents=1,
        extent_pages=4,
        batch_pages=1,
        watermarks=(0.1, 0.2),
        queue_bytes=1 << 20,
        admissions=("always", "always", "always"),
        wear=None,
        metered=False,
        prefetch_budget=0.0,
        lookahead_requests=1,
        governed=False,
        pin_quota=0.25,
        scrub_bytes_per_s=0,
        in_place=False,
        direct=True,
        slow=0.0,
        hung=0.0,
        rough=0.0,
    )
    return World(setup, Random(0), DictDisk(setup.extents, setup.extent_pages))


def serve(world, number):
    """A request for one block of each size, which stays in the top tier."""
    keys = world.keys_of(0, 1, number)
    world.request(world.requests.match(keys, "test", None, 30.0), 1, 9.0)
    world.listen()
    (ticket,) = world.requests.leases
    world.requests.commit(ticket, 99)
    world.requests.release(ticket)


def flush(world):
    """Time passes until it has ended."""
    ticket = world.engine.core.submit_flush()
    for _ in range(100):
        world.plan()
        for flying in world.engine.underway.endable(world.clock.now())[:1]:
            world.end(flying)
        for answered, answer in world.engine.poll():
            assert answered == ticket
            assert isinstance(answer, Flushed)
            return answer
        world.clock.advance(0.05)
    raise AssertionError("it does not end")


def test_a_flush_passes_memory_that_is_full_of_what_the_disk_has_no_place_for():
    """A block is given up though the disk has a place for it: behind others it waits for memory that never empties."""
    world = small_world()
    serve(world, 0)
    serve(world, 1)
    assert flush(world) == Flushed(4, 2)  # the small ones have the extent; the others fill the memory between
    serve(world, 2)
    assert world.engine.store.room(2048) == 2
    assert flush(world) == Flushed(4, 3)
    assert len(world.medium.by_place) == 3
    world.check()
