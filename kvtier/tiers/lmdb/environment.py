"""How an LMDB environment was opened, so that it can be opened again.

LMDB lets go of its map before it asks the kernel for one of another size; if the kernel refuses that one, py-lmdb
closes the environment. Always: what is opened again is the file that was open, with the map that it had. Units: bytes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb


@dataclass(frozen=True, slots=True)
class Opening:
    """The file, in its folder, and all that `lmdb.open` was told but the size of the map."""

    data: Path
    options: Mapping[str, Any]

    def again(self, closed: Any, fd: int, map_bytes: int) -> Any:
        """The environment anew. fd: of its file, for by now the folder's name may be another one's.

        Raises lmdb.Error or OSError: then nothing is open.
        """
        closed.close()
        if not os.path.samestat(self.data.stat(), os.fstat(fd)):
            raise lmdb.Error(f"{self.data} is not the file that was opened")
        return lmdb.open(str(self.data.parent), map_size=map_bytes, **self.options)
