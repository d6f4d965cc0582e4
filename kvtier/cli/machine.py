"""What the machine is, in the words that belong under every measured figure.

Owns nothing. Reads /proc; a kernel that shows less makes a figure less well described, never a failure.
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
MOUNTS = Path("/proc/self/mountinfo")


def machine(path: Path | None = None) -> dict[str, Any]:
    """cpu, cores, kernel, python and the packages that move bytes; with `path` its filesystem as well."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: package_version(package) for package in ("numpy", "lmdb", "torch")},
    }
    if path is not None:
        facts["filesystem"] = filesystem_of(path)
    return facts


def machine_line(facts: dict[str, Any]) -> str:
    """The same on one line."""
    packages = [f"{name} {facts[name]}" for name in ("numpy", "lmdb", "torch") if facts[name]]
    parts = [facts["cpu"], f"{facts['cores']} cores", f"Linux {facts['kernel']}", f"Python {facts['python']}"]
    return ", ".join([*parts, *packages, *([facts["filesystem"]] if "filesystem" in facts else [])])


def cpu_name() -> str:
    for line in CPUINFO.read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def package_version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def filesystem_of(path: Path) -> str:
    """The type of the filesystem that `path` lies on, and what it is mounted from: ``ext4 on /dev/vda``."""
    where = path.resolve()
    found = "unknown"
    longest = -1
    for line in MOUNTS.read_text().splitlines():
        mount, _, source = line.partition(" - ")
        fields, origin = mount.split(), source.split()
        point = fields[4].replace("\\040", " ")
        if where.is_relative_to(point) and len(point) >= longest:  # of two on one point the later one shows
            longest, found = len(point), f"{origin[0]} on {origin[1]}"
    return found
