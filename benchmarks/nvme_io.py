"""`kvtier bench nvme` from a checkout: batches to disk and back, against O_DIRECT I/O of the same bytes.

python benchmarks/nvme_io.py [--path DIR] [--block-bytes 737280] [--blocks 16] [--rounds 31] [--json]
"""

import sys

from kvtier.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "nvme"]
    main()
