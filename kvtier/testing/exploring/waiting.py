"""How far a reservation without an answer has come, in the words of the coverage.

Owns nothing; looks at the directory and at the batches under way. Units: blocks, tier indexes.
"""

from collections.abc import Iterator

from kvtier.cache.transitions import State
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.testing.exploring.promises import Pending
from kvtier.types import BlockKey, store_key


def keys_of(pending: Pending) -> Iterator[BlockKey]:
    """The blocks that it may find."""
    return (key for row in pending.keys.groups for key in row)


def note_waiting(
    engine: ExploredEngine, pending: Pending, filling_before: set[BlockKey], from_disk: set[BlockKey]
) -> None:
    """What was under way, and what lay on disk, when it was asked for."""
    keys = set(keys_of(pending))
    pending.joined, pending.from_disk = keys & filling_before, keys & from_disk
    pending.waited = any(_is_filling(engine, key) for key in keys)


def point_of(engine: ExploredEngine, pending: Pending) -> str:
    """Where it would be given up now."""
    filling = [key for key in keys_of(pending) if _is_filling(engine, key)]
    if not filling:
        return "reserve: answered, not collected" if pending.waited else "reserve: no wait"
    if any(key in pending.joined for key in filling):
        return "reserve: joined another's promotion"
    targets = {t.key: flying.batch for flying in engine.underway.flying for t in flying.batch.transfers}
    named = [store_key(engine.namespace, key) for key in filling]
    batches = [targets[key] for key in named if key in targets]
    if not batches:
        return "reserve: queued"
    second = any(batch.target == 0 and batch.source == 1 for batch in batches) and pending.from_disk
    return "reserve: second hop under way" if second else "reserve: first hop under way"


def _is_filling(engine: ExploredEngine, key: BlockKey) -> bool:
    """Whether it is on its way to where it is read."""
    handle = engine.directory.find(store_key(engine.namespace, key))
    return handle is not None and engine.directory.state(handle, engine.goal) is State.FILLING
