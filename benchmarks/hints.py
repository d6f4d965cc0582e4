"""What hints bring, over how many requests have one, how many are wrong, and how wrong their times are. Plots it.

python benchmarks/hints.py CONVERSATION.jsonl.xz [AGENTS.jsonl.xz] [--plot docs/images/hints.png] [--processes 2]
python benchmarks/hints.py CONVERSATION.jsonl.xz --false-ends [--tiers kvtier.yaml [--speed lmdb=14GB,7GB ...]]

With --tiers the product's own tiers under their own policies; --speed as `kvtier simulate` has it.

Each figure is the share of the gap between the better of LRU and ARC, without hints, and Belady's bound that is
closed, in one tier; with --false-ends also the prefix tokens that these cost. Hints are made of the trace's own future,
as `kvtier simulate --hints` makes them.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from kvtier.cli.simulate.asked import Options
from kvtier.cli.simulate.speeds import speeds_of
from kvtier.config import load_config
from kvtier.sim.flat import FlatJob
from kvtier.sim.hints import Hints
from kvtier.sim.jobs import run_all
from kvtier.sim.reading import read_trace
from kvtier.sim.report import TieredJob
from kvtier.sim.setup import Setup
from kvtier.sim.trace import Trace

COVERAGES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
WRONGS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
NOISES = (0.0, 1.0, 2.0, 3.0, 4.0)
POLICIES = ("lru", "arc", "hit_density")
Series = dict[str, list[float]]  # by the name of a line: % of the gap, one for each x
Panel = tuple[str, str, Sequence[float], Series]  # title, what x is, x, lines


def main() -> None:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(description="what hints bring")
    parser.add_argument("conversation", type=pathlib.Path)
    parser.add_argument("agents", type=pathlib.Path, nargs="?")
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--false-ends", action="store_true", help="only what it costs to call some ended that go on")
    parser.add_argument("--tiers", type=pathlib.Path, help="with --false-ends: in these tiers instead of in one")
    parser.add_argument("--speed", action="append", help="of a tier, as `kvtier simulate` has it")
    options = parser.parse_args()
    talks = read_trace(options.conversation)
    if options.false_ends and options.tiers:
        show_false_ends_in_tiers(talks, options.tiers, options.speed, options.processes)
        return
    if options.false_ends:
        show_false_ends(talks, options.processes)
        return
    ends = [(f"{name} {share} %", name, share) for share in (2, 10) for name in POLICIES]
    panels: list[Panel] = []
    for title, label, xs, field in (
        ("conversations: ends", "share of the requests that have their hint", COVERAGES, "coverage"),
        ("conversations: ends", "share of the hints that are wrong", WRONGS, "wrong"),
    ):
        hints = [Hints("ends", **{field: x}) for x in xs]
        panels.append(shown((title, label, xs, series(talks, ends, hints, options.processes))))
    hints = [Hints("returns", noise=x) for x in NOISES]
    lines = series(talks, [(f"conversations {n} %", "hit_density", n) for n in (2, 5)], hints, options.processes)
    if options.agents:
        agents = read_trace(options.agents)
        lines |= series(agents, [(f"agents {n} %", "hit_density", n) for n in (2, 5)], hints, options.processes)
    panels.append(shown(("hit_density: returns", "sigma of the error of times (log-normal)", NOISES, lines)))
    if options.plot:
        draw(options.plot, panels)


def shown(panel: Panel) -> Panel:
    """Print it, and pass it on."""
    title, label, xs, lines = panel
    print(f"\n{title}; {label}: {', '.join(map(str, xs))}")
    for name, closed in lines.items():
        print(f"{name:20}" + "".join(f"{value:8.1f}" for value in closed), flush=True)
    return panel


def show_false_ends(trace: Trace, processes: int) -> None:
    """An end is said of a tenth of the turns of sessions that go on, and of all that end."""
    right, false = Hints("ends"), Hints("ends", false_ends=0.1)
    for share in (2, 5, 10):
        blocks = trace.unique_blocks * share // 100
        bounds = [FlatJob(policy, blocks, "request") for policy in ("lru", "arc", "belady")]
        jobs = [FlatJob(policy, blocks, "request", hint) for policy in POLICIES for hint in (right, false)]
        runs = run_all(trace, [*bounds, *jobs], lambda requests: None, processes)
        lru, arc, belady, *hinted = (run.found.prefix_tokens for run in runs)
        without = max(lru, arc)
        for policy, told, mistold in zip(POLICIES, hinted[::2], hinted[1::2], strict=True):
            closed = ", ".join(f"{100 * (tokens - without) / (belady - without):.1f}" for tokens in (told, mistold))
            lost = 100 * (told - mistold) / told
            print(f"{share:3} % {policy:12} gap closed {closed} %; lost {lost:.1f} % of the prefix tokens", flush=True)


def show_false_ends_in_tiers(trace: Trace, file: pathlib.Path, speeds: list[str] | None, processes: int) -> None:
    """The same through the product: what each tier finds without hints, with right ones, and with false ends."""
    config = load_config(file, overrides={"model.weights_epoch": "simulated"})
    asked = speeds_of(Options(speeds=speeds), config)
    kinds = {"no hints": None, "ends": Hints("ends"), "false ends, too": Hints("ends", false_ends=0.1)}
    jobs = [TieredJob(Setup(config, trace.block_tokens, speeds=asked, hints=hints)) for hints in kinds.values()]
    for name, report in zip(kinds, run_all(trace, jobs, lambda requests: None, processes), strict=True):
        tiers = ", ".join(f"{tier.name} {100 * tier.prefix_hit_rate:.2f}" for tier in report.tiers)
        seconds = f"time to first token {report.ttft_p50_s:.2f} s ({report.ttft_p99_s:.2f} s at 99 %)"
        print(f"{name:16} {100 * report.prefix_hit_rate:.2f} % of the prefix tokens ({tiers}); {seconds}", flush=True)


def series(trace: Trace, lines: Sequence[tuple[str, str, int]], hints: Sequence[Hints], processes: int) -> Series:
    """For each line (name, policy, % of the working set) the share of the gap that each of the hints closes."""
    blocks = {share: trace.unique_blocks * share // 100 for _, _, share in lines}
    bounds = [FlatJob(policy, size, "request") for size in blocks.values() for policy in ("lru", "arc", "belady")]
    jobs = [FlatJob(policy, blocks[share], "request", hint) for _, policy, share in lines for hint in hints]
    runs = list(run_all(trace, [*bounds, *jobs], lambda requests: None, processes))
    tokens = {(run.job.policy, run.job.blocks, run.job.hints): run.found.prefix_tokens for run in runs}
    found: Series = {}
    for name, policy, share in lines:
        lru, arc, belady = (tokens[bound, blocks[share], None] for bound in ("lru", "arc", "belady"))
        without = max(lru, arc)
        found[name] = [100 * (tokens[policy, blocks[share], hint] - without) / (belady - without) for hint in hints]
    return found


def draw(path: pathlib.Path, panels: Sequence[Panel]) -> None:
    """One panel each, side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4.2), sharey=True)
    for axes, (title, label, xs, lines) in zip(all_axes, panels, strict=True):
        for number, (name, closed) in enumerate(lines.items()):
            style: dict[str, Any] = {"color": f"C{number % 3}", "linestyle": "-" if number >= len(lines) // 2 else "--"}
            axes.plot(xs, closed, marker="o", markersize=3, label=name, **style)
        axes.set(title=title, xlabel=label, ylim=(-20, 102))
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    all_axes[0].set_ylabel("gap between LRU or ARC and Belady closed, %")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
