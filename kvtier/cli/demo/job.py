"""What one process of the demo is to do, and what it found out: JSON files in the demo's folder.

Owns no state. Always: every list of findings has the order of the job's prompts. Units: tokens, seconds. `cpu_s`
counts all threads of the process, those of kvtier included.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """role: `fill` (answer cold, then keep) or `restore`.

    newcomers: how many of the last prompts are not kept. sweep: the same questions after prefixes of other lengths,
    of which only the first token is wanted. late: the prompt that is kept but not flushed before the process is
    killed; `late_new_tokens` of it are wanted.
    """

    role: str
    model: str
    config: str
    prompts: list[list[int]]
    newcomers: int
    new_tokens: int
    sweep: list[list[int]]
    late: list[int]
    late_new_tokens: int
    threads: int

    @property
    def steps(self) -> int:
        """How many steps the worker will tell of: the model, each answer, and for `fill` the flush."""
        answers = len(self.prompts) + len(self.sweep) + 1
        return 1 + answers if self.role == "restore" else 1 + 2 * answers - self.newcomers + 1

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Job":
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class Seconds:
    """One measured stretch of work."""

    cpu_s: float
    wall_s: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s)

    @classmethod
    def median(cls, values: Sequence["Seconds"]) -> "Seconds":
        return cls(median(value.cpu_s for value in values), median(value.wall_s for value in values))


@dataclass(frozen=True, slots=True)
class Asked:
    """What generate() gave for one prompt. first: until it gave the first token."""

    tokens: list[int]
    first: Seconds

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Asked":
        return cls(data["tokens"], Seconds(**data["first"]))


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered from restored KV: `load` brought it back, `forward` went on to the first token.

    floor: the same forward on KV that was in RAM all the time. device_bytes: what the process had the kernel read
    from storage devices meanwhile.
    """

    tokens: list[int]
    load: Seconds
    forward: Seconds
    floor: Seconds
    tokens_restored: int
    tokens_by_tier: dict[str, int]
    device_bytes: int
    problem: str | None

    @property
    def restored(self) -> Seconds:
        """Until the first token, loading included."""
        return self.load + self.forward

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Answer":
        return cls(**data | {name: Seconds(**data[name]) for name in ("load", "forward", "floor")})


@dataclass(frozen=True, slots=True)
class Filled:
    """The first process. prompts, sweep, late: stock generate(), without any earlier KV.

    kept: per kept prompt the tokens through kvtier; late_kept: those of the late prompt. written_blocks: how many
    blocks each tier was given before the flush, by name.
    """

    prompts: list[Asked]
    sweep: list[Asked]
    late: Asked
    kept: list[list[int]]
    late_kept: list[int]
    written_blocks: dict[str, int]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Filled":
        data = json.loads(path.read_text())
        lists = {name: [Asked.of(item) for item in data[name]] for name in ("prompts", "sweep")}
        return cls(**data | lists | {"late": Asked.of(data["late"])})


@dataclass(frozen=True, slots=True)
class Restored:
    """The second process: every prompt, the newcomers' included."""

    prompts: list[Answer]
    sweep: list[Answer]
    late: Answer

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Restored":
        data = json.loads(path.read_text())
        lists = {name: [Answer.of(item) for item in data[name]] for name in ("prompts", "sweep")}
        return cls(**lists, late=Answer.of(data["late"]))
