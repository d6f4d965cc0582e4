"""What was asked of `kvtier simulate`, checked: policies, sizes, speeds, the file for the plot.

Owns no state. Always: what cannot be simulated is a UsageError that names the option and says what to write, before
anything long begins. Units: blocks, bytes, seconds.
"""

import os
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import UsageError
from kvtier.policies import POLICIES
from kvtier.policies.base import SupportsHints
from kvtier.registry import suggestion
from kvtier.sim.flat import BELADY, ORDERS
from kvtier.sim.hints import KINDS, Hints
from kvtier.sim.trace import Trace

POLICIES_DEFAULT = ("lru", "arc", "hit_density", BELADY)
CAPACITIES_DEFAULT = ("1%", "2%", "5%", "10%", "20%")
TOKEN_BYTES = 128 << 10  # of the KV of one token: a model of 8 B with 8 KV heads, in 16 bits
RUNS_MAX = 10_000
TRIED_BLOCKS = 1000  # for which a policy is made once before anything is computed
NOISE_MAX = 10
NO_HINTS = "none"
OTHERWISE = "A number of blocks is whole; a share of the working set is written 5%."


class Options(NamedTuple):
    """The options as they were given; None: not given."""

    policies: Sequence[str] | None = None
    capacities: Sequence[str] | None = None
    tiers: Path | None = None
    order: str | None = None
    block_tokens: int | None = None
    block_bytes: str | None = None
    speeds: Sequence[str] | None = None
    prefill_tokens_per_s: float | None = None
    growth: bool = True
    hints: str | None = None
    hint_noise: float | None = None
    hint_coverage: float | None = None
    hint_wrong: float | None = None
    plot: Path | None = None


def check_combination(options: Options) -> None:
    """Refuse options that would be ignored."""
    of_one = {
        "--capacity": options.capacities,
        "--order": options.order,
        "--block-bytes": options.block_bytes,
    }
    of_hints = {
        "--hint-noise": options.hint_noise,
        "--hint-coverage": options.hint_coverage,
        "--hint-wrong": options.hint_wrong,
    }
    of_several = {"--speed": options.speeds, "--prefill": options.prefill_tokens_per_s}
    if options.tiers is not None and (given := _first_given(of_one)):
        raise UsageError(f"{given} is for one tier; with --tiers the file says it. Leave one of them out")
    if options.tiers is None and (given := _first_given(of_several)):
        raise UsageError(f"{given} is for several tiers; name a kvtier YAML file with --tiers")
    if options.hints in (None, NO_HINTS) and (given := _first_given(of_hints)):
        raise UsageError(f"{given} is about hints; say which: --hints {' or '.join(KINDS)}")


def _first_given(options: Mapping[str, object]) -> str | None:
    return next((name for name, value in options.items() if value is not None), None)


def policies_of(options: Options) -> list[str]:
    """Names of policies, and maybe `belady`, each once. None: the usual ones; with tiers, those of the file."""
    if options.policies is None:
        return [] if options.tiers else [*POLICIES_DEFAULT]
    names = split(options.policies)
    for name in names:
        if name != BELADY:
            _expect_policy(name)
    if not names:
        raise UsageError(f"--policy names no policy. {suggestion('', {*POLICIES.known(), BELADY})}")
    return names


def _expect_policy(name: str) -> None:
    known = {*POLICIES.known(), BELADY}
    if ":" not in name and name not in known:
        raise UsageError(f"--policy: unknown policy {name!r}. {suggestion(name, known)}")
    try:
        POLICIES.make(name, TRIED_BLOCKS)
    except KeyError as error:
        raise UsageError(f"--policy: {error.args[0]}") from error


def order_of(options: Options) -> str:
    order = options.order or ORDERS[0]
    if order not in ORDERS:
        raise UsageError(f"--order {order}: use one of {', '.join(ORDERS)}")
    return order


