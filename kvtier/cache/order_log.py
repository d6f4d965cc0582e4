"""`OrderLog`: a policy of a persistent tier, whose order is written down with the tier's batches.

Owns: the policy, what it was told since the last piece that went out, and the numbers of the rows in the store.
Passes every call on and notes it; replaying the calls on the last snapshot gives the same policy again, for a policy
depends on nothing but its calls. `piece` hands out the rows for the next batch, so that what the index says and what
the order says are committed together; `settled` hears how that ended.
Always: the rows in the store are those of one snapshot and an unbroken log, or a restart uses them up to the break.

A snapshot goes out first, and again when the log has outgrown it; it replaces all older rows.
Units: handles, bytes.
"""

from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvtier.cache import order_rows
from kvtier.cache.directory import Directory
from kvtier.cache.order_ghosts import PACKED_AT_ONCE, PackedGhosts
from kvtier.cache.order_rows import Snapshot
from kvtier.policies.base import Access, Hint, Policy, SupportsHints

LOG_BYTES_MIN = 64 << 10  # a log shorter than this is not worth a snapshot
PAUSE_PIECES_MAX = 256  # batches without order after the index had no room for it

EVICT, FORGET, RESIZE, HINT = "evict", "forget", "resize", "hint"  # beside the values of Access
ENDS, ENDS_SHARED = -1, -2  # as argument of HINT; else after how many accesses the blocks return

Rows = dict[bytes, bytes | None]


