"""The `kvtier` command: its verbs and options. What a verb does is in `cmd_<verb>`, loaded when it is used.

Always: results go to stdout, errors to stderr; every verb has --json. Exit codes: 0 ok, 1 findings, 2 wrong use
or something only the user can mend, also an output that cannot be written, 130 interrupted, 141 nobody reads the
output any more. A user's mistake never shows a traceback, and with --json is told on stdout as well: `{"error": text}`,
and beside it what it is about (`path`, `file`) if the verb got that far.
"""

INTERRUPTED = 130  # 128 + SIGINT

try:
    import json
    import sys
    from collections.abc import Callable
    from pathlib import Path
    from typing import Annotated

    import typer

    from kvtier import __version__
    from kvtier.cli import streams
    from kvtier.cli.simulate import command as simulate_command
    from kvtier.cli.store import command as store_command
    from kvtier.cli.usage import TellingGroup
    from kvtier.errors import KvtierError
except KeyboardInterrupt:  # loading takes long enough to think better of it
    raise SystemExit(INTERRUPTED) from None

# Plain help and plain tracebacks: both load in a tenth of the time, and a log can hold them.
app = typer.Typer(
    cls=TellingGroup,
    help="Keeps the KV cache of language models in tiers: GPU memory, host RAM and NVMe.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show or check a configuration file.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
bench_app = typer.Typer(
    help="Measure this machine with and without kvtier.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
# readable=False: the verbs try for themselves, and say it in one line and as JSON.
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", readable=False, help="The kvtier YAML file.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override one value, such as tiers[1].capacity=8GiB. Repeatable."),
]


def main() -> None:
    """The console script."""
    try:
        with streams.guarded():
            app(prog_name="kvtier")
    except KeyboardInterrupt:  # while no verb was running
        raise SystemExit(INTERRUPTED) from None


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvtier {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@config_app.command("show")
def config_show(
    file: ConfigFile,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
    assignments: Assignments = None,
    json_output: Json = False,
) -> None:
    """Print every value in force, defaults included."""

    def verb() -> int:
        from kvtier.cli import cmd_config

        return cmd_config.show(file, assignments or [], origin, json_output)

    _finish(verb, json_output, file=file)


@config_app.command("check")
def config_check(file: ConfigFile, assignments: Assignments = None, json_output: Json = False) -> None:
    """Check a file, and print what its tiers would hold."""

    def verb() -> int:
        from kvtier.cli import cmd_config

        return cmd_config.check(file, assignments or [], json_output)

    _finish(verb, json_output, file=file)


@app.command("inspect")
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", readable=False, help="The folder of a store, in use or not, or a kvtier YAML file."
        ),
    ],
    sample: Annotated[
        int | None, typer.Option("--sample", min=0, metavar="N", help="Read and check N blocks.  [default: 64]")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every block.")] = False,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="RATE", help="Read no faster than this, such as 200MiB/s.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Say what a store on disk holds, and whether it is sound."""

    def verb() -> int:
        from kvtier.cli import cmd_inspect

        return cmd_inspect.inspect(path, json_output, sample, verify, rate)

    _finish(verb, json_output, path=path)


@app.command("demo")
def demo(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", readable=False, help="A kvtier YAML file instead of the demo's own."),
    ] = None,
    prefix_tokens: Annotated[
        int,
        typer.Option("--prefix-tokens", metavar="N", help="Length of the longest shared prefix, 16 to 8128."),
    ] = 1024,
    threads: Annotated[int, typer.Option("--threads", min=1, metavar="N", help="Threads of the model.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", readable=False, help="A new or empty folder for store, results and plot; it stays."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Without --out: keep the temporary folder, and name it.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Measure a real model's time to first token: cold, and from what survived kill -9."""

    def verb() -> int:
        from kvtier.cli import cmd_demo

        return cmd_demo.demo(config, prefix_tokens, threads, out, keep, json_output)

    _finish(verb, json_output)


Rounds = Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="How often each contestant runs.")]
BenchPath = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", readable=False, help="A folder on the disk to measure.  [default: this one]"),
]


@bench_app.command("host")
def bench_host(
    block_bytes: Annotated[int, typer.Option("--block-bytes", min=1, metavar="N", help="Bytes of a block.")] = 737_280,
    blocks: Annotated[int, typer.Option("--blocks", min=1, metavar="N", help="Blocks moved at once.")] = 16,
    rounds: Rounds = 41,
    json_output: Json = False,
) -> None:
    """Copies between the gpu tier (on host memory) and the host tier, against plain copies."""

    def verb() -> int:
        from kvtier.cli import cmd_bench

        return cmd_bench.host(block_bytes, blocks, rounds, json_output)

    _finish(verb, json_output)


@bench_app.command("nvme")
def bench_nvme(
    path: Annotated[
        Path | None, typer.Option("--dir", "--path", metavar="DIR", help="On the disk to be measured.  [default: .]")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, metavar="N", help="Of each race.")] = None,
    records: Annotated[
        int | None,
        typer.Option("--records", min=1, metavar="N", help="Blocks of the store whose device writes are counted."),
    ] = None,
    durability: Annotated[str, typer.Option("--durability", metavar="MODE", help="none, batch or strict.")] = "batch",
    in_place: Annotated[
        bool, typer.Option("--in-place", help="In DIR itself, not on a fresh filesystem in it.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Show that it runs; the figures mean nothing.")] = False,
    json_output: Json = False,
) -> None:
    """The store on disk, against raw O_DIRECT I/O, one file per block, and its goals. Takes minutes and 3.5 GB."""

    def verb() -> int:
        from kvtier.cli import cmd_bench

        return cmd_bench.nvme(path, rounds, records, durability, json_output, quick=quick, in_place=in_place)

    _finish(verb, json_output)


@bench_app.command("engine")
def bench_engine(
    path: BenchPath = None,
    blocks: Annotated[int, typer.Option("--blocks", min=1, metavar="N", help="Blocks of a prompt looked up.")] = 1000,
    store_blocks: Annotated[
        int, typer.Option("--store-blocks", min=1, metavar="N", help="Blocks of the store that is opened.")
    ] = 10_000,
    keys: Annotated[
        int, typer.Option("--keys", metavar="N", help="Names whose RAM is measured, 10000 or more.")
    ] = 1_000_000,
    move_blocks: Annotated[
        int, typer.Option("--move-blocks", min=1, metavar="N", help="Blocks flushed and promoted at once.")
    ] = 64,
    rounds: Rounds = 21,
    json_output: Json = False,
) -> None:
    """A whole cache beside the bytes it moves: verbs, opening, flush and promotion, RAM."""

    def verb() -> int:
        from kvtier.cli import cmd_bench

        return cmd_bench.engine(path, blocks, store_blocks, keys, move_blocks, rounds, json_output)

    _finish(verb, json_output)


def _finish(verb: Callable[[], int], json_output: bool, **about: Path) -> None:
    """Run a verb and end with its exit code. about: what it is about, named in the JSON of an error."""
    try:
        code = verb()
    except (KvtierError, OSError) as error:
        code = _refused(str(error), json_output, about)
    except KeyboardInterrupt:
        code = INTERRUPTED
    raise typer.Exit(code)


def _refused(problem: str, json_output: bool, about: dict[str, Path]) -> int:
    """Say what only the user can mend: in words, and to programs as JSON."""
    for line in problem.splitlines():
        print(f"error: {line}", file=sys.stderr)
    if json_output:
        print(json.dumps({**{name: str(path) for name, path in about.items()}, "error": problem}))
    return 2


simulate_command.register(app, _finish)
store_command.register(app, _finish)
