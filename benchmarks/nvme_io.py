"""`kvtier bench nvme` from a checkout: batches to disk and back, against O_DIRECT I/O of the same bytes.

python benchmarks/nvme_io.py [--path DIR] [--block-bytes 737280] [--blocks 16] [--rounds 31] [--json]
"""

import sys

from kvtier.cli.main import app

if __name__ == "__main__":
    app(["bench", "nvme", *sys.argv[1:]], prog_name="kvtier")
