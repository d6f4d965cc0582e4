"""Mutants drawn by number, so that nobody chooses only the bugs that he knows to be caught.

Owns no state. Always: the same number and the same sources give the same mutant. Only files that the explorer runs are
drawn from, and neither counters (`tests/unit/test_counters_trace.py` is for them) nor what only reports.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from tests.mutants.mutant import Mutant

FILES = (
    *(f"cache/{name}.py" for name in ("adoption", "directory", "order_log", "order_replay", "prefix", "residency")),
    "cache/staying.py",
    *(f"engine/{name}.py" for name in ("core", "demotion", "drops", "flight", "flushes", "planner", "polled")),
    *(
        f"engine/{name}.py"
        for name in ("prefetch", "pressure", "promotion", "reservations", "resizing", "sidecar", "victims")
    ),
)
NEIGHBOURS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OTHER_TIER = {"source": "target", "target": "source"}
ASKED = ("check", "stats", "__repr__")


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a file at which one kind of bug fits. `start` and `stop` are offsets into its text."""

    kind: str
    file: str
    start: int
    stop: int
    new: str


def drawn(number: int, sources: Mapping[str, str]) -> Mutant:
    """Mutant of a number over these sources (by file): first its kind, then one of the places where it fits."""
    by_kind: dict[str, list[Site]] = {}
    for file in FILES:
        for site in _sites(file, sources[file]):
            by_kind.setdefault(site.kind, []).append(site)
    rng = Random(number)
    site = rng.choice(by_kind[rng.choice(sorted(by_kind))])
    return _mutant(number, site, sources[site.file])


def _mutant(number: int, site: Site, source: str) -> Mutant:
    """Whole lines, as many as it takes to be found once."""
    start, stop = source.rfind("\n", 0, site.start) + 1, source.index("\n", site.stop)
    while source.count(source[start:stop]) > 1:
        start = source.rfind("\n", 0, start - 1) + 1
    old = source[start:stop]
    new = source[start : site.start] + site.new + source[site.stop : stop]
    return Mutant(f"drawn {number}", site.file, old, new, site.kind)


def _sites(file: str, source: str) -> Iterator[Site]:
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    assert source.isascii()  # ast counts columns in bytes
    for node in _nodes(ast.parse(source), frozenset()):
        for kind, old, new in _changes(node):
            assert old.end_lineno is not None
            assert old.end_col_offset is not None
            start = lines[old.lineno - 1] + old.col_offset
            yield Site(kind, file, start, lines[old.end_lineno - 1] + old.end_col_offset, new)


def _nodes(node: ast.AST, names: frozenset[str]) -> Iterator[ast.AST]:
    """Everything below a node that matters to what is cached. `names`: arguments of the function around it."""
    if isinstance(node, ast.FunctionDef):
        if node.name in ASKED:
            return
        node.decorator_list, names = [], frozenset(arg.arg for arg in node.args.args)
    if isinstance(node, ast.ClassDef):
        node.decorator_list = []
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    if isinstance(node, ast.Expr) and "counters.add" in ast.unparse(node):
        return
    if not (isinstance(node, ast.Name) and node.id in OTHER_TIER and OTHER_TIER[node.id] not in names):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _nodes(child, names)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(kind, what is replaced, by what)."""
    if isinstance(node, ast.Expr | ast.AugAssign) and not isinstance(node.value, ast.Constant | ast.Yield):
        yield "a statement is forgotten", node, "pass"
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "a condition is the wrong way round", node.test, f"not ({ast.unparse(node.test)})"
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and for or", node, ast.unparse(ast.BoolOp(other, node.values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for kind, table in (("off by one", NEIGHBOURS), ("a comparison is the wrong way round", OPPOSITES)):
            if (op := table.get(type(node.ops[0]))) is not None:
                yield kind, node, ast.unparse(ast.Compare(node.left, [op()], node.comparators))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "a flag is flipped", node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "off by one", node, str(node.value + 1)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in OTHER_TIER:
        yield "the wrong tier", node, OTHER_TIER[node.id]
    if isinstance(node, ast.Call) and len(node.args) == 2 and all(isinstance(arg, ast.Name) for arg in node.args):
        swapped = ast.Call(node.func, node.args[::-1], node.keywords)
        yield "arguments are swapped", node, ast.unparse(swapped)
