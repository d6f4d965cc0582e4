"""`PolicyRegistry`: policies by name, those of other packages included.

Owns: the shipped ones. A name with a colon, `package.module:Class`, is imported; any other that is not shipped is
looked up among the entry points, which a package declares in its pyproject.toml:

    [project.entry-points."kvtier.policies"]
    mine = "package.module:Class"

Whatever is found is called with the number of blocks that the tier holds, and must be a `Policy`. The contract that it
should keep is `kvtier.testing.policies`. Always: nothing of another package is imported before it is asked for by name,
and whatever it raises then is a KeyError that says what; what it does later tells its name (`Outside`).
"""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from kvtier.policies.base import Policy, PolicyMaker
from kvtier.policies.outside import METHODS, Outside, told
from kvtier.registry import POLICY_ENTRY_POINTS, Registry, suggestion

WRITE = "Write package.module:Class."


class PolicyRegistry(Registry[PolicyMaker]):
    """As `Registry`; iterating gives the shipped ones."""

    def get(self, name: str) -> PolicyMaker:
        """Raises KeyError whose text says what is wrong: no such name, or what its package does."""
        if name in self or not isinstance(name, str):
            return super().get(name)
        if ":" in name:
            return self._imported(name)
        found = self._declared()
        if name in found:
            return self._imported(found[name].value)
        raise KeyError(f"unknown policy {name!r}. {suggestion(name, {*self, *found})}")

    def make(self, name: str, blocks: int) -> Policy:
        """A policy for so many blocks. Raises KeyError, as `get` does, also for what cannot be made or is none."""
        maker = self.get(name)
        if name in self:
            return maker(blocks)
        try:
            policy = maker(blocks)
        except (Exception, SystemExit) as error:  # somebody else's code: whatever it is, it is told
            raise KeyError(f"policy {name!r} cannot be made for {blocks} blocks: {told(error)}. {WRITE}") from error
        missing = [method for method in METHODS if not callable(getattr(policy, method, None))]
        if missing:
            raise KeyError(f"{name!r} is no policy: it has no {', '.join(missing)}. {WRITE}")
        return cast(Policy, Outside(name, policy))

    def known(self) -> set[str]:
        """The names that can be asked for without a colon."""
        return {*self, *self._declared()}

    @staticmethod
    def _declared() -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=POLICY_ENTRY_POINTS)}

    @staticmethod
    def _imported(place: str) -> PolicyMaker:
        module_name, _, path = place.partition(":")
        try:
            maker: Any = import_module(module_name.strip())
            for part in path.strip().split("."):
                maker = getattr(maker, part)
        except (Exception, SystemExit) as error:  # importing runs somebody else's code
            raise KeyError(f"policy {place!r} cannot be imported: {told(error)}. {WRITE}") from error
        if not callable(maker):
            raise KeyError(f"policy {place!r} is no class. {WRITE}")
        made: PolicyMaker = maker
        return made
