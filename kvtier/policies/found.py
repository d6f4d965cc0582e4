"""`PolicyRegistry`: policies by name, those of other packages included.

Owns: the shipped ones. A name with a colon, `package.module:Class`, is imported; any other that is not shipped is
looked up among the entry points, which a package declares in its pyproject.toml:

    [project.entry-points."kvtier.policies"]
    mine = "package.module:Class"

Whatever is found is called with the number of blocks that the tier holds, and must be a `Policy`. The contract that it
should keep is `kvtier.testing.policies`. Always: nothing of another package is imported before it is asked for by name.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from kvtier.policies.base import PolicyMaker
from kvtier.registry import POLICY_ENTRY_POINTS, Registry, suggestion


class PolicyRegistry(Registry[PolicyMaker]):
    """As `Registry`; iterating gives the shipped ones."""

    def get(self, name: str) -> PolicyMaker:
        """Raises KeyError whose text says what is wrong: no such name, or what its package does."""
        if name in self or not isinstance(name, str):
            return super().get(name)
        if ":" in name:
            return self._imported(name)
        found = {point.name: point for point in entry_points(group=POLICY_ENTRY_POINTS)}
        if name in found:
            return self._imported(found[name].value)
        raise KeyError(f"unknown policy {name!r}. {suggestion(name, {*self, *found})}")

    @staticmethod
    def _imported(place: str) -> PolicyMaker:
        module_name, _, path = place.partition(":")
        try:
            maker: Any = import_module(module_name.strip())
            for part in path.strip().split("."):
                maker = getattr(maker, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise KeyError(f"policy {place!r} cannot be imported: {error}. Write package.module:Class.") from error
        if not callable(maker):
            raise KeyError(f"policy {place!r} is no class. Write package.module:Class.")
        made: PolicyMaker = maker
        return made
