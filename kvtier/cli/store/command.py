"""The options of the verbs that mend and move stores. Owns no state; what a verb does is loaded when it is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Finish = Callable[..., None]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Store = Annotated[
    Path,
    typer.Argument(metavar="STORE", readable=False, help="The folder of a store, or a kvtier YAML file."),
]
Rate = Annotated[str | None, typer.Option("--rate", metavar="RATE", help="Read no faster than this, such as 200MiB/s.")]
Namespaces = Annotated[
    list[str],
    typer.Option(
        "--namespace", metavar="NAME", help="Its fingerprint, how that begins, or its model's name. Repeatable."
    ),
]


def register(app: typer.Typer, finish: Finish) -> None:
    """Add the verbs. finish: runs a verb and ends with its exit code."""

    @app.command("drop")
    def drop(
        store: Store,
        namespace: Namespaces,
        yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
        json_output: Json = False,
    ) -> None:
        """Make a store that nobody has open forget a namespace."""

        def verb() -> int:
            from kvtier.cli import cmd_drop

            return cmd_drop.drop(store, namespace, yes, json_output)

        finish(verb, json_output, path=store)

    @app.command("fsck")
    def fsck(
        store: Store,
        repair: Annotated[bool, typer.Option("--repair", help="Remove what cannot be believed.")] = False,
        rate: Rate = None,
        json_output: Json = False,
    ) -> None:
        """Compare a store's index with itself, its blocks and its disk."""

        def verb() -> int:
            from kvtier.cli import cmd_fsck

            return cmd_fsck.fsck(store, repair, rate, json_output)

        finish(verb, json_output, path=store)

    @app.command("gc")
    def gc(store: Store, json_output: Json = False) -> None:
        """Give back what a store that nobody has open keeps and nobody needs."""

        def verb() -> int:
            from kvtier.cli import cmd_gc

            return cmd_gc.gc(store, json_output)

        finish(verb, json_output, path=store)
