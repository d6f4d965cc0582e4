"""WHICH block leaves: the order in which copies of one tier are given up."""

from kvtier.policies.arc import ARC
from kvtier.policies.fifo import FIFO
from kvtier.policies.found import PolicyRegistry
from kvtier.policies.hit_density import HitDensity
from kvtier.policies.lfu import LFU
from kvtier.policies.lru import LRU
from kvtier.policies.s3_fifo import S3FIFO
from kvtier.policies.sieve import SIEVE
from kvtier.policies.two_q import TwoQ
from kvtier.policies.w_tinylfu import WTinyLFU

POLICIES = PolicyRegistry(
    "policy",
    {
        "lru": LRU,
        "arc": ARC,
        "hit_density": HitDensity,
        "fifo": FIFO,
        "lfu": LFU,
        "two_q": TwoQ,
        "s3_fifo": S3FIFO,
        "sieve": SIEVE,
        "w_tinylfu": WTinyLFU,
    },
)
