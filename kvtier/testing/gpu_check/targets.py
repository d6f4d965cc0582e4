"""The targets of the GPU tier, and how each one fared in a run.

Owns no state. Always: every target is listed, met, missed, or not measured with the reason; none decides the exit code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.testing.gpu_check.record import Record


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should be: at least (`least`) or less than (`below`) a number of `unit`."""

    name: str
    part: str
    text: str
    unit: str
    least: float | None = None
    below: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.below is None or value < self.below)

    @property
    def wanted(self) -> str:
        return f">= {self.least:g} {self.unit}" if self.least is not None else f"< {self.below:g} {self.unit}"


TARGETS = (
    Target("copies_large", "copies", "batches of blocks >= 1 MiB, by the link's measured peak", "x", least=0.95),
    Target("copies_64KiB", "copies", "batches of 64 KiB blocks, by the link's measured peak", "x", least=0.8),
    Target("submit_1024", "copies", "giving a batch of 1024 blocks to the device", "us", below=50),
    Target("decode_slower", "decode", "a decode step beside continuous demotion takes more by", "%", below=3),
    Target("resize_8GiB", "resize", "growing or shrinking by 8 GiB, a reader running", "s", below=1),
)


def verdicts(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Per target: name, text, wanted, measured (or null), unit, met (true, false or null), reason (if null)."""
    return [_verdict(target, records.get(target.part)) for target in TARGETS]


def _verdict(target: Target, record: Record | None) -> dict[str, Any]:
    value = None if record is None else record.aims.get(target.name)
    return {
        "name": target.name,
        "text": target.text,
        "wanted": target.wanted,
        "measured": value,
        "unit": target.unit,
        "met": None if value is None else target.is_met(value),
        "reason": None if value is not None else _reason(target, record),
    }


def _reason(target: Target, record: Record | None) -> str:
    if record is None:
        return f"part {target.part} was not asked for"
    said = record.skipped or next(iter([*record.findings, *record.notes]), "it gave no such figure")
    return f"part {target.part}: {said}"
