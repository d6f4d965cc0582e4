"""`Truth`: what may be served, and which bytes every block has. A dict that shares no code with the engine.

A block is a (fingerprint, key) pair. It may be served from the moment of its commit until its namespace is dropped.
Every drop begins a new version of the namespace, and the versions of a block differ in every page, so that a late
copy of what was dropped cannot pass for what was computed after it.

Units: versions (of a namespace, from 0), bytes.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

from kvtier.testing.exploring.store import Row
from kvtier.types import BlockKey

Named = tuple[bytes, BlockKey]  # fingerprint, key


class Truth:
    """`alive` maps what may be served to its version."""

    def __init__(self) -> None:
        self.alive: dict[Named, int] = {}
        self.versions: Counter[bytes] = Counter()  # by fingerprint
        self._contents: dict[tuple[bytes, BlockKey, int], bytes] = {}

    def commit(self, named: Named) -> None:
        """Somebody has computed this block."""
        self.alive.setdefault(named, self.versions[named[0]])

    def drop(self, fingerprint: bytes) -> None:
        """Nothing of this namespace may be served from now on."""
        self.versions[fingerprint] += 1
        self.alive = {named: version for named, version in self.alive.items() if named[0] != fingerprint}

    def restart(self, rows: Iterable[Row]) -> None:
        """Only what lies on the disk is left; of an unfinished drop some may have come back."""
        self.alive = {}
        for row in sorted(rows, key=lambda row: row.generation):
            version = self.version_of(row)
            assert version is not None, f"the disk holds for {row.key.hex()[:8]} what nobody has computed"
            self.alive[row.fingerprint, row.key] = version

    def version_of(self, row: Row) -> int | None:
        """Which version of its block lies there; None if it is none."""
        versions = range(self.versions[row.fingerprint], -1, -1)
        named, length_bytes = (row.fingerprint, row.key), len(row.payload)
        return next((v for v in versions if self.content(named, v, length_bytes) == row.payload), None)

    def content(self, named: Named, version: int, length_bytes: int) -> bytes:
        """The bytes of a version of a block."""
        fingerprint, key = named
        known = self._contents.get((fingerprint, key, version))
        if known is None or len(known) != length_bytes:
            seed = hashlib.blake2b(fingerprint + key + version.to_bytes(4, "big")).digest()
            known = (seed * (length_bytes // len(seed) + 1))[:length_bytes]
            self._contents[fingerprint, key, version] = known
        return known
