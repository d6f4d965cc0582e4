"""The classes of blocks whose returns are counted together: how often a block was used, and after how long a gap.

Always: a class is a small integer, 1 .. CLASSES, and serves as the number of a list. Its block was used once (FIRST),
used elsewhere before it came here (MOVED), used twice, or more often; the last two have one class for each bin of the
gap between the last two uses. Bins are geometric, two to an octave, since what matters is the order of magnitude.
A hint makes a class, too: its block is not expected again (ENDED, or ENDED_SHARED if several sessions had named it), or
after a time that has its own bins of an octave.
So hints are judged like all else by what came of them: those that are mostly wrong will hardly matter.
Units:  gaps and expected times in accesses.
"""

from collections.abc import Iterator

FIRST, MOVED = 1, 2
_BINS = 64  # the last one is for all gaps of 2**31.5 accesses and more
_TWICE = MOVED + 1
_OFTEN = _TWICE + _BINS
ENDED = _OFTEN + _BINS
ENDED_SHARED = ENDED + 1
_RETURNING = ENDED_SHARED + 1
_HINT_BINS = 32
CLASSES = _RETURNING + _HINT_BINS - 1
_NEAR_BINS = 4
_NEAR_WEIGHT = 0.6  # of each bin further away


def class_after(before: int, gap: int) -> int:
    """The class of a block of class `before` that is used again after so many accesses."""
    # The square has twice as many bits: bins of half an octave without a logarithm.
    return (_TWICE if before == FIRST else _OFTEN) + min((gap * gap).bit_length(), _BINS - 1)


def class_hinted(returns_in: int | None, shared: bool = False) -> int:
    """The class of a block that is expected after so many accesses; None: not any more."""
    if returns_in is None:
        return ENDED_SHARED if shared else ENDED
    return _RETURNING + min(returns_in.bit_length(), _HINT_BINS - 1)


def neighbours(class_: int) -> Iterator[tuple[int, float]]:
    """The classes of as many uses and a similar gap, itself included, and what they weigh."""
    first, bins = _group(class_)
    for other in range(max(first, class_ - _NEAR_BINS), min(first + bins, class_ + _NEAR_BINS + 1)):
        yield other, _NEAR_WEIGHT ** abs(class_ - other)


def _group(class_: int) -> tuple[int, int]:
    """The first of the classes that differ from this one in nothing but their bin, and how many these are."""
    for first, bins in ((_RETURNING, _HINT_BINS), (ENDED_SHARED, 1), (ENDED, 1), (_OFTEN, _BINS), (_TWICE, _BINS)):
        if class_ >= first:
            return first, bins
    return class_, 1
