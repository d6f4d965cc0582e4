"""Part `roundtrip`: blocks go down and come back through `kvtier.open_sync` on the card, into poisoned slots.

Owns no state. Finds: a block that comes back with other bytes, is lost, or is said to be there and is not. Before
blocks come back every slot of the device is filled with NaNs; the second time they come from the store, in a new cache.
"""

from kvtier.cache.leases import Lease
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.paged import BLOCK_TOKENS
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.serving import Serving, configured


def measure(card: Card, record: Record) -> None:
    blocks = card.scale.prompts * card.scale.prompt_blocks
    with configured(card) as config:
        with Serving(card, config) as serving:
            record.measured("block", serving.spec.block_bytes, "B")
            record.measured("slots on the device", config.tiers[0].capacity_bytes // serving.stride_bytes)
            for number in range(card.scale.prompts):
                keys = serving.prompt(number)
                with serving.leased(keys) as lease:
                    record.expect(lease.tokens_ready == 0, f"prompt {number} was found before anybody computed it")
                    serving.compute(lease, keys)
                serving.flush()
            serving.poison()
            left = sum(serving.cache.peek(serving.prompt(n)).tiers.get("gpu", 0) for n in range(card.scale.prompts))
            record.expect(left == 0, f"{left} tokens are said to lie on the device, whose slots are poisoned")
            _come_back(serving, record, "host")
            unsound = serving.cache.check()
            record.expect(not unsound, f"the cache's books: {'; '.join(unsound)}")
        with Serving(card, config) as serving:
            serving.poison()
            _come_back(serving, record, "lmdb")
    record.measured("blocks", blocks)


def _come_back(serving: Serving, record: Record, tier: str) -> None:
    wanted = serving.card.scale.prompt_blocks * BLOCK_TOKENS
    origins: dict[str, int] = {}
    for number in range(serving.card.scale.prompts):
        keys = serving.prompt(number)
        with serving.leased(keys) as lease:
            _judge(serving, record, lease, number, wanted)
            for name, tokens in lease.tiers.items():
                origins[name] = origins.get(name, 0) + tokens
            wrong = serving.wrong(lease, keys)
            record.expect(wrong == 0, f"prompt {number} from {tier}: {wrong} blocks have other bytes")
            serving.compute(lease, keys)  # what is missing is a finding already; go on as an engine would
        serving.flush()
    record.expect(origins.get(tier, 0) > 0, f"nothing came from {tier}: {origins}")
    record.measured(f"tokens restored, poisoned slots, {tier}", origins.get(tier, 0))
    record.measured(
        f"restored through reserve(), {tier}", serving.restored_bytes / max(serving.restoring_s, 1e-9) / 1e9, "GB/s"
    )


def _judge(serving: Serving, record: Record, lease: Lease, number: int, wanted: int) -> None:
    ready = lease.tokens_ready
    record.expect(ready == wanted, f"prompt {number}: {ready} of {wanted} tokens came back")
