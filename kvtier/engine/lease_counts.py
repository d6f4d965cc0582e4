"""What is counted when a reservation is decided, and when it is answered. Owns nothing. Units: tokens, milliseconds."""

from kvtier.cache.leases import Decision
from kvtier.metrics import Counters


def count_decision(counters: Counters, decision: Decision) -> None:
    """What the governor left out of what was found."""
    declined = decision.tokens_found - decision.tokens_chosen
    counters.add("declined_tokens", declined)
    counters.add("declined_loads" if not decision.tokens_chosen else "cut_loads", int(declined > 0))


def count_restored(counters: Counters, tokens: int, tiers: dict[str, int], saved_s: float) -> None:
    """A lease restored so many tokens, from these tiers (fastest first); computing them would have taken `saved_s`."""
    counters.add("restored_tokens", tokens)
    counters.add("prefill_saved_ms", int(saved_s * 1000))
    for tier, count in enumerate(tiers.values()):
        counters.add_tier(tier, "restored_tokens", count)
        counters.add_tier(tier, "prefill_saved_ms", int(saved_s * 1000 * count / max(1, tokens)))
