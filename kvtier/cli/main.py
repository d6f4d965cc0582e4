"""The `kvtier` command: its verbs and options. What a verb does is in `cmd_<verb>`, loaded when it is used.

Always: results go to stdout, errors to stderr; every verb has --json. Exit codes: 0 ok, 1 findings, 2 wrong use
or something only the user can mend, 130 interrupted. A user's mistake never shows a traceback.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvtier import __version__
from kvtier.errors import KvtierError

INTERRUPTED = 130  # 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE

# Plain help and plain tracebacks: both load in a tenth of the time, and a log can hold them.
app = typer.Typer(
    help="Keeps the KV cache of language models in tiers: GPU memory, host RAM and NVMe.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show or check a configuration file.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="The kvtier YAML file.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override one value, such as tiers[1].capacity=8GiB. Repeatable."),
]


def main() -> None:
    """The console script."""
    app(prog_name="kvtier")


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

    _finish(verb, json_output)


@config_app.command("check")
def config_check(file: ConfigFile, assignments: Assignments = None, json_output: Json = False) -> None:
    """Check a file, and print what its tiers would hold."""

    def verb() -> int:
        from kvtier.cli import cmd_config

        return cmd_config.check(file, assignments or [], json_output)

    _finish(verb, json_output)


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a store, in use or not.")],
    sample: Annotated[int, typer.Option("--sample", min=0, metavar="N", help="Read and verify N blocks as well.")] = 64,
    json_output: Json = False,
) -> None:
    """Say what a store on disk holds."""

    def verb() -> int:
        from kvtier.cli import cmd_inspect

        return cmd_inspect.inspect(path, json_output, sample)

    _finish(verb, json_output)


@app.command("demo")
def demo(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A kvtier YAML file instead of the demo's own.")
    ] = None,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", min=1, metavar="N", help="Length of the shared prefix.")
    ] = 1024,
    threads: Annotated[int, typer.Option("--threads", min=1, metavar="N", help="Threads of the model.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="A new or empty folder for store and results; it stays.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Without --out: keep the temporary folder, and name it.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Measure a real model's time to first token, with and without a restored prefix."""

    def verb() -> int:
        from kvtier.cli import cmd_demo

        return cmd_demo.demo(config, prefix_tokens, threads, out, keep, json_output)

    _finish(verb, json_output)


def _finish(verb: Callable[[], int], json_output: bool) -> None:
    """Run a verb and end with its exit code."""
    try:
        code = verb()
        sys.stdout.flush()
    except KvtierError as error:
        code = _refused(str(error), json_output)
    except BrokenPipeError:
        # The reader went away (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    except OSError as error:
        code = _refused(str(error), json_output)
    except KeyboardInterrupt:
        code = INTERRUPTED
    raise typer.Exit(code)


def _refused(problem: str, json_output: bool) -> int:
    """Say what only the user can mend: in words, and to programs as JSON."""
    for line in problem.splitlines():
        print(f"error: {line}", file=sys.stderr)
    if json_output:
        print(json.dumps({"error": problem}))
    return 2
