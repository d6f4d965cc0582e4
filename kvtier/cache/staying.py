"""Which copies of a tier have to stay, as containers of handles that a policy can ask while it walks its order.

Own nothing; each answers from the directory at the moment of asking. Units: handles, tier indexes.
"""

from collections.abc import Container

from kvtier.cache.directory import Directory
from kvtier.cache.transitions import State


class NotReclaimable(Container[int]):
    """Handles whose copy in a tier must stay: held, or the only one."""

    def __init__(self, directory: Directory, tier: int) -> None:
        self._directory = directory
        self._tier = tier

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        return self._directory.is_held(handle, self._tier) or not self._directory.is_clean(handle, self._tier)


class NotDirty(Container[int]):
    """Handles of a tier that are held, or have a copy below."""

    def __init__(self, directory: Directory, tier: int) -> None:
        self._directory = directory
        self._tier = tier

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        return self._directory.is_held(handle, self._tier) or self._directory.is_clean(handle, self._tier)


class NotDemotable(NotDirty):
    """Handles of a tier that need not, or at this moment cannot, be copied to the tier below."""

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        below = self._directory.state(handle, self._tier + 1)  # LEAVING: the old copy must be gone first
        return below is not State.GONE or super().__contains__(handle)


class NotEvictable(Container[int]):
    """Handles of a persistent tier that are held, live above as well (those would be written down again), or
    were just stored for a flush."""

    def __init__(self, directory: Directory, tier: int, flushed: Container[int]) -> None:
        self._directory = directory
        self._tier = tier
        self._flushed = flushed

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        held = self._directory.is_held(handle, self._tier)
        return held or self._directory.top(handle) != self._tier or handle in self._flushed
