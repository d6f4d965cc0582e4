"""A mutant's trial: the explorer runs over a copy of the package in which the bug is planted.

Owns the copy, which is gone afterwards. Always: a mutant counts as caught only if the explorer itself names the seed
that failed, and the same seed passes without the bug; a package that does not even start is no proof of anything.
Units: seeds, seconds.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.mutant import Mutant

PACKAGE = Path(__file__).parents[2] / "kvtier"
SEEDS = "0:300"
HANGS_S = 600.0  # some bugs let a run go on for ever
FAILED = re.compile(r"^seed (\d+) failed .*?:$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first seed that caught a mutant, if one did, and what the explorer said last."""

    mutant: Mutant
    seed: int | None
    said: str


def trial(mutant: Mutant, seeds: str = SEEDS) -> Verdict:
    """Plant it and explore; then the seed that failed, if one did, over the package as it is."""
    with TemporaryDirectory(prefix="mutant-") as folder:
        package = Path(folder) / PACKAGE.name
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        mutant.plant(package)
        try:
            done = _explore(package, "--seeds", seeds)
        except subprocess.TimeoutExpired:
            return Verdict(mutant, None, f"no end within {HANGS_S:.0f} s")
    found = FAILED.search(done.stdout) if done.returncode == 1 else None
    said = _reason((done.stdout + done.stderr).strip().splitlines())
    if found is None:
        return Verdict(mutant, None, said)
    if _explore(PACKAGE, "--seed", found[1]).returncode:
        return Verdict(mutant, None, f"seed {found[1]} fails without the bug as well")
    return Verdict(mutant, int(found[1]), said)


def _explore(package: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    folder = package.parent
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "kvtier.testing.explore", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, timeout=HANGS_S, capture_output=True, text=True, check=False
    )


def trials(mutants: Sequence[Mutant], seeds: str = SEEDS, jobs: int = 1) -> list[Verdict]:
    """All of them, in their order."""
    with ThreadPoolExecutor(jobs) as pool:  # a process each: the threads only wait for them
        return list(pool.map(lambda mutant: trial(mutant, seeds), mutants))


def _reason(said: Sequence[str]) -> str:
    errors = [line for line in said if re.match(r"[\w.]+(Error|Exception|Iteration)\b", line)]
    return (errors or list(said) or ["nothing"])[-1]
