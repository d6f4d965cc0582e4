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
        directory, tier = self._directory, self._tier
        if directory.state(handle, tier + 1) is not State.GONE:  # LEAVING: the old copy must be gone first
            return True
        return directory.is_held(handle, tier) or directory.is_clean(handle, tier)


class Protected(Container[int]):
    """Handles of a tier that are held, or were just stored for a flush."""

    def __init__(self, directory: Directory, tier: int, flushed: Container[int]) -> None:
        self._directory = directory
        self._tier = tier
        self._flushed = flushed

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        return self._directory.is_held(handle, self._tier) or handle in self._flushed


class NotEvictable(Protected):
    """Those, and handles that live above as well: they would be written down again."""

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        return self._directory.top(handle) != self._tier or super().__contains__(handle)
