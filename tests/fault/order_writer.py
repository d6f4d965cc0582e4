"""Serves requests in processes that it kills as it is told, by lines of a seed and a number of batches.

With each batch goes a row that says in which order the blocks would leave, in the same transaction.
"""

import os
import random
import select
import signal
import sys
from pathlib import Path

import cbor2

from kvtier.cache.order_log import OrderLog, Rows
from kvtier.cli.bench import world
from kvtier.config import Config, load_config
from kvtier.engine.sync import open_sync

ORDER_KEY = b"test/order"
PROMPTS = 40
BLOCKS_MAX = 24


def configured(path: Path, durability: str) -> Config:
    """A store for some hundred blocks of one page below a few slots."""
    tiers = [
        {"type": "gpu", "capacity": "400KiB", "device": "host"},
        {"type": "lmdb", "capacity": "2MiB", "path": str(path), "durability": durability},
    ]
    model = {"name": "crash", "weights_epoch": "v1", "dtype": "float32", "block_tokens": world.BLOCK_TOKENS}
    return load_config({"model": model | world.SMALL, "tiers": tiers}, environ={})


def serve(path: Path, durability: str, seed: int, told: int) -> None:
    """Requests without end; a byte to `told` for each batch that begins."""
    piece = OrderLog.piece

    def noted(order: OrderLog) -> Rows:
        rows = piece(order)
        os.write(told, b".")
        keys = [order._directory.key(handle) for handle in order.candidates(len(order))]
        return rows | {ORDER_KEY: cbor2.dumps(keys)}

    OrderLog.piece = noted  # type: ignore[method-assign]
    chance = random.Random(seed)
    config = configured(path, durability)
    with open_sync(config) as cache:
        while True:
            keys = world.prompt(config, chance.randrange(PROMPTS), chance.randint(1, BLOCKS_MAX))
            blocks = len(keys.groups[0])
            lease = world.reserved(cache, keys, blocks)
            done = lease.tokens_ready // world.BLOCK_TOKENS
            cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True))[done:])
            cache.release(lease)
            if chance.random() < 0.7:
                cache.flush()


def run_and_kill(path: Path, durability: str, seed: int, batches: int) -> None:
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            serve(path, durability, seed, tell)
        finally:
            os._exit(1)
    os.close(tell)
    for _ in range(batches):
        if not os.read(told, 1):
            break
    select.select([], [], [], random.Random(seed).random() / 500)  # anywhere inside a batch
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(told)


if __name__ == "__main__":
    for line in sys.stdin:
        seed, batches = map(int, line.split())
        run_and_kill(Path(sys.argv[1]), sys.argv[2], seed, batches)
        print("killed", seed, flush=True)
