"""The folder shape is a promise: who may import whom, where await may appear, what `import kvtier` costs."""

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

import kvtier

ROOT = pathlib.Path(__file__).parents[1] / "kvtier"

LAYERS: list[set[str]] = [
    {"errors", "clock", "types"},
    {"events", "registry", "metrics", "notices", "processes"},
    {"blocks"},
    {"config"},
    {"allocator", "kernels"},
    {"policies"},
    {"cache"},
    {"tiers"},
    {"engine"},
    {"testing"},
    {"sim"},
    {"integrations"},
    {"cli"},
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
DECIDING = {"blocks", "allocator", "kernels", "policies", "cache"}
DECIDING_ENGINE = {
    "admitting",
    "answers",
    "backpressure",
    "breaker",
    "commits",
    "core",
    "demotion",
    "drops",
    "arguments",
    "capacities",
    "flight",
    "flushes",
    "managed",
    "matches",
    "moves",
    "page_loads",
    "page_stores",
    "governor",
    "hints",
    "expiries",
    "lease_counts",
    "planner",
    "polled",
    "prefetch",
    "prefill",
    "pressure",
    "promotion",
    "rates",
    "reservations",
    "settlement",
    "resizing",
    "scrubbing",
    "rewarming",
    "sleeping",
    "tier_memory",
    "sidecar",
    "traced",
    "victims",
    "wear",
}
WAITING = {"time", "threading", "asyncio", "concurrent", "subprocess", "socket", "queue"}
HEAVY = {
    "aiofiles",
    "cbor2",
    "cuda",
    "cupy",
    "lmdb",
    "numpy",
    "prometheus_client",
    "pydantic",
    "rich",
    "torch",
    "transformers",
    "typer",
    "vllm",
    "yaml",
}
SHAPELESS = {"utils", "util", "helpers", "common", "misc"}
LINES_MAX = 400

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
DECIDING_FILES = [
    path for path in FILES if path.parts[0] in DECIDING or (path.parts[0] == "engine" and path.stem in DECIDING_ENGINE)
]


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def package_of(path: pathlib.Path) -> str:
    return path.parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            if node.module == "kvtier":
                yield from (f"kvtier.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_package_has_a_place(path: pathlib.Path) -> None:
    """A new package outside the table of layers would be free to import anything."""
    assert package_of(path) in RANK or path.as_posix() in ("__init__.py", "__main__.py")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path: pathlib.Path) -> None:
    """A low layer that knows a high one can no longer be read, tested or replaced alone."""
    me = package_of(path)
    for name in imports(tree_of(path)):
        parts = name.split(".")
        if parts[0] != "kvtier" or len(parts) == 1 or me not in RANK:
            continue
        other = parts[1]
        if other != me and other in RANK:
            assert RANK[other] < RANK[me], f"{path}: {me} must not import {other}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_are_absolute(path: pathlib.Path) -> None:
    """A relative import hides from the other tests here which layer it reaches into."""
    found = [n.lineno for n in ast.walk(tree_of(path)) if isinstance(n, ast.ImportFrom) and n.level]
    assert not found


@pytest.mark.parametrize("path", DECIDING_FILES, ids=str)
def test_decisions_do_not_wait(path: pathlib.Path) -> None:
    """Deciding code that waits or reads the clock cannot be replayed, simulated or explored."""
    for node in ast.walk(tree_of(path)):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"{path}:{node.lineno}"
    for name in imports(tree_of(path)):
        assert name.split(".")[0] not in WAITING, f"{path} imports {name}"
        assert name not in ("kvtier.clock",), f"{path}: time is passed in"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_module_introduces_itself(path: pathlib.Path) -> None:
    """A file without a docstring does not say what it owns; only an empty `__init__.py` owns nothing."""
    tree = tree_of(path)
    assert ast.get_docstring(tree) or (path.name == "__init__.py" and not tree.body)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_holds_one_noun(path: pathlib.Path) -> None:
    """A file that grows without end, or that is named for no noun, becomes the place where everything goes."""
    lines = (ROOT / path).read_text(encoding="utf-8").count("\n")
    assert lines <= LINES_MAX, f"{lines} lines: look for the second noun in it"
    assert path.stem not in SHAPELESS
    assert "core" not in path.parts[:-1], "a package named core is where everything goes"


def test_import_is_light() -> None:
    """An engine that imports kvtier would pay for packages that it does not use, or initialise CUDA."""
    code = f"import sys, kvtier; dir(kvtier); print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_command_starts_light() -> None:
    """`kvtier --help` would take seconds if it loaded what only some verbs need."""
    heavy = HEAVY - {"typer", "rich"}
    code = f"import sys, kvtier.cli.main; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", kvtier.__all__)
def test_public_name_resolves(name: str) -> None:
    """A name of the public surface would raise AttributeError or ImportError for its first user."""
    assert getattr(kvtier, name) is not None
    assert name in dir(kvtier)


def test_public_names_agree() -> None:
    """The lazy table and `__all__` would drift apart: a name promised but not found, or found but not promised."""
    assert {*kvtier._HOMES, "__version__"} == set(kvtier.__all__)
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        kvtier.opne  # noqa: B018
