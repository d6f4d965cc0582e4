"""`kvtier bench host` from a checkout: blocks between gpu and host tier, against torch's `copy_`.

python benchmarks/host_copy.py [--block-bytes 737280] [--blocks 16] [--rounds 41] [--json]
"""

import sys

from kvtier.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "host"]
    main()
