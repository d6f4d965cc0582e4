"""The kernels' source text, and in which variants it is compiled.

A variant is one source file with the dtype, and for attention the head dim, fixed by macros: loops over the head dim
unroll, and each value takes the conversion that it needs.
Always: a source needs its own headers and nothing else, so NVRTC alone compiles it.
"""

import functools
from dataclasses import dataclass
from importlib.resources import files

from kvtier.errors import UsageError
from kvtier.kernels.arrays import NUMBERS

HEAD_DIMS = (64, 96, 128, 192, 256)
HEADERS = ("device.cuh", "floats.cuh", "coded.cuh")

# source -> (its kernels, whether it depends on the dtype, whether on the head dim)
SOURCES: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    "fragments": (("kv_gather", "kv_scatter"), False, False),
    "checksum": (("kv_checksum",), False, False),
    "exponents": (("kv_exp4_encode", "kv_exp4_decode"), True, False),
    "quantize": (
        ("kv_quantize_int8", "kv_dequantize_int8", "kv_quantize_fp8", "kv_dequantize_fp8"),
        True,
        False,
    ),
    "attention": (("kv_attend", "kv_merge"), True, True),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One source with its macros. dtype and head_dim are None where the source does not depend on them."""

    source: str
    dtype: str | None = None
    head_dim: int | None = None

    @property
    def name(self) -> str:
        """A name for files and messages, such as attention_bfloat16_128."""
        return "_".join(str(part) for part in (self.source, self.dtype, self.head_dim) if part is not None)

    @property
    def file_name(self) -> str:
        return f"{self.source}.cu"

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of its kernels."""
        return SOURCES[self.source][0]

    @property
    def macros(self) -> dict[str, int]:
        """What the compiler must define."""
        macros = {} if self.dtype is None else {"KV_DTYPE": NUMBERS[self.dtype]}
        return macros if self.head_dim is None else {**macros, "KV_HEAD_DIM": self.head_dim}


def variant_of(source: str, dtype: str | None = None, head_dim: int | None = None) -> Variant:
    """The variant of a source for blocks of this dtype and head dim; what the source does not depend on is left out.

    Raises UsageError if there is none.
    """
    _, by_dtype, by_head_dim = SOURCES[source]
    if by_dtype and dtype not in NUMBERS:
        raise UsageError(f"kernels for dtype {dtype!r}; there are some for {', '.join(NUMBERS)}")
    if by_head_dim and head_dim not in HEAD_DIMS:
        raise UsageError(f"attention for head_dim {head_dim}; there is one for {', '.join(map(str, HEAD_DIMS))}")
    return Variant(source, dtype if by_dtype else None, head_dim if by_head_dim else None)


def variants() -> list[Variant]:
    """Every variant that exists."""
    return [
        Variant(source, dtype, head_dim)
        for source, (_, by_dtype, by_head_dim) in SOURCES.items()
        for dtype in (NUMBERS if by_dtype else (None,))
        for head_dim in (HEAD_DIMS if by_head_dim else (None,))
    ]


@functools.cache
def text_of(file_name: str) -> str:
    """The text of a source or header of this package."""
    return files("kvtier.kernels").joinpath("src", file_name).read_text(encoding="utf-8")
