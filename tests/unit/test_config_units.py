"""Sizes, durations and fractions as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config.units import (
    BYTES_MAX,
    SECONDS_MAX,
    Rejected,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_fraction,
    parse_rate,
    parse_seconds,
    readable_bytes,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("1.5 GB", 1_500_000_000),
        (" 2 kib ", 2048),
        ("10kB", 10_000),
        ("3TiB", 3 << 40),
        ("1.5PiB", 3 << 49),
        ("1EiB", 1 << 60),
        ("2 EB", 2 * 10**18),
        ("4096", 4096),
        ("7B", 7),
        (65536, 65536),
        (1024.0, 1024),
        ("0.1KiB", 102),
        ("0", 0),
    ],
)
def test_sizes(text: object, size_bytes: int) -> None:
    """A size would be taken for another number of bytes: powers of 1000 for powers of 1024, say."""
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4G", "GiB"),
        ("512M", "MiB"),
        ("1k", "KiB"),
        ("4GiBB", "unknown unit"),
        ("many", "4GiB"),
        ("-1", "negative"),
        (-5, "negative"),
        ("1.5", "whole number"),
        (2.5, "whole number"),
        (True, "not a size"),
        (None, "not a size"),
        ([1], "not a size"),
        (float("nan"), "not a size"),
        (float("inf"), "not a size"),
        ("1e9", "unknown unit|not a size"),
        ("9" * 5000, "not a size"),
        ("99999999TiB", "at most"),
        ("٤GiB", "not a size"),
        ("", "not a size"),
    ],
)
def test_refused_sizes(text: object, says: str) -> None:
    """A text that means no size would become some size, or a traceback."""
    with pytest.raises(Rejected, match=says):
        parse_bytes(text)


@given(st.integers(0, BYTES_MAX))
def test_sizes_are_shown_exactly(size_bytes: int) -> None:
    """`config show` would print a size that loads to another one."""
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "down", "up"),
    [
        (0, "0B", "0B"),
        (1023, "1023B", "1023B"),
        (512 << 20, "512MiB", "512MiB"),
        (500_000_000, "500MB", "500MB"),
        (3_355_444, "3.20MiB", "3.21MiB"),
        (264_212_084 << 10, "251.97GiB", "251.98GiB"),
        ((1 << 20) - 1, "1023.99KiB", "1024.00KiB"),
    ],
)
def test_sizes_in_sentences_can_be_read(size_bytes: int, down: str, up: str) -> None:
    """A message would name 264212084KiB, which nobody takes for 252 GiB."""
    assert (readable_bytes(size_bytes), readable_bytes(size_bytes, up=True)) == (down, up)


@given(st.integers(0, BYTES_MAX))
def test_rounded_sizes_are_on_the_safe_side(size_bytes: int) -> None:
    """A remedy would name a size that is refused again, or a message say that a size is less than itself."""
    down, up = (parse_bytes(readable_bytes(size_bytes, up=up)) for up in (False, True))
    assert down <= size_bytes <= up
    assert up - down <= size_bytes // 100 + 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2s", 2.0), ("1m", 60.0), ("1.5 s", 1.5), ("250us", 0.00025), ("1h", 3600.0)],
)
def test_durations(text: str, seconds: float) -> None:
    """A deadline would be a thousand times too long."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "says"), [(500, "which unit"), ("0.5", "which unit"), ("2 sec", "unknown unit"), ("-1s", "negative")]
)
def test_refused_durations(text: object, says: str) -> None:
    """A bare 500 meant as milliseconds would be taken as 500 seconds."""
    with pytest.raises(Rejected, match=says):
        parse_seconds(text)


@given(st.integers(1, 10**9).map(lambda microseconds: microseconds / 1e6))
def test_durations_are_shown_exactly(seconds: float) -> None:
    """`config show` would print a duration that loads to another one."""
    assert parse_seconds(format_seconds(seconds)) == seconds


def test_fractions() -> None:
    """A percentage would be read as a hundred times the share, or a share above one be let in."""
    assert [parse_fraction(text) for text in ("25%", 0.25, "0.25", 1, 0)] == [0.25, 0.25, 0.25, 1.0, 0.0]
    for text in ("125%", 1.01, "-0.1", "a lot", "3GiB"):
        with pytest.raises(Rejected):
            parse_fraction(text)


@pytest.mark.parametrize("text", ["277778h", "1000000001s", "99999999999999999999h"])
def test_a_duration_that_no_thread_can_sleep_is_refused(text: str) -> None:
    """The engine's thread ends at its first wait, and every caller hangs."""
    assert parse_seconds("277777h") < SECONDS_MAX
    with pytest.raises(Rejected, match="at most 277777h"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("value", "rate"),
    [(2500, 2500.0), ("2500", 2500.0), (0.5, 0.5), ("70000.25", 70000.25), ("1e6", 1e6), (1e9, 1e9), (" 0.001 ", 1e-3)],
)
def test_speeds(value: object, rate: float) -> None:
    """An engine that computes 70,000 tokens a second, or half a one, cannot say so."""
    assert parse_rate(value) == rate
    assert type(parse_rate(value)) is float


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        0.0009,
        1.1e9,
        10**400,
        math.nan,
        math.inf,
        "inf",
        "nan",
        "1_000",
        "1e999",
        "2500 tokens",
        "",
        True,
        None,
        [],
    ],
)
def test_refused_speeds(value: object) -> None:
    """A speed of 0 divides by it, one that is not finite is faster than every load."""
    with pytest.raises(Rejected, match=r"is not a number from 0\.001 to 1e\+09"):
        parse_rate(value)
