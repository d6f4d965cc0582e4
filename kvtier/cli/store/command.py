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
Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", readable=False, help="The folder of a bundle.")]
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

    @app.command("export")
    def export(
        store: Store,
        bundle: Bundle,
        namespace: Annotated[
            list[str] | None, typer.Option("--namespace", metavar="NAME", help="Only this one. Repeatable.")
        ] = None,
        rate: Rate = None,
        json_output: Json = False,
    ) -> None:
        """Write a store's blocks into a bundle, which can be carried to another machine."""

        def verb() -> int:
            from kvtier.cli import cmd_export

            return cmd_export.export(store, bundle, namespace or [], rate, json_output)

        finish(verb, json_output, path=store, bundle=bundle)

    @app.command("import")
    def import_(
        store: Store,
        bundle: Bundle,
        capacity: Annotated[
            str | None, typer.Option("--capacity", metavar="SIZE", help="What a new store may take of the disk.")
        ] = None,
        min_free: Annotated[
            str | None, typer.Option("--min-free", metavar="SIZE", help="What the disk is to keep free.  [default: 0]")
        ] = None,
        digest: Annotated[
            str | None,
            typer.Option("--digest", metavar="HEX", help="Refuse every bundle but the one with this digest."),
        ] = None,
        json_output: Json = False,
    ) -> None:
        """Bring a bundle's blocks into a store that nobody has open, or into a new one."""

        def verb() -> int:
            from kvtier.cli import cmd_import

            return cmd_import.import_(store, bundle, capacity, min_free, digest, json_output)

        finish(verb, json_output, path=store, bundle=bundle)
