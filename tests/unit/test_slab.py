"""HostSlab: all memory at start, or an error that says how to get it."""

import errno
import logging
import mmap
import os
import resource

import pytest

from kvtier.allocator import host_memory
from kvtier.allocator.slab import HUGE_PAGE_BYTES, HostSlab
from kvtier.errors import ClosedError, ConfigError, DriverError
from kvtier.testing.fork import in_child, refusals

PAGE = 4096


def small_slab(**options: str) -> HostSlab:
    return HostSlab(name="host", slots=3, stride_bytes=2 * PAGE, **{"hugepages": "off", **options})


def test_slots_tile_the_memory() -> None:
    """Slots overlap, are not aligned for O_DIRECT, or are not clean at first."""
    host = small_slab()
    assert host.array.shape == (3, 2 * PAGE)
    assert host.array.ctypes.data % PAGE == 0
    assert not host.array.any()
    for index in range(3):
        host.slot(index)[:] = bytes([index + 1]) * 2 * PAGE
    assert [int(row.min()) for row in host.array] == [int(row.max()) for row in host.array] == [1, 2, 3]
    for index in (-1, 3):
        with pytest.raises(IndexError):
            host.slot(index)
    host.close()


def test_every_page_is_there_at_start() -> None:
    """The first block that comes pays for page faults."""
    host = small_slab()
    assert os.fstat(host.fd).st_blocks * 512 == 6 * PAGE
    host.close()


def test_another_process_sees_the_same_bytes() -> None:
    """The descriptor that is passed on shows other memory."""
    host = small_slab()
    host.slot(1)[0] = 42
    fd = os.dup(host.fd)
    host.close()
    with mmap.mmap(fd, 6 * PAGE) as other:
        assert other[2 * PAGE] == 42
    os.close(fd)


def test_views_outlive_the_slab() -> None:
    """Closing kills whoever still looks at a slot."""
    host = small_slab()
    view, array = host.slot(2), host.array
    view[:] = b"v" * 2 * PAGE
    host.close()
    host.close()
    assert bytes(view) == b"v" * 2 * PAGE
    assert array[2, 0] == ord("v")
    for call in (lambda: host.slot(0), lambda: host.array, lambda: host.fd):
        with pytest.raises(ClosedError):
            call()


def test_a_forked_child_is_refused() -> None:
    """A child writes into its parent's blocks."""
    host = small_slab()

    def child() -> int:
        refused = refusals([lambda: host.slot(0), lambda: host.array, lambda: host.fd])
        host.close()
        return refused

    assert in_child(child) == 3
    assert len(host.slot(0)) == 2 * PAGE
    host.close()


def no_huge_pages(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOMEM) -> None:
    """A machine on which none are reserved, whatever this one has."""
    create = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        if flags & os.MFD_HUGETLB:
            raise OSError(code, os.strerror(code))
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", memfd_create)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_auto_does_without_huge_pages_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """The host tier does not start on an ordinary machine, or is slower and nobody knows why, or says so each time."""
    no_huge_pages(monkeypatch, code)
    with caplog.at_level(logging.WARNING):
        for slots in (3, 4):
            host = HostSlab(name=f"host {code}", slots=slots, stride_bytes=2 * PAGE, hugepages="auto")
            assert [note for note in host.notes if note.startswith("hugepages: 1 huge pages")]
            host.close()
    [record] = caplog.records
    assert os.strerror(code) in record.getMessage()
    assert "ordinary pages serve instead" in record.getMessage()


def test_auto_heeds_a_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages that are reserved and may not be used by this process would refuse the tier, or kill the process."""
    allocate = host_memory.allocate
    create = os.memfd_create
    huge: set[int] = set()

    def memfd_create(name: str, flags: int) -> int:
        fd = create(name, flags & ~os.MFD_HUGETLB)
        if flags & os.MFD_HUGETLB:
            huge.add(fd)
        return fd

    def refused(fd: int, offset: int, length_bytes: int) -> None:
        if fd in huge:
            huge.discard(fd)
            raise DriverError("fallocate", errno.ENOSPC, "No space left on device")
        allocate(fd, offset, length_bytes)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    monkeypatch.setattr(host_memory, "allocate", refused)
    host = small_slab(hugepages="auto")
    assert "No space left on device" in host.notes[0]
    assert os.fstat(host.fd).st_size == 6 * PAGE
    host.close()


