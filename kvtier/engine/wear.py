"""What the disks were written, and what they may still be: the accounts behind every wear budget.

Owns: for each persistent tier what was written in the life of its store, and on each of the latest days. A budget pays
for what the tier says that it has written, index pages included; what is under way counts as spent already. A tier that
keeps no account is taken to write what it is given.
Always:  the account lies in the store, as old as its last batch at most: whoever restarts goes on with the same budget,
         and a crash gives nothing back. A row that cannot be read is as good as none. Where a tier has no budget now,
         the one that it had before pauses: what is written empties it, and makes no debt.
Units:   bytes; seconds of the engine's clock, milliseconds since 1970 in rows, days since 1970.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import cbor2

from kvtier.blocks import plain_cbor
from kvtier.cache.residency import Residency
from kvtier.policies.wear import WearBudget, Written

DAYS_KEPT = 8  # the last seven, and the one that has begun
DAY_MS = 86_400_000
NOTHING = Written()
_COUNT_MAX = 1 << 62


@dataclass(slots=True)
class Account:
    """One store. `before`: what earlier processes wrote; `told`: what this one has, as of the last look; `paused`: the
    budget of an earlier one, if there is none now."""

    since_ms: int = 0
    paused: WearBudget | None = None
    before: Written = NOTHING
    told: Written = NOTHING
    days: dict[int, int] = field(default_factory=dict)  # day -> bytes, the oldest first

    def total(self) -> Written:
        """In the life of the store; what others have written to the disk is not known over restarts."""
        before, told = self.before, self.told
        return Written(
            before.payload_bytes + told.payload_bytes,
            before.slot_bytes + told.slot_bytes,
            before.index_bytes + told.index_bytes,
        )


class Wear:
    """The accounts of all persistent tiers. `ms`: the engine's clock as milliseconds since 1970."""

    def __init__(self, residency: Residency, ms: Callable[[float], int]) -> None:
        self._residency = residency
        self._ms = ms
        self._accounts = {tier: Account() for tier in residency.orders}
        self._found: dict[int, bytes] = {}

    # ------------------------------------------------------------ start

    def found(self, tier: int, row: bytes) -> None:
        """An earlier process left this, or nothing."""
        self._found[tier] = row

    def opened(self, now_s: float) -> None:
        """Go on from there."""
        for tier, account in self._accounts.items():
            row = read_row(self._found.pop(tier, b""))
            account.since_ms = row.get("since_ms", account.since_ms or self._ms(now_s))
            if row:
                account.before = Written(row["payload"], row["slots"], row["index"])
                account.days = row["days"]
            if "saved" in row:
                budget = self._budget(tier)
                if budget is None and row["per_day"] and row["burst"]:
                    budget = account.paused = WearBudget(row["per_day"], row["burst"])
                if budget is not None:
                    budget.resume(row["saved"], (self._ms(now_s) - row["at_ms"]) / 1000, now_s)

    # ------------------------------------------------------------ what happens

    def look(self, now_s: float) -> None:
        """Ask the tiers what they have written since the last look."""
        for tier, account in self._accounts.items():
            told = self._told(tier)
            length_bytes = _device_bytes(told) - _device_bytes(account.told)
            account.told = told
            if not length_bytes:
                continue
            if budget := self._budget(tier):
                budget.spend(length_bytes, now_s)
            elif account.paused:
                account.paused.spend(min(length_bytes, max(0.0, account.paused.saved_bytes(now_s))), now_s)
            _note_day(account.days, self._ms(now_s), length_bytes)

    def left_bytes(self, tier: int, now_s: float, writing_bytes: int) -> float:
        """What may still be written to a tier while so much is under way; negative if that is too much already."""
        budget = self._budget(tier)
        return budget.saved_bytes(now_s) - writing_bytes if budget else inf

    # ------------------------------------------------------------ told

    def row(self, tier: int, now_s: float, writing_bytes: int) -> bytes:
        """The account for the store's sidecar, with what is under way as written."""
        account = self._accounts[tier]
        total = account.total()
        row: dict[str, Any] = {"since_ms": account.since_ms, "at_ms": self._ms(now_s), "days": account.days}
        row |= {"payload": total.payload_bytes, "slots": total.slot_bytes, "index": total.index_bytes}
        budget = self._budget(tier)
        if budget:
            row["saved"] = int(self.left_bytes(tier, now_s, writing_bytes))
        elif budget := account.paused:
            row |= {"saved": int(budget.saved_bytes(now_s)), "paused": True}
        if budget:
            row |= {"per_day": int(budget.bytes_per_day), "burst": int(budget.burst_bytes)}
        return _encoded(row)

    def stats(self, tier: int, now_s: float, writing_bytes: int) -> dict[str, int | float | None]:
        """Of a persistent tier; nothing of memory."""
        if tier not in self._accounts:
            return {}
        told = self._told(tier)
        unpaid_bytes = _device_bytes(told) - _device_bytes(self._accounts[tier].told)
        left_bytes = self.left_bytes(tier, now_s, writing_bytes + unpaid_bytes)
        return {
            "wear_left_bytes": None if left_bytes == inf else int(left_bytes),
            "device_written_bytes": _device_bytes(told),
            "write_amplification": amplification(told),
            "disk_written_bytes": told.disk_bytes,
        }

    def _budget(self, tier: int) -> WearBudget | None:
        gate = self._residency.levels[tier].gate
        return gate.budget if gate else None

    def _told(self, tier: int) -> Written:
        room = self._residency.levels[tier].room
        assert room is not None, "it is persistent"
        if room.written is not None:
            return room.written()
        length_bytes = self._residency.counters.of_tier(tier)["written_bytes"]
        return Written(length_bytes, length_bytes)


