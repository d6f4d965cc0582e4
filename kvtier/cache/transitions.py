"""The life of one copy: every legal move, in one table.

    GONE --Place--> FILLING --Filled--> READY --Evict--> LEAVING --Acknowledged--> GONE
                       |                  |
                     Failed            Reclaim         RECLAIMED can't be found any more and waits until the last
                       +--> RECLAIMED <---+            reader or writer of its bytes has let go.

An acknowledged demotion leaves the source READY: it is clean now, and only a reclaim makes it go. A pair that is
not in the table is a bug, and the error names both.
"""

from enum import Enum, IntEnum

from kvtier.errors import InvariantError


class State(IntEnum):
    """State of one copy; GONE is also that of a copy that never was."""

    __hash__ = int.__hash__  # an Enum's own is ten times slower

    GONE = 0
    FILLING = 1
    READY = 2
    LEAVING = 3
    RECLAIMED = 4


class Move(Enum):
    """What happens to a copy."""

    __hash__ = object.__hash__

    PLACE = "place"  # a transfer into this tier is planned
    PUBLISH = "publish"  # bytes that are there already get a name: a commit, or a scan at start
    FILLED = "filled"  # the transfer into it succeeded
    FAILED = "failed"  # the transfer into it failed
    DEMOTED = "demoted"  # a copy below became READY
    EVICT = "evict"  # a persistent tier is asked to forget it
    KEPT = "kept"  # the tier could not: the copy is still there
    RECLAIM = "reclaim"  # its slot goes to someone else, or it was dropped or condemned
    ACKNOWLEDGED = "acknowledged"  # nothing reads or writes its bytes any more


MOVES: dict[tuple[State, Move], State] = {
    (State.GONE, Move.PLACE): State.FILLING,
    (State.GONE, Move.PUBLISH): State.READY,
    (State.FILLING, Move.FILLED): State.READY,
    (State.FILLING, Move.FAILED): State.RECLAIMED,
    (State.FILLING, Move.RECLAIM): State.RECLAIMED,  # overtaken by a drop or reset: the late result is discarded
    (State.READY, Move.DEMOTED): State.READY,
    (State.READY, Move.EVICT): State.LEAVING,
    (State.READY, Move.RECLAIM): State.RECLAIMED,
    (State.LEAVING, Move.KEPT): State.READY,
    (State.LEAVING, Move.RECLAIM): State.LEAVING,  # dropped while it leaves: it leaves anyway
    (State.LEAVING, Move.ACKNOWLEDGED): State.GONE,
    (State.RECLAIMED, Move.RECLAIM): State.RECLAIMED,
    (State.RECLAIMED, Move.EVICT): State.LEAVING,
    (State.RECLAIMED, Move.ACKNOWLEDGED): State.GONE,
}


def after(state: State, move: Move) -> State:
    """The state that follows. Raises InvariantError for a move that the table does not know."""
    try:
        return MOVES[state, move]
    except KeyError:
        raise InvariantError(f"a copy that is {state.name} cannot {move.name}") from None
