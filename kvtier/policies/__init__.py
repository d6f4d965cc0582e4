"""WHICH block leaves: the order in which copies of one tier are given up."""

from kvtier.policies.arc import ARC
from kvtier.policies.base import PolicyMaker
from kvtier.policies.lru import LRU
from kvtier.registry import Registry

POLICIES: Registry[PolicyMaker] = Registry("policy", {"lru": LRU, "arc": ARC})
