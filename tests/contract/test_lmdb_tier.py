"""The persistent tier keeps the contract of all tiers and of persistent ones, in every durability mode."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.blocks.namespace import NamespaceTable
from kvtier.testing.tiers import PersistentTierContract
from kvtier.tiers.base import SupportsDrop, SupportsScan, Tier
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.store import LmdbTier


class BufferedFile(BlockFile):
    """A filesystem that refuses O_DIRECT."""

    def _takes_direct(self) -> bool:
        return False


class LmdbContract(PersistentTierContract):
    capacity_bytes = 4 << 20
    durability = "none"
    payload = "slab"
    open_file = staticmethod(BlockFile.open)

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[LmdbTier]:
        self.path = tmp_path / "store"
        self.namespaces = NamespaceTable()
        self.namespaces.id_of(b"other" * 6 + b"..", b"another model, so that ids differ")
        self.namespaces.id_of(b"f" * 32, b"the model of the test")
        tier = self.opened()
        yield tier
        tier.close()

    def opened(self) -> LmdbTier:
        return LmdbTier.open(
            self.path,
            name="disk",
            namespaces=self.namespaces,
            capacity_bytes=self.capacity_bytes,
            length_bytes_max=self.length_bytes_max,
            min_free_bytes=0,
            durability=self.durability,
            payload=self.payload,
            io_threads=2,
            open_file=self.open_file,
        )

    def engine_namespace(self, tier: Tier) -> int:
        return 1

    def reopen(self, tier: LmdbTier) -> LmdbTier:
        assert tier.check() == []
        tier.close()
        return self.opened()


class TestLmdbNone(LmdbContract):
    durability = "none"


class TestLmdbBatch(LmdbContract):
    durability = "batch"


class TestLmdbStrict(LmdbContract):
    durability = "strict"


class InlineContract(LmdbContract):
    payload = "inline"
    capacity_bytes = 10 << 20  # two fifths are for slots


class TestInlineNone(InlineContract):
    durability = "none"


class TestInlineBatch(InlineContract):
    durability = "batch"


class TestInlineStrict(InlineContract):
    durability = "strict"


@pytest.mark.filterwarnings("ignore")
class TestLmdbBuffered(LmdbContract):
    open_file = staticmethod(BufferedFile.open)


def test_protocols() -> None:
    """The engine would not find out that the tier can scan and drop."""
    assert issubclass(LmdbTier, SupportsDrop)
    assert issubclass(LmdbTier, SupportsScan)
