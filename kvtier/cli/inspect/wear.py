"""How fast a store wears its drive, from the account that the engine keeps in it.

Owns no state. Always: a pace is the mean of the latest days that are known, of an hour at least; a life is how long
what the budget allows for RATED_YEARS lasts at that pace, so there is none without a budget.
Units: bytes, milliseconds since 1970, years.
"""

from pathlib import Path
from typing import Any

from kvtier.engine.wear import DAY_MS, amplification
from kvtier.policies.wear import Written
from kvtier.tiers.lmdb.meter import device_of, disk_written_bytes, file_system_bytes

RATED_YEARS = 5  # for which data sheets promise their drive writes per day
PACE_DAYS = 7
_HOUR_MS = 3_600_000


def wear_of(account: dict[str, Any] | None, folder: Path, now_ms: int) -> dict[str, Any] | None:
    """The account as plain data, with what follows from it; None if the engine has left none.

    account: what `kvtier.engine.wear.read_row` made of the row.
    """
    if not account:
        return None
    written = Written(account["payload"], account["slots"], account["index"])
    pace = pace_bytes_per_day(account, now_ms)
    drive_bytes = file_system_bytes(folder)
    device = device_of(folder)
    return {
        "since_ms": account["since_ms"],
        "at_ms": account["at_ms"],
        "payload_bytes": written.payload_bytes,
        "slot_bytes": written.slot_bytes,
        "index_bytes": written.index_bytes,
        "amplification": _rounded(amplification(written)),
        "days": [{"day_ms": day * DAY_MS, "written_bytes": length} for day, length in account["days"].items()],
        "written_bytes_per_day": int(pace),
        "file_system_writes_per_day": round(pace / drive_bytes, 4) if drive_bytes else None,
        "budget": _budget(account, now_ms),
        "life_years": _life_years(account, pace),
        "disk": None
        if device is None
        else {"name": device.resolve().name, "written_bytes": disk_written_bytes(device)},
    }


def pace_bytes_per_day(account: dict[str, Any], now_ms: int) -> float:
    """Bytes given to the device per day, of late."""
    first_ms: int = max(account["since_ms"], (now_ms // DAY_MS - PACE_DAYS) * DAY_MS)
    lately: int = sum(length for day, length in account["days"].items() if day * DAY_MS + DAY_MS > first_ms)
    return lately / max(_HOUR_MS, now_ms - first_ms) * DAY_MS


def _budget(account: dict[str, Any], now_ms: int) -> dict[str, int] | None:
    if "saved" not in account or "paused" in account:
        return None
    saved = account["saved"] + max(0, now_ms - account["at_ms"]) * account["per_day"] // DAY_MS
    left_bytes = min(account["burst"], saved)
    return {"bytes_per_day": account["per_day"], "burst_bytes": account["burst"], "left_bytes": left_bytes}


def _life_years(account: dict[str, Any], pace: float) -> float | None:
    has_budget = "saved" in account and "paused" not in account
    return round(RATED_YEARS * account["per_day"] / pace, 2) if has_budget and pace else None


def _rounded(factor: float | None) -> float | None:
    return None if factor is None else round(factor, 3)
