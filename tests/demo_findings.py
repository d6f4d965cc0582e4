"""Findings of a demo that went well, with figures that are easy to reckon: three questions, two lengths."""

from collections.abc import Sequence

from kvtier.cli.demo import summary
from kvtier.cli.demo.job import Answer, Asked, Filled, Restored, Seconds
from kvtier.cli.demo.text import Asks, Prompt

PROMPTS = (Prompt("Who?", (1, 2, 3, 4), 3), Prompt("When?", (1, 2, 3, 5), 3), Prompt("Where?", (1, 2, 3, 6), 3))
SHORTER = (Prompt("Who?", (1, 2, 4), 2), Prompt("When?", (1, 2, 5), 2))
ASKS = Asks(PROMPTS, (SHORTER[0], PROMPTS[0], SHORTER[1], PROMPTS[1]), Prompt("late", (7, 8, 9), 0))
REFERENCES = [[10, 11], [12, 13], [14, 15]]
LATE = [16, 17]


def asked(tokens: Sequence[int], cpu_s: float, wall_s: float) -> Asked:
    return Asked(list(tokens), Seconds(cpu_s, wall_s))


def answer(tokens: Sequence[int], cpu_s: float, lmdb: int = 3, problem: str | None = None) -> Answer:
    """Loading takes a quarter of the time, and the floor half of it; wall twice as long as CPU."""
    load, forward, floor = (Seconds(part * cpu_s, 2 * part * cpu_s) for part in (0.25, 0.75, 0.5))
    return Answer(list(tokens), load, forward, floor, lmdb, {"gpu": 0, "lmdb": lmdb}, 4096 * lmdb, problem)


FILLED = Filled(
    prompts=[asked(REFERENCES[0], 10.0, 20.0), asked(REFERENCES[1], 30.0, 40.0), asked(REFERENCES[2], 20.0, 31.0)],
    sweep=[asked([18], 5.0, 6.0), asked([19], 7.0, 8.0)],
    late=asked(LATE, 1.0, 1.0),
    kept=REFERENCES[:2],
    late_kept=LATE,
    written_blocks={"gpu": 0, "lmdb": 7},
)
RESTORED = Restored(
    prompts=[answer(REFERENCES[0], 1.0), answer(REFERENCES[1], 4.0), answer(REFERENCES[2], 2.0)],
    sweep=[answer([18], 0.5, 2), answer(REFERENCES[0][:1], 2.0), answer([19], 1.5, 2), answer(REFERENCES[1][:1], 4.0)],
    late=answer(LATE, 1.0, lmdb=0),
)


class Speaker:
    """Says tokens as numbers, as a Book would in words."""

    def said(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def summary_of(filled: Filled = FILLED, restored: Restored = RESTORED) -> summary.Summary:
    return summary.summary_of(ASKS, Speaker(), filled, restored, 0.012, 1, "lmdb")  # type: ignore[arg-type]
