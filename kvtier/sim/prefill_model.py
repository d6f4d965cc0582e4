"""The engine beside the cache, as far as it matters to it: one prompt is computed after the other.

Owns: until when the engine computes, and what it has computed so far. Always: prompts are computed in the order in
which they come; a token costs the same wherever it stands. Units: tokens, seconds of the simulated clock.
"""


class PrefillModel:
    """Computes `tokens_per_s`."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s
        self.busy_s = 0.0
        self._busy_until_s = 0.0

    def ends_at_s(self, tokens: int, now_s: float) -> float:
        """Begin a prompt of which so many tokens are to be computed, when it is its turn; when is it done?"""
        took_s = self.seconds(tokens)
        self.busy_s += took_s
        self._busy_until_s = max(now_s, self._busy_until_s) + took_s
        return self._busy_until_s

    def seconds(self, tokens: int) -> float:
        """How long so many tokens take."""
        return tokens / self.tokens_per_s
