"""One small manager per kind of attention, by the class of its spec.

Owns: the table from specs to managers. `register_group` adds one for a spec of your own (docs/extending.md).
"""

from kvtier.cache.groups.base import GroupManager
from kvtier.cache.groups.chunked import ChunkedLocalGroup
from kvtier.cache.groups.cross import CrossGroup
from kvtier.cache.groups.finding import Find, Hits, find_all, leading
from kvtier.cache.groups.full import FullGroup
from kvtier.cache.groups.mamba import AlignedMambaGroup, MambaGroup
from kvtier.cache.groups.window import SlidingWindowGroup
from kvtier.cache.specs import ChunkedLocal, CrossAttention, FullAttention, Mamba, Mla, SlidingWindow, Spec
from kvtier.errors import UsageError

_MANAGERS: dict[type[Spec], type[GroupManager]] = {
    FullAttention: FullGroup,
    Mla: FullGroup,
    SlidingWindow: SlidingWindowGroup,
    ChunkedLocal: ChunkedLocalGroup,
    Mamba: MambaGroup,
    CrossAttention: CrossGroup,
}


def register_group(spec: type[Spec], manager: type[GroupManager]) -> None:
    """Groups of this spec, and of specs derived from it, get this manager.

    Raises UsageError if the spec has one already.
    """
    if not (isinstance(spec, type) and issubclass(spec, Spec)):
        raise UsageError(f"{spec!r} is no spec; derive it from kvtier.cache.specs.Spec")
    if not (isinstance(manager, type) and issubclass(manager, GroupManager)):
        raise UsageError(f"{manager!r} is no manager; derive it from kvtier.cache.groups.GroupManager")
    if spec in _MANAGERS:
        raise UsageError(
            f"{spec.__name__} has a manager already, {_MANAGERS[spec].__name__}; derive a spec of your own"
        )
    _MANAGERS[spec] = manager


def manager_class(spec: Spec) -> type[GroupManager]:
    """The manager for groups of this spec. Raises UsageError if there is none."""
    if isinstance(spec, Mamba) and spec.mode == "align" and type(spec) is Mamba:
        return AlignedMambaGroup
    for base in type(spec).__mro__:
        if base in _MANAGERS:
            return _MANAGERS[base]
    raise UsageError(f"{spec!r} has no manager; use a spec of kvtier.cache.specs, or call register_group")


__all__ = ["Find", "GroupManager", "Hits", "find_all", "leading", "manager_class", "register_group"]
