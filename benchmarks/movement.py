"""All benchmarks of movement, each in a process of its own: costs, readers, lag, memory, decoding.

    python benchmarks/movement.py [--only costs readers lag memory decode] [--path DIR] [--json]

At full size they take about eight minutes and 6 GB of the disk; run a part by itself for smaller sizes. Targets are
printed beside the figures and never enforced. Each part says under its table on which machine it ran, and by which
command; --json prints one object per part and line.
"""

import argparse
import subprocess
import sys
from pathlib import Path

PARTS = ("costs", "readers", "lag", "memory", "decode")


def main(arguments: list[str] | None = None) -> int:
    """Returns the number of parts that failed; the others run all the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="some of them")
    parser.add_argument("--path", type=Path, default=Path.cwd(), metavar="DIR", help="a folder on the measured disk")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args(arguments)
    failed = 0
    for part in options.only:
        program = Path(__file__).with_name(f"movement_{part}.py")
        as_json = ["--json"] if options.json else []
        failed += subprocess.run([sys.executable, str(program), "--path", str(options.path), *as_json]).returncode != 0
        if not options.json:
            print(flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
