"""The persistent tier keeps the contract of all tiers and of persistent ones, in every durability mode and codec."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.blocks.coding import UNCODED, Codings
from kvtier.blocks.namespace import NamespaceTable
from kvtier.kernels import quantize
from kvtier.kernels.floats import float_to_bfloat16
from kvtier.testing.persistent_tiers import PersistentTierContract
from kvtier.tiers.base import SupportsDrop, SupportsScan, SupportsStrides, Tier
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import GroupSpec

BFLOAT16 = GroupSpec("full", (0,), 1, 64, "bfloat16", 16)


class BufferedFile(BlockFile):
    """A filesystem that refuses O_DIRECT."""

    def _takes_direct(self) -> bool:
        return False


class LmdbContract(PersistentTierContract):
    capacity_bytes = 4 << 20
    durability = "none"
    payload = "slab"
    open_file = staticmethod(BlockFile.open)
    codings = UNCODED

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
            codings=self.codings,
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


class CodedContract(LmdbContract):
    """Blocks of bfloat16 values in rows of 64; those that are no whole rows are kept as they come."""

    length_bytes_max = 20_480

    def written(self, number: int, length_bytes: int) -> bytes:
        values = np.random.default_rng(number).standard_normal(length_bytes // 2 + 1).astype(np.float32)
        return (float_to_bfloat16(values) | 1).tobytes()[:length_bytes]  # none is zero at its end

    def room_bytes(self, length_bytes: int) -> int:
        return self.codings.slot_bytes(length_bytes)

    def lengths(self) -> list[int]:
        return [*super().lengths(), 128, 8192, 16384]


class TestLmdbExp4(CodedContract):
    codings = Codings("exp4", [BFLOAT16])


class LossyContract(CodedContract):
    def returned(self, number: int, length_bytes: int) -> bytes:
        if length_bytes % 128:
            return self.written(number, length_bytes)
        rows = np.frombuffer(self.written(number, length_bytes), np.uint16).reshape(-1, 64)
        codec = self.codings.codec
        coded = quantize.encode(rows, "bfloat16", codec)
        return quantize.decode(coded, "bfloat16", *rows.shape, codec).tobytes()


class TestLmdbInt8(LossyContract):
    codings = Codings("int8", [BFLOAT16])


class TestLmdbFp8(LossyContract):
    codings = Codings("fp8", [BFLOAT16])


def test_protocols() -> None:
    """The engine would not find out that the tier can scan and drop, and what its blocks take."""
    assert issubclass(LmdbTier, SupportsDrop)
    assert issubclass(LmdbTier, SupportsScan)
    assert issubclass(LmdbTier, SupportsStrides)