def test_on_insists_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hugepages: on` is taken for a wish, or fails without saying how many are needed."""
    no_huge_pages(monkeypatch)
    with pytest.raises(ConfigError, match=r"host\.hugepages: 1 huge pages.*nr_hugepages to at least 1"):
        small_slab(hugepages="on")


def test_huge_pages_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab that is no multiple of a huge page cannot be mapped. (Here ordinary pages stand in for huge ones.)"""
    create = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name, flags: create(name, flags & ~os.MFD_HUGETLB))
    host = small_slab(hugepages="on")
    assert os.fstat(host.fd).st_size == HUGE_PAGE_BYTES
    assert host.array.shape == (3, 2 * PAGE)
    assert not [note for note in host.notes if "huge" in note]
    host.close()


def test_pinning_is_not_needed_without_a_device() -> None:
    """`pin: auto` fails or warns on machines where there is nothing to register with."""
    host = small_slab(pin="auto")
    assert host.notes == ["pin: no device that the memory would have to be registered with"]
    host.close()


def test_pin_on_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pin: on` is ignored when it is refused, or the user is not told which limit to raise, and to what."""

    def lock(address: int, length_bytes: int) -> None:
        raise DriverError("mlock", 12, "Cannot allocate memory")

    monkeypatch.setattr(host_memory, "lock", lock)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    with pytest.raises(ConfigError, match=r"host\.pin: 24576 bytes.*8388608 bytes.*ulimit -l 24") as caught:
        small_slab(pin="on")
    assert "pin: auto" in caught.value.remedy


def test_pin_on_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pin: on` returns without having locked all of it."""
    locked: list[tuple[int, int]] = []
    monkeypatch.setattr(host_memory, "lock", lambda *span: locked.append(span))
    host = small_slab(pin="on")
    assert locked == [(host.array.ctypes.data, 6 * PAGE)]
    host.close()


def test_what_exceeds_the_machine_is_refused_before_it_is_taken() -> None:
    """A capacity in the wrong unit invites the kernel to kill the process."""
    slots = host_memory.available_bytes() // PAGE * 2
    with pytest.raises(ConfigError, match=r"host\.capacity: \d+ bytes exceed the \d+ bytes of RAM"):
        HostSlab(name="host", slots=slots, stride_bytes=PAGE, hugepages="off")


def test_memory_that_runs_out_meanwhile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGBUS at the first block instead of a message at start; or the failed slab keeps what it had."""
    fds: list[int] = []

    def allocate(fd: int, offset: int, length_bytes: int) -> None:
        fds.append(fd)
        raise DriverError("fallocate", 28, "No space left on device")

    monkeypatch.setattr(host_memory, "allocate", allocate)
    with pytest.raises(ConfigError, match=r"host\.capacity: fallocate"):
        small_slab()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])


@pytest.mark.parametrize(("options", "path"), [({"pin": "yes"}, "host.pin"), ({"hugepages": "1GiB"}, "host.hugepages")])
def test_unknown_choices_are_refused(options: dict[str, str], path: str) -> None:
    """A spelling mistake means `auto`."""
    with pytest.raises(ConfigError, match="auto, on, off") as caught:
        small_slab(**options)
    assert caught.value.path == path


def test_a_stride_is_whole_pages() -> None:
    """A slot that O_DIRECT refuses."""
    with pytest.raises(ConfigError, match="multiple of 4096"):
        HostSlab(name="host", slots=2, stride_bytes=PAGE + 512)
