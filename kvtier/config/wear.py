"""`wear`: how much a disk may be written per day, as a YAML says it.

    wear: 500GiB/day
    wear: {per_day: 500GiB, burst: 1h}
    wear: {dwpd: 1.0, drive: 2TB, burst: 24h}

Owns no state. Always: either bytes per day are given, or full writes of a drive per day (`dwpd`, what its data sheet
promises); not both. Units: bytes, seconds, drive writes per day.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.config.units import Rejected, format_bytes, format_seconds, parse_bytes, parse_rate, parse_seconds
from kvtier.registry import suggestion

DAY_S = 86_400.0
KEYS = ("dwpd", "drive", "per_day", "burst")
_REMEDY = "Write 500GiB/day, or {dwpd: 1.0, drive: 2TB}"


@dataclass(frozen=True, slots=True)
class WearConfig:
    """bytes_per_day or dwpd, one of them. drive_bytes: the drive of `dwpd`; None: as large as the file system.

    burst_s: what was not written is saved up for this long.
    """

    bytes_per_day: int | None = None
    dwpd: float | None = None
    drive_bytes: int | None = None
    burst_s: float = DAY_S

    def budget_bytes_per_day(self, file_system_bytes: int) -> float:
        """What may be written in a day, on a file system of this size."""
        if self.bytes_per_day is not None:
            return self.bytes_per_day
        assert self.dwpd is not None  # one of them is there
        return self.dwpd * (self.drive_bytes or file_system_bytes)

    def spelled(self) -> object:
        """As the YAML says it."""
        if self.bytes_per_day is not None and self.burst_s == DAY_S:
            return f"{format_bytes(self.bytes_per_day)}/day"
        found = {
            "dwpd": self.dwpd,
            "drive": None if self.drive_bytes is None else format_bytes(self.drive_bytes),
            "per_day": None if self.bytes_per_day is None else format_bytes(self.bytes_per_day),
            "burst": format_seconds(self.burst_s),
        }
        return {key: value for key, value in found.items() if value is not None}


def parse_wear(value: object) -> WearConfig | None:
    """Raises Rejected for what says no budget."""
    if value is None or isinstance(value, WearConfig):
        return value
    if isinstance(value, Mapping):
        return _of_mapping(value)
    if not isinstance(value, str):
        raise Rejected(f"{value!r} is no budget of writes", f"{_REMEDY}.")
    size, slash, unit = value.partition("/")
    if not slash or unit.strip() != "day":
        raise Rejected(f"{value!r} does not say per which time", f"{_REMEDY}.")
    return WearConfig(bytes_per_day=_some_bytes("wear", size))


def _of_mapping(value: Mapping[object, object]) -> WearConfig:
    for key in value:
        if key not in KEYS:
            raise Rejected(f"unknown key {key!r}", suggestion(str(key), KEYS))
    given = {key: value[key] for key in KEYS if value.get(key) is not None}
    if ("dwpd" in given) == ("per_day" in given):
        raise Rejected(f"{dict(value)!r} has to have either dwpd or per_day", f"{_REMEDY}.")
    if "drive" in given and "dwpd" not in given:
        raise Rejected("drive is the size that dwpd is of, and there is no dwpd", "Leave it out, or write dwpd.")
    return WearConfig(
        bytes_per_day=_some_bytes("per_day", given["per_day"]) if "per_day" in given else None,
        dwpd=parse_rate(given["dwpd"]) if "dwpd" in given else None,
        drive_bytes=_some_bytes("drive", given["drive"]) if "drive" in given else None,
        burst_s=_burst(given["burst"]) if "burst" in given else DAY_S,
    )


def _some_bytes(key: str, value: object) -> int:
    size_bytes = parse_bytes(value)
    if not size_bytes:
        raise Rejected(f"{key} of {value!r} lets nothing be written", "Write a size such as 500GiB.")
    return size_bytes


def _burst(value: object) -> float:
    burst_s = parse_seconds(value)
    if not burst_s:
        raise Rejected(f"a burst of {value!r} saves nothing up", "Write a duration such as 1h.")
    return burst_s
