"""The report of `kvtier inspect` for people: facts, tables, and what is wrong.

Owns no state. What may have to be copied (keys, fingerprints, paths) is never cut by a narrow terminal.
Units: bytes, milliseconds since 1970.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from kvtier.cli.paper import new_table, plain, print_whole

SHOWN_MAX = 20
_AGE_UNITS = ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))
_BAR_CELLS = 20


def show(console: Console, report: dict[str, Any]) -> None:
    """Print everything to the console, which takes names as they are (no markup)."""
    _line(console, f"{report['path']}: {_state(report)}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, text in _facts(report):
        facts.add_row(name, text)
    print_whole(console, facts)
    if report["namespaces"]:
        print_whole(console, _namespaces(report["namespaces"]))
        for row in report["namespaces"]:
            _line(console, f"{row['fingerprint']}: {_fields(row['fields'])}")
    if report["size_classes"]:
        print_whole(console, _size_classes(report["size_classes"]))
    if report["blocks"]:
        print_whole(console, _ages(report))
    _condemned(console, report)
    _findings(console, report)


def size(length_bytes: int) -> str:
    """Three digits and a unit."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if length_bytes >= unit:
            return f"{length_bytes / unit:.1f} {name}"
    return f"{length_bytes} B"


def age(age_ms: int) -> str:
    """An age in its largest unit and the next: ``3 days 4 hours``."""
    left = max(0, age_ms) // 1000
    largest = next((at for at, (unit, _) in enumerate(_AGE_UNITS) if left >= unit), None)
    if largest is None:
        return "less than a second"
    words = []
    for unit, name in _AGE_UNITS[largest : largest + 2]:
        count, left = divmod(left, unit)
        if count:
            words.append(_count(count, name))
    return " ".join(words)


# ---------------------------------------------------------------- facts


def _state(report: dict[str, Any]) -> str:
    if report["live"]:
        return "a store in use"
    return "a store, closed" if report["clean"] else "a store that was not closed cleanly"


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    extents, disk, namespaces = report["extents"], report["disk_bytes"], _count(len(report["namespaces"]), "namespace")
    used = f"{extents['lent']} of {extents['capacity']} extents of {size(report['extent_bytes'])} in use"
    made = f"durability {report['durability']}, created {_when(report['created_ms'])}"
    lines = [
        ("blocks", f"{report['blocks']:,} in {namespaces}, {size(report['payload_bytes'])}"),
        ("capacity", f"{size(report['capacity_bytes'])}; {used}"),
        ("on disk", f"slab {size(disk['slab'])}, index {size(disk['index'])}"),
        ("format", f"{report['format']}, {made}"),
    ]
    lines += [("coded", _coded(row)) for row in report["codecs"] if row["codec"] != "none"]
    if report["oldest_ms"] is not None:
        for name in ("oldest", "newest"):
            stored_ms = report[f"{name}_ms"]
            lines.append((name, f"{age(report['now_ms'] - stored_ms)} ago ({_when(stored_ms)})"))
    if left := _left_behind(report):
        lines.append(("gone", left))
    lines.append(("policy", _policy(report["policy"])))
    lines.append(("counters", _counters(report["counters"])))
    lines.extend(_wear(report["wear"]))
    lines.append(("checked", _verify(report)))
    return lines


def _coded(row: dict[str, Any]) -> str:
    raw_bytes, stored_bytes = row["raw_bytes"], row["payload_bytes"]
    blocks = f"{_count(row['blocks'], 'block')} in {row['codec']}"
    return f"{blocks}: {size(stored_bytes)} for {size(raw_bytes)}, {raw_bytes / stored_bytes:.2f} times"


def _left_behind(report: dict[str, Any]) -> str:
    gone, records = report["namespaces_gone"], report["dropped_records"]
    parts = [f"{_count(gone, 'namespace')} dropped or evicted"] * bool(gone)
    parts += [f"{_count(records, 'record')} of dropped ones not yet overwritten"] * bool(records)
    parts += [f"{_count(report['unknown_records'], 'record')} of a later version"] * bool(report["unknown_records"])
    return ", ".join(parts)


def _policy(policy: dict[str, Any] | None) -> str:
    if policy is None:
        return "no order is kept in the store; after a restart it is that of writing"
    known = "" if policy["ordered_blocks"] is None else f", {policy['ordered_blocks']:,} blocks in known order"
    ghosts = f" and {policy['ghosts']:,} remembered" if policy["ghosts"] else ""
    log = f"log {size(policy['log_bytes'])} in {_count(policy['log_rows'], 'row')}"
    return f"{policy['name']}{known}{ghosts}; snapshot {size(policy['snapshot_bytes'])}, {log}"


def _counters(counters: dict[str, int] | None) -> str:
    if counters is None:
        return "none are kept in the store"
    since = f"since {_when(counters['since_ms'])}: " if "since_ms" in counters else ""
    told = [f"{name} {count:,}" for name, count in counters.items() if count and name != "since_ms"]
    return since + (", ".join(told) or "all zero")


