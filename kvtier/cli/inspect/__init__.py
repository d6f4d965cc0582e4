"""The parts of `kvtier inspect`; the verb itself is `kvtier.cli.cmd_inspect`, its output docs/inspect.md."""
