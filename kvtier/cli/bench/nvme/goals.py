"""The figures of `kvtier bench nvme`: their names in JSON, and how large or small each should be.

Owns no state. Always: every figure of a run has a goal here, and every goal a figure. Targets are printed, never
enforced. Units: ratios, unless a goal names its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """`name`: the key in JSON. `target`: not below it, or, with `at_most`, not above. `instead`: the goal whose being
    met is enough, for whoever reaches a limit of the machine first."""

    name: str
    what: str
    target: float
    at_most: bool = False
    unit: str = ""
    instead: str = ""

    @property
    def bound(self) -> str:
        """``>= 0.9``, with the unit if there is one."""
        return f"{'<=' if self.at_most else '>='} {self.target:g}{' ' if self.unit else ''}{self.unit}"

    def met(self, figures: Mapping[str, float]) -> bool:
        """By these figures."""
        enough = (self, BY_NAME[self.instead]) if self.instead else (self,)
        return any(goal._reached(figures[goal.name]) for goal in enough)

    def _reached(self, figure: float) -> bool:
        return figure <= self.target if self.at_most else figure >= self.target


GOALS = (
    Goal("put_2m_vs_raw", "put 16 x 2 MiB, by one thread's O_DIRECT pwritev and fdatasync", 1.0),
    Goal("put_64k_vs_raw", "put 128 x 64 KiB, by the same", 0.6),
    Goal("put_2m_vs_files", "put 16 x 2 MiB, by one file per block with fsync", 3.0),
    Goal("put_360k_vs_files", "put 32 x 360 KiB, by the same", 1.4),
    Goal("put_64k_vs_files", "put 128 x 64 KiB, by the same", 3.0),
    Goal("get_2m_vs_raw", "cold get 16 x 2 MiB, by O_DIRECT preadv at the same depth", 0.9),
    Goal("verify_ratio", "the same, by a store that does not verify", 0.9),
    Goal("four_in_flight_vs_one", "four such gets at once, by one after the other", 1.4),
    Goal("sparse_read_amplification", "bytes read for each byte wanted, 64 KiB blocks from all over", 1.05, True),
    Goal("sparse_vs_inline", "such a get, by a store with payload: inline", 5.0),
    Goal("churn_cpu_ratio", "CPU of a put, after 5x the capacity by before", 1.1, True),
    Goal("churn_throughput_ratio", "speed of a put, after 5x the capacity by before", 0.85),
    Goal("disk_vs_cap", "the store's folder at its largest, by its capacity", 1.05, True),
    Goal("cpu_vs_entries", "CPU of a put, in a store of many blocks by one of few", 1.1, True),
    Goal("write_amplification", "bytes the disk wrote for each byte put, in a store of many blocks", 1.02, True),
    Goal("lookup_ms_per_1000", "match of 1000 keys, hit or miss, the slower", 1.0, True, "ms"),
    Goal("loop_lag_ms", "p99 of an event loop's lag during puts, above idle", 5.0, True, "ms"),
    Goal(
        "host_warm_get", "warm get of 360 KiB blocks from the host tier", 4.0, False, "GB/s", "host_warm_get_vs_memcpy"
    ),
    Goal("host_warm_get_vs_memcpy", "the same, by memcpy", 0.8, False, "", "host_warm_get"),
)
BY_NAME = {goal.name: goal for goal in GOALS}


def judged(figures: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """By name: the target, on which side of it a figure should be, and whether it is."""
    return {
        goal.name: {"target": goal.target, "at_most": goal.at_most, "met": goal.met(figures)}
        for goal in GOALS
        if goal.name in figures
    }
