"""``python -m kvtier.testing.gpu_check``: see `command`."""

import sys

from kvtier.testing.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
