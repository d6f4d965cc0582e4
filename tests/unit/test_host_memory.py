"""How much memory there is to take."""

from pathlib import Path

import pytest

from kvtier.allocator import host_memory
from kvtier.errors import DriverError

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 GiB available, and this process in the group a/b without limits."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {32 << 20} kB\nMemAvailable: {16 << 20} kB\nHugePages_Total: 0\n")
    (tmp_path / "own").write_text("1:cpu:/x\n0::/a/b\n")
    (tmp_path / "groups/a/b").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    return tmp_path


def limit(group: Path, limit: str, used: int, cold: int) -> None:
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cold}\n")


def test_the_machine_sets_the_limit(machine: Path) -> None:
    """A tier of reasonable size is refused."""
    assert host_memory.available_bytes() == 16 * GIB
    limit(machine / "groups/a/b", "max", 0, 0)
    assert host_memory.available_bytes() == 16 * GIB


def test_a_control_group_sets_the_limit(machine: Path) -> None:
    """In a container the machine's memory is promised, and the kernel kills the process."""
    limit(machine / "groups/a", str(8 * GIB), 5 * GIB, GIB)
    assert host_memory.available_bytes() == 4 * GIB
    limit(machine / "groups/a/b", str(2 * GIB), GIB, 0)
    assert host_memory.available_bytes() == GIB
    limit(machine / "groups/a/b", str(2 * GIB), 3 * GIB, 0)
    assert host_memory.available_bytes() == 0


def test_a_machine_without_control_groups_works(machine: Path) -> None:
    """An old kernel gets a traceback."""
    (machine / "own").unlink()
    assert host_memory.available_bytes() == 16 * GIB


def test_this_machine_has_some() -> None:
    """The files of the real kernel are read wrongly."""
    assert 1 << 20 < host_memory.available_bytes() < 1 << 50


def test_failing_calls_name_call_and_reason() -> None:
    """A refused call passes for done, or its errno is lost."""
    for call in (
        lambda: host_memory.unmap_memory(1, 4096),
        lambda: host_memory.protect(1, 4096, host_memory.PROT_NONE),
        lambda: host_memory.populate(1 << 40, 4096),
        lambda: host_memory.map_memory(1, 4096, 0, host_memory.MAP_FIXED, -1, 0),
        lambda: host_memory.lock(1 << 40, 4096),
        lambda: host_memory.punch_hole(-1, 0, 4096),
        lambda: host_memory.allocate(-1, 0, 4096),
    ):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code in (9, 12, 14, 22)
