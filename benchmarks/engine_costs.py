"""`kvtier bench engine` from a checkout: verbs, opening a store, flush and promotion, RAM, each beside its target.

python benchmarks/engine_costs.py [--path DIR] [--store-blocks 10000] [--keys 1000000] [--rounds 21] [--json]
"""

import sys

from kvtier.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "engine"]
    main()