def amplification(written: Written) -> float | None:
    """Bytes given to the device for each byte of blocks; None before the first block."""
    return _device_bytes(written) / written.payload_bytes if written.payload_bytes else None


def charged(row: bytes, written: Written, now_ms: int) -> bytes:
    """The row of an account after so much more was written by somebody who is no engine."""
    fields = read_row(row) or {"since_ms": now_ms, "payload": 0, "slots": 0, "index": 0, "days": {}}
    fields["payload"] += written.payload_bytes
    fields["slots"] += written.slot_bytes
    fields["index"] += written.index_bytes
    _note_day(fields["days"], now_ms, _device_bytes(written))
    if fields.get("per_day") and fields["burst"]:
        budget = WearBudget(fields["per_day"], fields["burst"])
        budget.resume(fields["saved"], (now_ms - fields["at_ms"]) / 1000, 0.0)
        fields["saved"] = int(budget.saved_bytes(0.0)) - _device_bytes(written)
    return _encoded(fields | {"at_ms": now_ms})


def _note_day(days: dict[int, int], now_ms: int, length_bytes: int) -> None:
    day = now_ms // DAY_MS
    days[day] = days.get(day, 0) + length_bytes
    while len(days) > DAYS_KEPT:
        del days[next(iter(days))]


def _encoded(fields: dict[str, Any]) -> bytes:
    return cbor2.dumps(fields | {"days": [*map(list, fields["days"].items())]}, canonical=True)


_NAMES = ("since_ms", "at_ms", "payload", "slots", "index")
_BUDGET = ("saved", "per_day", "burst")


def _device_bytes(written: Written) -> int:
    return written.slot_bytes + written.index_bytes


def read_row(row: bytes) -> dict[str, Any]:
    """What a row says: since_ms, at_ms, payload, slots, index, days (a dict), and saved, per_day and burst if there is
    a budget, with paused=True if the latest cache had none. Nothing, if it cannot be believed."""
    try:
        fields = plain_cbor.loads(row)
        days = dict(fields["days"][-DAYS_KEPT:])
        budget = {name: fields[name] for name in _BUDGET if name in fields}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    if not all(map(_is_count, (*map(fields.get, _NAMES), *days, *days.values()))):
        return {}
    if type(budget.get("saved")) is not int or not all(_is_count(budget.get(name)) for name in _BUDGET[1:]):
        budget = {}
    if budget and fields.get("paused") is True:
        budget["paused"] = True
    return {name: fields[name] for name in _NAMES} | {"days": days} | budget


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _COUNT_MAX