class OrderLog:
    """Implements Policy over `policy`, of `blocks` blocks, called `name` in the configuration; for tier `tier`."""

    def __init__(
        self,
        policy: Policy,
        name: str,
        blocks: int,
        directory: Directory,
        tier: int,
        fingerprint_of: Callable[[int], bytes],
    ) -> None:
        self._policy = policy
        self._name = name
        self._blocks = blocks
        self._directory = directory
        self._tier = tier
        self._fingerprint_of = fingerprint_of
        self._calls: list[list[Any]] = []  # [what, argument, handles, places or ghosts]
        self._calls_bytes = 0
        self._number = 1  # of the next row of the log
        self._log_bytes = 0  # in the store since the snapshot there
        self._snapshot_bytes = 0
        self._snapshot_due = True
        self._stored: dict[bytes, None] = {}  # keys that may be in the store
        self._pause_pieces = 0
        self._paused_last = 0
        self.changed = False  # something happened since the last piece

    # ------------------------------------------------------------ the policy

    def __len__(self) -> int:
        return len(self._policy)

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        self._policy.touch(handles, access, size_class)
        enters = access is Access.FILL or access is Access.MOVED
        # A snapshot that is due has the places itself.
        places = [self._directory.place(h, self._tier) for h in handles] if enters and not self._snapshot_due else ()
        self._note(access.value, size_class if enters else 0, handles, places)

    def hint(self, handles: Sequence[int], hint: Hint) -> int:
        """As the policy's own; 0 if it knows no hints."""
        used = self._policy.hint(handles, hint) if isinstance(self._policy, SupportsHints) else 0
        if used:
            ends = ENDS_SHARED if hint.shared else ENDS
            self._note(HINT, ends if hint.returns_in is None else hint.returns_in, handles)
        return used

    def candidates(
        self, count: int, pinned: Container[int] = (), size_class: int | None = None, incoming: int | None = None
    ) -> list[int]:
        return self._policy.candidates(count, pinned, size_class, incoming)

    def evict(self, handles: Sequence[int], incoming: int | None = None) -> None:
        self._policy.evict(handles, incoming)
        ghosts = [handle for handle in handles if self._policy.remembers(handle)]
        self._note(EVICT, -1 if incoming is None else incoming, handles, ghosts=ghosts)

    def forget(self, handles: Sequence[int]) -> None:
        known = [handle for handle in handles if self._policy.remembers(handle)]
        if known:
            self._policy.forget(known)
            self._note(FORGET, 0, known)

    def remembers(self, handle: int) -> bool:
        return self._policy.remembers(handle)

    def ghosts(self) -> list[int]:
        return self._policy.ghosts()

    def forgotten(self) -> list[int]:
        return self._policy.forgotten()

    def resize(self, blocks: int) -> None:
        self._policy.resize(blocks)
        self._blocks = blocks
        self._note(RESIZE, blocks, ())

    def snapshot(self) -> bytes:
        return self._policy.snapshot()

    def restore(self, state: bytes, renamed: Mapping[int, int] | None = None) -> None:
        """As the policy's own; what was noted before does not matter any more."""
        self._policy.restore(state, renamed)
        self._begin_anew()

    def take_over(self, policy: Policy) -> None:
        """Go on with a policy of the same kind, in place of the one that nobody has told anything yet."""
        policy.resize(self._blocks)
        self._policy = policy
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._calls.clear()
        self._calls_bytes = 0
        self._snapshot_due = True

    def check(self) -> list[str]:
        return self._policy.check()

    # ------------------------------------------------------------ the rows

    @property
    def name(self) -> str:
        return self._name

    @property
    def unsaved_bytes(self) -> int:
        """About how long the next row of the log is."""
        return self._calls_bytes

    @property
    def paused(self) -> bool:
        """Whether the store had no room for rows lately, so that the next ones are left out."""
        return self._pause_pieces > 0

    def found(self, keys: Iterable[bytes]) -> None:
        """An earlier process left these rows: the first snapshot replaces them."""
        self._stored |= dict.fromkeys(key for key in keys if key.startswith(order_rows.PREFIX))
        self._number = max([self._number, *(order_rows.number_of(key) + 1 for key in self._stored)])

    def piece(self) -> Rows:
        """The rows for the next batch; empty if there is nothing new to say, or no room was left for it lately.

        The first batch of a process has a snapshot in any case: what the rows in the store say is in handles of then.
        """
        if not self.changed and not self._snapshot_due:
            return {}
        if self._pause_pieces:
            self._pause_pieces -= 1
            return {}
        self.changed = False
        rows: Rows = self._snapshot_rows() if self._snapshot_due else self._log_rows()
        self._calls.clear()
        self._calls_bytes = 0
        self._stored |= dict.fromkeys(key for key, row in rows.items() if row is not None)
        return rows

    def settled(self, rows: Mapping[bytes, bytes | None], *, kept: bool, no_room: bool) -> None:
        """The batch with these rows ended. What was lost breaks the log, so that a snapshot must follow."""
        if kept:
            for key in (key for key, row in rows.items() if row is None):
                self._stored.pop(key, None)
            self._paused_last = 0
            return
        self._snapshot_due = self.changed = True
        if no_room:
            self._paused_last = min(PAUSE_PIECES_MAX, 2 * self._paused_last or 1)
            self._pause_pieces = self._paused_last

    def _snapshot_rows(self) -> Rows:
        self._snapshot_due = False
        ghosts = PackedGhosts()
        # Their order is in the policy's own state; in that of handles memory is read from end to end.
        remembered = np.sort(np.array(self._policy.ghosts(), np.int64))
        for start in range(0, len(remembered), PACKED_AT_ONCE):
            self._pack(remembered[start : start + PACKED_AT_ONCE].tolist(), ghosts)
        snapshot = Snapshot(
            self._name,
            self._blocks,
            self._policy.snapshot(),
            self._directory.places_in(self._tier),
            ghosts,
            self._fingerprints(ghosts.namespaces),
        )
        self._number += 1  # should it be lost, no log that was planned behind it may fit the snapshot before
        rows: Rows = dict.fromkeys(self._stored)
        new = order_rows.encode_snapshot(self._number, snapshot)
        self._snapshot_bytes = sum(map(len, new.values()))
        self._log_bytes = 0
        return rows | new

    def _log_rows(self) -> Rows:
        calls = [
            [what, argument, handles.tobytes(), places.tobytes(), bytes(ghosts)]
            for what, argument, handles, places, ghosts in self._calls
        ]
        names = self._fingerprints({namespace for call in self._calls for namespace in call[4].namespaces})
        key = order_rows.log_key(self._number)
        row = order_rows.encode_log(self._number, calls, names)
        self._number += 1
        self._log_bytes += len(row)
        self._snapshot_due = self._log_bytes > max(LOG_BYTES_MIN, self._snapshot_bytes)
        return {key: row}

    def _fingerprints(self, namespaces: Iterable[int]) -> dict[int, bytes]:
        return {namespace: self._fingerprint_of(namespace) for namespace in sorted(namespaces)}

    # ------------------------------------------------------------ inside

    def _note(
        self, what: str, argument: int, handles: Sequence[int], places: Sequence[int] = (), ghosts: Sequence[int] = ()
    ) -> None:
        """ghosts: those of the handles that the policy remembers from now on."""
        self.changed = True
        keys_bytes = sum(map(len, self._directory.keys_of(ghosts)))
        self._calls_bytes += 4 * (len(handles) + len(places)) + keys_bytes + 16 * len(ghosts)
        if self._snapshot_due:
            return  # the snapshot will say it
        last = self._calls[-1] if self._calls else None
        if last is not None and last[0] == what != HINT and last[1] == argument:  # most come one by one
            last[2].extend(handles)
            last[3].extend(places)
        else:
            last = [what, argument, array("I", handles), array("I", places), PackedGhosts()]
            self._calls.append(last)
        if ghosts:
            self._pack(ghosts, last[4])

    def _pack(self, handles: Sequence[int], ghosts: PackedGhosts) -> None:
        """Add the blocks with these handles."""
        ghosts.add(handles, self._directory.lengths_of(handles), self._directory.keys_of(handles))
