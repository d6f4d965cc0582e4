"""Record: what one part found out. Plain data, the same in a process's memory and in JSON.

Owns no state beyond it. Always: a figure was measured in this run; what was not is absent, and `skipped` or a note says
why. A part is ok if it has no finding; a missed target is no finding.
Units:  each figure names its own; GB are 10**9 bytes.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

Value = float | int | str | bool


class Skip(Exception):
    """A part, or the rest of it, cannot be done here; the text says why. Neither good nor bad."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `unit` is empty for counts, texts and answers."""

    name: str
    value: Value
    unit: str = ""


@dataclass(slots=True)
class Record:
    """One part's results. `aims`: measured values by the name of a target (see `targets`)."""

    part: str
    figures: list[Figure] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    aims: dict[str, float] = field(default_factory=dict)
    skipped: str | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.findings

    def measured(self, name: str, value: Value, unit: str = "") -> None:
        """Keep a figure, rounded to what a clock can tell."""
        self.figures.append(Figure(name, float(f"{value:.4g}") if isinstance(value, float) else value, unit))

    def expect(self, sound: bool, finding: str) -> bool:
        """Keep a finding unless all is well; returns `sound`."""
        if not sound:
            self.findings.append(finding)
        return sound

    def as_json(self) -> dict[str, Any]:
        return {"part": self.part, "ok": self.ok, **{k: v for k, v in asdict(self).items() if k != "part"}}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "Record":
        """The way back. Raises TypeError or KeyError for what is no record."""
        fields = {name: value for name, value in tree.items() if name != "ok"}
        fields["figures"] = [Figure(**figure) for figure in fields["figures"]]
        return cls(**fields)
