"""What the kernel counts of this process's I/O: bytes that went to disks and came from them, page cache left out.

Owns nothing. Units: bytes.
"""

from pathlib import Path

from kvtier.errors import UsageError

COUNTS = Path("/proc/self/io")


def process_bytes(name: str) -> int:
    """`read_bytes` or `write_bytes` so far. Raises UsageError where the kernel does not count."""
    try:
        fields = COUNTS.read_text().split()
        return int(fields[fields.index(f"{name}:") + 1])
    except (OSError, ValueError, IndexError):
        problem = f"{COUNTS} does not say {name}: what disks read and wrote for a get or a put cannot be told"
        raise UsageError(f"{problem}; use a kernel with CONFIG_TASK_IO_ACCOUNTING") from None
