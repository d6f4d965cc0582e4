"""What one process of the demo is to do, and what it found out: JSON files in the demo's folder.

Owns no state. Units: tokens, seconds. `cpu_s` counts all threads of the process, those of kvtier included.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Job:
    """role: `fill` (answer cold, then keep) or `restore`. newcomers: how many of the last prompts are not kept."""

    role: str
    model: str
    config: str
    prompts: list[list[int]]
    newcomers: int
    new_tokens: int
    threads: int

    @property
    def steps(self) -> int:
        """How many steps the worker will tell of: the model, each answer, and for `fill` the flush."""
        count = len(self.prompts)
        return 1 + count if self.role == "restore" else 1 + 3 * count - self.newcomers + 1

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


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered from restored KV. `floor`: the same forward on KV that was in RAM all the time.

    device_bytes: what the process had the kernel read from storage devices while it restored.
    """

    tokens: list[int]
    restored: Seconds
    floor: Seconds
    tokens_restored: int
    tokens_by_tier: dict[str, int]
    device_bytes: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Filled:
    """The first process: per prompt the cold time and stock generate()'s tokens; per kept prompt kvtier's tokens.

    written_blocks: how many blocks each tier was given before the last flush, by name.
    """

    cold: list[Seconds]
    references: list[list[int]]
    tokens: list[list[int]]
    written_blocks: dict[str, int]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Filled":
        data = json.loads(path.read_text())
        return cls(**data | {"cold": [Seconds(**item) for item in data["cold"]]})


@dataclass(frozen=True, slots=True)
class Restored:
    """The second process: every prompt, the newcomers' included."""

    answers: list[Answer]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Restored":
        times = ("restored", "floor")
        return cls(
            [
                Answer(**item | {name: Seconds(**item[name]) for name in times})
                for item in json.loads(path.read_text())["answers"]
            ]
        )
