"""The command tells in one line, and by its exit code, that what it prints cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.stores import StoreDriver

MAIN = (
    "import sys; sys.modules['torch'] = None; from kvtier.cli.main import main; main()"  # torch takes seconds to load
)
VERBS = [
    ("--help",),
    ("--version",),
    ("config", "check", "absent.yaml", "--json"),
    ("inspect", "store"),
    ("inspect", "store", "--json"),
    ("bench", "host", "--rounds", "1", "--blocks", "1", "--block-bytes", "4096"),
    ("demo", "--prefix-tokens", "1", "--json"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of one block in it."""
    folder = tmp_path_factory.mktemp("place")
    store = StoreDriver(folder / "store")
    store.write([1])
    store.close()
    return folder


def run(arguments: tuple[str, ...], stdout: int, place: Path, program: str = MAIN) -> tuple[int, str]:
    command = [sys.executable, "-X", "dev", "-c", program, *arguments]  # dev: exits tell what went wrong, too
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=place, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_a_full_disk_is_one_line(arguments: tuple[str, ...], place: Path) -> None:
    """Two tracebacks, and exit code 1: to a script that is a damaged store, or a failed demo."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, told = run(arguments, full, place)
    finally:
        os.close(full)
    assert code == 2
    said = "error: standard output cannot be written: No space left on device; make room, or send it elsewhere"
    assert told.splitlines()[-1] == said
    assert all(line.startswith("error: ") for line in told.splitlines())


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_a_reader_that_goes_away_is_no_finding(arguments: tuple[str, ...], place: Path) -> None:
    """`kvtier ... | head` would report findings, or show a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        code, told = run(arguments, writer, place)
    finally:
        os.close(writer)
    assert code == 141
    assert "Traceback" not in told
    assert "cannot be written" not in told


def test_errors_that_cannot_be_told_do_not_change_the_code(place: Path) -> None:
    """`2>/dev/full` would turn wrong use into damage."""
    program = f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2); {MAIN}"
    assert run(("inspect", "absent"), subprocess.DEVNULL, place, program) == (2, "")


def test_an_interruption_while_loading_is_quiet(place: Path) -> None:
    """Ctrl-C in the first moments would show a traceback of imports."""
    program = f"""
import sys
class Impatient:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Impatient())
{MAIN}"""
    assert run(("--help",), subprocess.DEVNULL, place, program) == (130, "")
