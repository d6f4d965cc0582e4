"""How fast the simulated machine is, as asked of `kvtier simulate`: its tiers and its engine.

Owns no state. Always: what is no speed is a UsageError that says what to write. Units: bytes and tokens per second.
"""

from kvtier.cli.simulate.asked import Options, bytes_of
from kvtier.config import Config
from kvtier.config.units import Rejected, parse_rate, parse_seconds
from kvtier.errors import UsageError
from kvtier.registry import suggestion
from kvtier.sim.tier_model import SPEEDS, Speed

FIGURES_MAX = 3


def speeds_of(options: Options, config: Config) -> dict[str, Speed]:
    """By tier name, those that were asked for."""
    speeds: dict[str, Speed] = {}
    known = {tier.name: SPEEDS[tier.type] for tier in config.tiers}
    for text in options.speeds or ():
        name, _, figures = text.partition("=")
        if name not in known:
            raise UsageError(f"--speed {text}: there is no tier {name!r}. {suggestion(name, known)}")
        speeds[name] = _speed(text, figures, known[name])
    return speeds


def prefill_of(options: Options) -> float | None:
    """Tokens that the engine computes in a second, if that was asked for."""
    if options.prefill_tokens_per_s is None:
        return None
    try:
        return parse_rate(options.prefill_tokens_per_s)
    except Rejected as error:
        raise UsageError(f"--prefill: {error}") from None


def _speed(text: str, figures: str, usual: Speed) -> Speed:
    """READ[,WRITE[,LATENCY]]. Without WRITE it writes as fast as it reads; without LATENCY that is the usual."""
    read, *others = (figure.strip() for figure in figures.split(","))
    if len(others) >= FIGURES_MAX:
        raise UsageError(f"--speed {text}: write TIER=READ, TIER=READ,WRITE or TIER=READ,WRITE,LATENCY")
    write = others[0] if others else read
    per_s = [bytes_of("--speed", figure.removesuffix("/s")) for figure in (read, write)]
    if not all(per_s):
        raise UsageError(f"--speed {text}: a tier that moves nothing is none; give bytes in a second, such as 3GB")
    try:
        latency_s = parse_seconds(others[1]) if len(others) > 1 else usual.latency_s
    except Rejected as error:
        raise UsageError(f"--speed {text}: {error}") from None
    return Speed(per_s[0], per_s[1], latency_s)
