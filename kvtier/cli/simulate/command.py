"""The options of `kvtier simulate`. Owns no state; what the verb does is loaded when it is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Finish = Callable[..., None]


def register(app: typer.Typer, finish: Finish) -> None:
    """Add the verb. finish: runs a verb and ends with its exit code."""

    @app.command("simulate")
    def simulate(
        trace: Annotated[
            Path, typer.Argument(metavar="TRACE", readable=False, help="Requests as .jsonl, .jsonl.xz, .gz or .zst.")
        ],
        policy: Annotated[
            list[str] | None,
            typer.Option(
                "--policy",
                metavar="NAMES",
                help="Policies, separated by commas; belady is the bound.  [default: lru,arc,hit_density,belady]",
            ),
        ] = None,
        capacity: Annotated[
            list[str] | None,
            typer.Option(
                "--capacity",
                metavar="SIZES",
                help="Of the one tier: 5% of the working set, 5006 blocks, 64GiB; repeatable, or separated by commas."
                "  [default: 1%,2%,5%,10%,20%]",
            ),
        ] = None,
        tiers: Annotated[
            Path | None,
            typer.Option(
                "--tiers", metavar="FILE", readable=False, help="Several tiers, as in this kvtier YAML file, instead."
            ),
        ] = None,
        order: Annotated[
            str | None, typer.Option("--order", metavar="ORDER", help="request or flat.  [default: request]")
        ] = None,
        block_tokens: Annotated[
            int | None,
            typer.Option("--block-tokens", metavar="N", help="Of a trace that does not say it.  [default: 512]"),
        ] = None,
        block_bytes: Annotated[
            str | None,
            typer.Option(
                "--block-bytes", metavar="SIZE", help="For capacities such as 64GiB.  [default: 128KiB for each token]"
            ),
        ] = None,
        speed: Annotated[
            list[str] | None,
            typer.Option(
                "--speed", metavar="TIER=READ[,WRITE[,LATENCY]]", help="Of a tier, such as lmdb=3GB,1.5GB,200us."
            ),
        ] = None,
        prefill: Annotated[
            float | None,
            typer.Option("--prefill", metavar="N", help="Tokens that the engine computes in a second, with --tiers."),
        ] = None,
        growth: Annotated[
            bool,
            typer.Option("--growth/--no-growth", help="With --tiers: what more room in each tier would bring."),
        ] = True,
        hints: Annotated[
            str | None,
            typer.Option(
                "--hints",
                metavar="KIND",
                help="What a serving layer could have said, from the trace's own future: ends or returns; none: not"
                " even what was recorded.",
            ),
        ] = None,
        hint_noise: Annotated[
            float | None, typer.Option("--hint-noise", metavar="SIGMA", help="Of the log-normal error of times.")
        ] = None,
        hint_coverage: Annotated[
            float | None, typer.Option("--hint-coverage", metavar="P", help="Share of requests with a hint, 0 to 1.")
        ] = None,
        hint_wrong: Annotated[
            float | None, typer.Option("--hint-wrong", metavar="P", help="Share of hints that say the opposite.")
        ] = None,
        plot: Annotated[
            Path | None, typer.Option("--plot", metavar="FILE", readable=False, help="Draw the result as a PNG.")
        ] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print JSON for programs, one run a line.")] = False,
    ) -> None:
        """Replay recorded requests against eviction policies or whole sets of tiers."""

        def verb() -> int:
            from kvtier.cli import cmd_simulate
            from kvtier.cli.simulate.asked import Options

            options = Options(
                policies=policy,
                capacities=capacity,
                tiers=tiers,
                order=order,
                block_tokens=block_tokens,
                block_bytes=block_bytes,
                speeds=speed,
                prefill_tokens_per_s=prefill,
                growth=growth,
                hints=hints,
                hint_noise=hint_noise,
                hint_coverage=hint_coverage,
                hint_wrong=hint_wrong,
                plot=plot,
            )
            return cmd_simulate.simulate(trace, options, json_output)

        finish(verb, json_output, trace=trace)
