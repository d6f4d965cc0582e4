"""How people write sizes, durations, fractions and speeds, and the numbers they mean.

Owns no state. Sizes come out as whole bytes, durations as seconds, fractions as 0 .. 1, speeds as a float per second.
Whatever it is, it has a bound far above anything real, so that no sum of it overflows. A refused text raises
`Rejected`, which says what to write instead and leaves it to the caller to say where.
Always: `parse_bytes(format_bytes(n)) == n` and `parse_seconds(format_seconds(s)) == s`; a size that `readable_bytes`
rounds is on the safe side of the right one, to within a hundredth of its unit.
"""

import math
import re
from decimal import Decimal

from kvtier.registry import suggestion

BYTE_UNITS = {
    "B": 1,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "PB": 1000**5,
    "EB": 1000**6,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
    "EiB": 1 << 60,
}
SECOND_UNITS = {
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_READABLE_DIGITS = 4
BYTES_MAX = 1 << 62  # offsets are signed 64-bit numbers in the kernel's interfaces
SECONDS_MAX = 1e9  # 30 years; a thread that waits counts nanoseconds in 63 bits, and ends at 9.2e9 s

RATE_MIN, RATE_MAX = 1e-3, 1e9  # per second; what lies beyond is a slip of the pen

# At most 20 digits: longer numbers are beyond BYTES_MAX, and their conversion would take quadratic time.
_DECIMAL = re.compile(r"\+?\d{1,20}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_QUANTITY = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z%]*)\s*", re.ASCII)


class Rejected(ValueError):
    """A value that cannot be used: what is wrong with it, and what to write instead."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}")
        self.problem = problem
        self.remedy = remedy


def parse_bytes(value: object) -> int:
    """A size such as ``512MiB``, ``1.5 GB`` or a plain number of bytes; parts of a byte are cut off."""
    remedy = "Write a size such as 512MiB, 4GiB or 1.5 GB, or a whole number of bytes"
    number, unit = _quantity(value, "size", remedy)
    known = {name.casefold(): factor for name, factor in BYTE_UNITS.items()}
    if unit.casefold() not in known | {"": 1}:
        raise Rejected(f"{value!r} has the unknown unit {unit!r}", _unit_remedy(unit))
    if not unit and number % 1:
        raise Rejected(f"{value!r} is not a whole number of bytes", f"{remedy}.")
    size_bytes = int(number * (known[unit.casefold()] if unit else 1))
    if size_bytes > BYTES_MAX:
        raise Rejected(f"{value!r} is more than any device holds", f"Use at most {format_bytes(BYTES_MAX)}.")
    return size_bytes


def parse_seconds(value: object) -> float:
    """A duration such as ``500ms``, ``2s`` or ``1m``. A bare number is refused: it does not say of what."""
    remedy = "Write a duration with its unit, such as 500ms, 2s or 1m"
    number, unit = _quantity(value, "duration", remedy)
    if not unit:
        raise Rejected(f"{value!r} does not say which unit of time", f"{remedy}.")
    if unit not in SECOND_UNITS:
        raise Rejected(f"{value!r} has the unknown unit {unit!r}", suggestion(unit, SECOND_UNITS))
    return bounded_seconds(float(number * SECOND_UNITS[unit]), value)


def bounded_seconds(seconds: float, value: object) -> float:
    """The duration that `value` stands for, if it is one that a thread can sleep."""
    if not 0 <= seconds <= SECONDS_MAX:
        raise Rejected(f"{value!r} is not from 0 to {SECONDS_MAX:g} seconds", "Use at most 277777h, 30 years.")
    return seconds


def parse_fraction(value: object) -> float:
    """A number from 0 to 1, or a percentage."""
    remedy = "Write a number from 0 to 1, such as 0.25, or 25%"
    number, unit = _quantity(value, "fraction", remedy)
    if unit not in ("", "%"):
        raise Rejected(f"{value!r} is not a fraction", f"{remedy}.")
    fraction = float(number / 100 if unit else number)
    if fraction > 1:
        raise Rejected(f"{value!r} is more than the whole", f"{remedy}.")
    return fraction


def parse_rate(value: object) -> float:
    """A speed such as 2500, 0.5 or 1e6, in whatever it is per second: from RATE_MIN to RATE_MAX."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value.strip()):
        value = float(value)  # an override is always a text
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not RATE_MIN <= value <= RATE_MAX:
        raise Rejected(f"{value!r} is not a number from {RATE_MIN:g} to {RATE_MAX:g}", "Write one such as 2500 or 0.5.")
    return float(value)


def format_bytes(size_bytes: int) -> str:
    """The size in the unit that takes the smallest whole number: exact, never rounded."""
    exact = [unit for unit, factor in BYTE_UNITS.items() if size_bytes and size_bytes % factor == 0]
    unit = max(exact, key=BYTE_UNITS.__getitem__, default="B")
    return f"{size_bytes // BYTE_UNITS[unit]}{unit}"


def readable_bytes(size_bytes: int, up: bool = False) -> str:
    """The size for a sentence: exact if that is short, else with two decimals.

    Rounded down, as what there is, or `up`, as what is needed; so 'have' stays less than 'need', and a size that a
    remedy names is enough.
    """
    exact = format_bytes(size_bytes)
    if len(exact.rstrip("BKMGTik")) <= _READABLE_DIGITS:
        return exact
    unit = max((unit for unit in _BINARY_UNITS if BYTE_UNITS[unit] <= size_bytes), key=BYTE_UNITS.__getitem__)
    hundredths = (size_bytes * 100 + (BYTE_UNITS[unit] - 1) * up) // BYTE_UNITS[unit]
    return f"{hundredths // 100}.{hundredths % 100:02}{unit}"


def format_seconds(seconds: float) -> str:
    """The duration in whole milliseconds where that is exact, else in seconds."""
    exact = Decimal(repr(seconds))
    milliseconds = exact * 1000
    if exact % 1 and milliseconds % 1 == 0:
        return f"{int(milliseconds)}ms"
    return f"{exact.normalize():f}s"


def _quantity(value: object, kind: str, remedy: str) -> tuple[Decimal, str]:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Rejected(f"{value!r} is not a {kind}", f"{remedy}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise Rejected(f"{value!r} is not a {kind}", f"{remedy}.")
    text = value if isinstance(value, str) else f"{Decimal(repr(value)):f}"
    if text.strip().startswith("-"):
        raise Rejected(f"{value!r} is negative", f"{remedy}.")
    parsed = _QUANTITY.fullmatch(text)
    if parsed is None:
        raise Rejected(f"{value!r} is not a {kind}", f"{remedy}.")
    return Decimal(parsed[1]), parsed[2]


def _unit_remedy(unit: str) -> str:
    binary, decimal = f"{unit.upper()}iB", f"{unit.upper()}B".replace("KB", "kB")
    if binary in BYTE_UNITS:
        return f"Write {binary} (powers of 1024) or {decimal} (powers of 1000)."
    return suggestion(unit, BYTE_UNITS)