def _wear(wear: dict[str, Any] | None) -> list[tuple[str, str]]:
    if wear is None:
        return []
    given = size(wear["slot_bytes"] + wear["index_bytes"])
    times = "" if wear["amplification"] is None else f", {wear['amplification']:.2f} bytes for each byte of blocks"
    pace = f"{size(wear['written_bytes_per_day'])} a day of late"
    lines = [("written", f"{given} since {_when(wear['since_ms'])}{times}; {pace}")]
    if budget := wear["budget"]:
        left, owed = max(0, budget["left_bytes"]), max(0, -budget["left_bytes"])
        state = f"{size(owed)} more were written" if owed else f"{size(left)} left"
        life = (
            "" if wear["life_years"] is None else f"; at this pace the drive's five years last {wear['life_years']:g}"
        )
        lines.append(("wear", f"budget of {size(budget['bytes_per_day'])} a day, {state}{life}"))
    disk = wear["disk"]
    if disk and disk["written_bytes"] is not None:
        lines.append(("disk", f"{disk['name']} was written {size(disk['written_bytes'])} by all since it was attached"))
    return lines


def _verify(report: dict[str, Any]) -> str:
    verify = report["verify"]
    if verify["mode"] == "none":
        return "nothing was read (--sample 0)"
    which = "every block" if verify["mode"] == "all" else f"a sample of {verify['blocks']:,}"
    parts = [f"{verify['sound']:,} sound", f"{verify['corrupt']:,} corrupt"]
    parts += [f"{verify['moved']:,} moved while they were read"] * bool(verify["moved"])
    parts += [f"{verify['unreadable']:,} unreadable"] * bool(verify["unreadable"])
    speed = f"; {size(int(verify['read_bytes'] / verify['seconds']))}/s" if verify["seconds"] >= 1 else ""
    return f"{which}: {', '.join(parts)}{speed}"


# ---------------------------------------------------------------- tables


def _namespaces(rows: Sequence[dict[str, Any]]) -> Table:
    cells = [
        [row["fingerprint"][:12], plain(row["name"]), f"{row['blocks']:,}", size(row["payload_bytes"])] for row in rows
    ]
    return _table({"namespace": "left", "name": "left", "blocks": "right", "payload": "right"}, cells)


def _size_classes(rows: Sequence[dict[str, Any]]) -> Table:
    cells = [[size(row["stride_bytes"]), f"{row['extents']:,}", f"{row['blocks']:,}"] for row in rows]
    return _table({"size class": "right", "extents": "right", "blocks": "right"}, cells)


def _ages(report: dict[str, Any]) -> Table:
    cells = []
    above_s = 0
    for row in report["ages"]:
        below_s, blocks = row["below_s"], row["blocks"]
        label = f"under {age(below_s * 1000)}" if below_s else f"{age(above_s * 1000)} and more"
        bar = "█" * round(blocks / report["blocks"] * _BAR_CELLS) or "▏"
        if blocks:
            cells.append([label, f"{blocks:,}", size(row["payload_bytes"]), bar])
        above_s = below_s
    return _table({"age": "left", "blocks": "right", "payload": "right", "": "left"}, cells)


def _table(columns: dict[str, Literal["left", "right"]], rows: Sequence[Sequence[str]]) -> Table:
    table = new_table()
    for name, justify in columns.items():
        table.add_column(name, justify=justify, no_wrap=name != "name")
    for row in rows:
        table.add_row(*row)
    return table


# ---------------------------------------------------------------- what is wrong


def _condemned(console: Console, report: dict[str, Any]) -> None:
    names = {row["fingerprint"]: row["name"] for row in report["namespaces"]}
    condemned = report["condemned"]
    for entry in condemned[-SHOWN_MAX:]:
        place = "?" if entry["place"] is None else f"{entry['place']} (byte {entry['place'] * 4096} of the slab)"
        length = "" if entry["length_bytes"] is None else f", {size(entry['length_bytes'])}"
        written = "" if entry["stored_ms"] is None else f", {age(report['now_ms'] - entry['stored_ms'])} old"
        found = "found now" if entry["found_by"] == "inspect" else f"found by the engine {_when(entry['at_ms'])}"
        whose = names.get(entry["namespace"], entry["namespace"][:12])
        _line(console, f"condemned: place {place}{length}, of {whose or '?'}{written}; {found}: {entry['detail']}")
        _line(console, f"           key {entry['key']}")
    _more(console, len(condemned) - SHOWN_MAX + report["condemned_left_out"], "condemned blocks")


def _findings(console: Console, report: dict[str, Any]) -> None:
    for finding in report["findings"][:SHOWN_MAX]:
        _line(console, f"damage: {finding}")
    _more(console, len(report["findings"]) - SHOWN_MAX + report["findings_left_out"], "findings")


def _more(console: Console, count: int, what: str) -> None:
    if count > 0:
        _line(console, f"... and {count:,} more {what}; --json lists up to 1000")


def _line(console: Console, text: str) -> None:
    """A line that the terminal may wrap, but that is one line for whoever copies or greps it."""
    console.print(plain(text), soft_wrap=True)


def _fields(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _when(time_ms: int | None) -> str:
    if time_ms is None:
        return "?"
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"at {time_ms} ms"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + "s" * (number != 1)
