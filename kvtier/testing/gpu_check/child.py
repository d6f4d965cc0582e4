"""One part in a process of its own: ``python -m kvtier.testing.gpu_check.child PART DEVICE SCALE``; JSON on stdout.

Owns no state. Always: a part that loses the device, crashes or hangs costs its own record and nothing else.
"""

import json
import subprocess
import sys

from kvtier.testing.gpu_check.parts import run_here
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.scale import SCALES

ERROR_LINES = 3  # of a process that died


def run_in_child(part: str, device: int, scale: str, patience_s: float) -> Record:
    """Run a part, killed after so long. Its end without a record is a finding."""
    command = [sys.executable, "-m", "kvtier.testing.gpu_check.child", part, str(device), scale]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s)  # noqa: S603
    except subprocess.TimeoutExpired:
        return Record(part, findings=[f"no end after {patience_s:.0f} s: killed"], seconds=patience_s)
    try:
        return Record.from_json(json.loads(done.stdout.splitlines()[-1]))  # libraries may have written before
    except (ValueError, TypeError, LookupError):
        last = " | ".join(done.stderr.strip().splitlines()[-ERROR_LINES:])
        return Record(part, findings=[f"its process ended with {done.returncode} and no record: {last}"])


def main(arguments: list[str]) -> int:
    part, device, scale = arguments
    told = run_here(part, int(device), SCALES[scale])
    sys.stdout.write("\n" + json.dumps(told.as_json()))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
