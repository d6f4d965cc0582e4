"""`kvtier bench nvme` from a checkout: the store on disk against raw O_DIRECT I/O, files, and its goals.

python benchmarks/nvme.py [--dir DIR] [--records 1000000] [--rounds N] [--json]
"""

import sys

from kvtier.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "nvme"]
    main()
