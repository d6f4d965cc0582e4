"""What the engine keeps in a persistent tier beside blocks: policy order, counters, speed, wear, condemned blocks.

Owns: what is to be written with the tier's next batch. Always: rows go out with a batch and are settled by its
outcome, so that they are as old as the last index commit and no older. docs/format.md has their encoding.
Units: seconds of the engine's clock; milliseconds since 1970 in rows.
"""

from collections import deque
from collections.abc import Mapping

import cbor2

from kvtier.blocks import plain_cbor
from kvtier.cache.order_log import LOG_BYTES_MIN, Rows
from kvtier.cache.residency import Residency
from kvtier.engine.rates import Rates
from kvtier.engine.wear import Wear
from kvtier.types import Outcome, Status, Transfer, block_key_of, namespace_of

COUNTERS_KEY = b"counters"
SPEED_KEY = b"speed"
WEAR_KEY = b"wear"
CONDEMNED_KEY = b"condemned/"
CONDEMNED_MAX = 64
NOTED_WITHIN_S = 1.0  # so much of the order a crash may forget


class Sidecars:
    """The sidecar rows of all persistent tiers. `epoch_ms` is what the wall clock shows at 0 of the engine's."""

    def __init__(self, residency: Residency, rates: Rates, epoch_ms: int) -> None:
        self._residency = residency
        self._rates = rates
        self.wear = Wear(residency, self._ms)
        self._epoch_ms = epoch_ms
        self._since_ms = epoch_ms
        self._condemned: dict[int, deque[bytes]] = {tier: deque() for tier in residency.orders}  # keys, oldest first
        self._owed: dict[int, Rows] = {tier: {} for tier in residency.orders}
        self._changed_at_s: dict[int, float] = {}  # tier -> since when its order says something new

    def found(self, tier: int, rows: Mapping[bytes, bytes]) -> None:
        """An earlier process left these rows."""
        condemned = [(_condemned_at(row), key) for key, row in rows.items() if key.startswith(CONDEMNED_KEY)]
        self._condemned[tier].extend(key for _, key in sorted(condemned))
        self.wear.found(tier, rows.get(WEAR_KEY, b""))
        if bytes_per_s := _bytes_per_s(rows.get(SPEED_KEY, b"")):
            self._rates.found(tier, 1 / bytes_per_s)

    def opened(self, now_s: float) -> None:
        """The counters begin now."""
        self._since_ms = self._ms(now_s)
        self.wear.opened(now_s)

    # ------------------------------------------------------------ what happens

    def condemn(self, tier: int, transfer: Transfer, outcome: Outcome, now_s: float) -> None:
        """A stored block failed its checksum. The latest ones are kept for whoever asks what was lost."""
        key = CONDEMNED_KEY + transfer.source_place.to_bytes(8, "big")
        row = {
            "key": block_key_of(transfer.key),
            "namespace": self._residency.namespaces.fingerprint_of(namespace_of(transfer.key)),
            "length": transfer.length_bytes,
            "at_ms": self._ms(now_s),
            "detail": outcome.detail,
        }
        keys, owed = self._condemned[tier], self._owed[tier]
        if key in keys:
            keys.remove(key)
        keys.append(key)
        owed[key] = cbor2.dumps(row, canonical=True)
        if len(keys) > CONDEMNED_MAX:
            owed[keys.popleft()] = None

    # ------------------------------------------------------------ rows

    def due(self, tier: int, now_s: float, *, flushing: bool) -> bool:
        """Whether there is so much to write down, or for so long, that it should not wait for a batch of blocks."""
        order = self._residency.orders[tier]
        if not order.changed:
            self._changed_at_s.pop(tier, None)
            return False
        changed_at_s = self._changed_at_s.setdefault(tier, now_s)
        return flushing or now_s >= changed_at_s + NOTED_WITHIN_S or order.unsaved_bytes >= LOG_BYTES_MIN

    def due_at_s(self, tier: int) -> float | None:
        """When the tier's order has waited long enough, if it waits."""
        changed_at_s = self._changed_at_s.get(tier)
        return None if changed_at_s is None else changed_at_s + NOTED_WITHIN_S

    def rows(self, tier: int, now_s: float, writing_bytes: int) -> Rows:
        """What goes with the next batch to this tier, its bytes among those being written; empty for memory."""
        if tier not in self._residency.orders:
            return {}
        self._changed_at_s.pop(tier, None)
        rows = self._residency.orders[tier].piece() | self._owed[tier]
        self._owed[tier] = {}
        rows[COUNTERS_KEY] = self._counters()
        rows[WEAR_KEY] = self.wear.row(tier, now_s, writing_bytes)
        if seconds_per_byte := self._rates.read_from(tier):
            rows[SPEED_KEY] = cbor2.dumps({"read_bytes_per_s": max(1, round(1 / seconds_per_byte))}, canonical=True)
        return rows

    def settled(self, tier: int, rows: Rows, outcome: Outcome) -> None:
        """The batch that carried these rows ended."""
        self._residency.orders[tier].settled(rows, kept=outcome.done, no_room=outcome.status is Status.NO_ROOM)
        if not outcome.done:
            lost = {key: row for key, row in rows.items() if key.startswith(CONDEMNED_KEY)}
            self._owed[tier] = lost | self._owed[tier]

    def _counters(self) -> bytes:
        """Those that are not zero: with every batch, so it has to be short."""
        counters = self._residency.counters
        row = {"since_ms": self._since_ms} | {name: count for name, count in counters.engine().items() if count}
        for tier, level in enumerate(self._residency.levels):
            row |= {f"{level.name}.{name}": count for name, count in counters.of_tier(tier).items() if count}
        return cbor2.dumps(row, canonical=True)

    def _ms(self, now_s: float) -> int:
        return self._epoch_ms + int(now_s * 1000)


def _bytes_per_s(row: bytes) -> int:
    """How fast the tier was read; 0 if the row cannot be read, or says nothing that can be."""
    try:
        speed = plain_cbor.loads(row)["read_bytes_per_s"]
    except (KeyError, TypeError, ValueError):
        return 0
    return speed if type(speed) is int and 0 < speed < 1 << 63 else 0


def _condemned_at(row: bytes) -> int:
    """When; 0 if the row cannot be read."""
    try:
        return int(plain_cbor.loads(row)["at_ms"])
    except (KeyError, TypeError, ValueError):
        return 0