def hints_of(options: Options) -> Hints | None:
    """What is to be made up of the trace's future."""
    if options.hints in (None, NO_HINTS):
        return None
    if options.hints not in KINDS:
        raise UsageError(f"--hints {options.hints}: use one of {', '.join((*KINDS, NO_HINTS))}")
    noise = 0.0 if options.hint_noise is None else options.hint_noise
    coverage = 1.0 if options.hint_coverage is None else options.hint_coverage
    wrong = options.hint_wrong or 0.0
    if not 0 <= noise <= NOISE_MAX:
        raise UsageError(f"--hint-noise {noise}: use 0 to {NOISE_MAX}")
    for option, share in (("--hint-coverage", coverage), ("--hint-wrong", wrong)):
        if not 0 <= share <= 1:
            raise UsageError(f"{option} {share}: use 0 to 1")
    return Hints(options.hints, noise, coverage, wrong)


def block_tokens_of(options: Options) -> int | None:
    size = options.block_tokens
    if size is not None and not 1 <= size <= 1 << 20:
        raise UsageError(f"--block-tokens {size}: use 1 to {1 << 20}")
    return size


def block_bytes_of(options: Options, trace: Trace) -> int:
    """Bytes of a block: as asked, as recorded, or those of a usual model."""
    if options.block_bytes is None:
        return trace.block_bytes or TOKEN_BYTES * trace.block_tokens
    size_bytes = bytes_of("--block-bytes", options.block_bytes)
    if not size_bytes:
        raise UsageError("--block-bytes 0: give the bytes that one block takes, such as 64MiB")
    return size_bytes


def capacities_of(options: Options, trace: Trace, block_bytes: int) -> list[int]:
    """Blocks, ascending, each size once."""
    texts = split(options.capacities) if options.capacities is not None else [*CAPACITIES_DEFAULT]
    if not texts:
        raise UsageError("--capacity names no size. Write one such as 5%, 5006 (blocks) or 64GiB")
    return sorted({_blocks(text, trace, block_bytes) for text in texts})


def uses_hints(policy: str) -> bool:
    """Whether hints make a difference to its runs: the bound knows the future, and some policies use none."""
    return policy != BELADY and isinstance(POLICIES.make(policy, TRIED_BLOCKS), SupportsHints)


def check_runs(count: int) -> None:
    if count > RUNS_MAX:
        raise UsageError(f"{count} runs are too many; name fewer policies or sizes, {RUNS_MAX} runs at most")


def check_plot(file: Path | None) -> None:
    """Refuse a plot that could not be drawn when all is computed."""
    if file is None:
        return
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; install it (pip install 'kvtier[demo]'), or leave the option out")
    if file.suffix.lower() != ".png":
        raise UsageError(f"--plot {file}: the plot is a PNG; give it a name that ends in .png")
    if file.is_dir():
        raise UsageError(f"--plot {file}: it is a folder; name a file")
    aside = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        aside.touch()
        aside.unlink()
    except OSError as error:
        raise UsageError(f"--plot {file}: {error.strerror}; name a file in a folder that you may write to") from error


def split(texts: Sequence[str]) -> list[str]:
    """What commas and repetition separate, each once, in order."""
    return [*dict.fromkeys(part for text in texts for part in map(str.strip, text.split(",")) if part)]


# ---------------------------------------------------------------- one value


def _blocks(text: str, trace: Trace, block_bytes: int) -> int:
    if text.endswith("%"):
        blocks = int(_percent(text) * trace.unique_blocks / 100)
        problem = f"of {trace.unique_blocks} blocks are none"
    elif text.isascii() and text.isdigit():
        blocks = int(text[:20])
        problem = "a cache of no blocks finds nothing"
    else:
        blocks = bytes_of("--capacity", text, OTHERWISE) // block_bytes
        problem = f"holds no block of {block_bytes} bytes"
    if blocks < 1:
        raise UsageError(f"--capacity {text}: {problem}. Give room for one block at least")
    return blocks


def _percent(text: str) -> Decimal:
    try:
        share = Decimal(text[:-1].strip())
    except InvalidOperation:
        share = Decimal(-1)
    if not share.is_finite() or not 0 <= share <= 100:
        raise UsageError(f"--capacity {text}: a share of the working set is 0% to 100%")
    return share


def bytes_of(option: str, text: str, otherwise: str = "") -> int:
    """A size with its unit. otherwise: what else might have been meant."""
    from kvtier.config.units import Rejected, parse_bytes  # takes a third of a second, and most sizes are shares

    try:
        return parse_bytes(text)
    except Rejected as error:
        raise UsageError(f"{option} {text}: {error} {otherwise}".rstrip()) from None
