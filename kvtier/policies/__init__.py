"""WHICH block leaves: the order in which copies of one tier are given up."""

from collections.abc import Callable

from kvtier.policies.base import Policy
from kvtier.policies.lru import LRU
from kvtier.registry import Registry

POLICIES: Registry[Callable[[], Policy]] = Registry("policy", {"lru": LRU})
