"""`Sessions`: which blocks belong to which session, so that a hint can name one.

Owns: for each session the keys of its latest request, for each key how many sessions name it, and the names of those
that were said to have ended. A session is named by whoever serves it, at `match`.
Always:  at most SESSIONS_MAX sessions with BLOCKS_MAX keys in all, and as many names of ended ones: the session that
         has been quiet for longest is forgotten first, at the cost of any other step. That is at most about 120 bytes
         for each key, 60 MB, and for names of NAME_BYTES_MAX, which callers see to, 15 MB more (40 beyond ASCII).
Units:   keys, in the order in which a request's blocks are touched: deepest first.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from kvtier.cache.names import SEVERAL
from kvtier.policies.trust import Turn
from kvtier.types import StoreKey

SESSIONS_MAX = 16_384
BLOCKS_MAX = 1 << 19
NAME_BYTES_MAX = 256  # in UTF-8


def number_of(name: str) -> int:
    """By which `Directory.note_session` knows a session."""
    return crc32(name.encode("utf-8", "surrogatepass")) % (SEVERAL - 1) + 1


@dataclass(slots=True)
class Session:
    """What is known of one: its keys, and what was said of it.

    rank: claimed for `keys`; 0: none. returns_at_s: when it is expected again.
    """

    keys: Sequence[StoreKey] = ()
    rank: int = 0
    returns_at_s: float | None = None
    turn: Turn | None = None  # its latest, while nothing has followed on it; None: a request of it is being served


class Sessions:
    """Sessions by name, the quietest first. `evicted` collects those that were forgotten for want of room."""

    def __init__(self) -> None:
        # Ordered ones find their first at once; a dict looks through what was taken out before it, thousands of places.
        self._living: OrderedDict[str, Session] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._named_by: Counter[StoreKey] = Counter()
        self._keys = 0
        self.evicted: list[tuple[str, Session]] = []

    def __len__(self) -> int:
        return len(self._living)

    def find(self, name: str) -> Session | None:
        """A session that goes on."""
        return self._living.get(name)

    def has_ended(self, name: str) -> bool:
        """Whether the last that was said of it is that it is over."""
        return name in self._ended

    def came(self, name: str) -> Session:
        """A request of it is served from now on: it has not ended, whatever was said."""
        self._ended.pop(name, None)
        session = self._living.setdefault(name, Session())
        self._living.move_to_end(name)
        self._make_room()
        return session

    def turned(self, session: Session, keys: Sequence[StoreKey]) -> None:
        """These are the blocks of its latest request."""
        self._forget_keys(session)
        session.keys = keys
        self._named_by.update(keys)
        self._keys += len(keys)
        self._make_room()

    def is_named(self, key: StoreKey) -> bool:
        """Whether a session that goes on names it."""
        return key in self._named_by

    def own(self, session: Session) -> list[StoreKey]:
        """Its blocks that no other session names."""
        return [key for key in session.keys if self._named_by[key] == 1]

    def end(self, name: str) -> None:
        """It is said to be over: its blocks are nobody's any more."""
        session = self._living.pop(name)
        self._forget_keys(session)
        self._ended[name] = None
        if len(self._ended) > SESSIONS_MAX:
            self._ended.popitem(last=False)

    def _make_room(self) -> None:
        while len(self._living) > SESSIONS_MAX or (self._keys > BLOCKS_MAX and len(self._living) > 1):
            name, quietest = self._living.popitem(last=False)
            self.evicted.append((name, quietest))
            self._forget_keys(quietest)

    def _forget_keys(self, session: Session) -> None:
        named_by = self._named_by
        for key in session.keys:
            left = named_by[key] - 1
            if left:
                named_by[key] = left
            else:
                del named_by[key]
        self._keys -= len(session.keys)
