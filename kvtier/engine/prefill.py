"""How long the engine takes to compute tokens, learned from what it reports.

Owns: decaying sums of a least-squares fit of `seconds = a * tokens + b * pairs`, where `pairs` is how many (token,
token before it) pairs attention looks at: on long prompts the second term leads. Always: both factors are 0 or more;
with reports of one kind only, a single factor is fitted. Until the first report the configured speed counts.

Tokens behind a restored prefix may cost more each than those of a whole prompt: attention that is not just causal takes
another path (torch's SDPA with a mask needs 25 % more for 2000 tokens behind 16). That factor is learned as well.

Units: tokens, seconds.
"""

DECAY = 0.9  # of what earlier reports weigh, with each new one: about the latest ten count
BEHIND_FIRST = 1.25  # what a token behind a prefix is taken to cost more, until some were reported
BEHIND_MAX = 2.0  # a report that is further off tells of something else
DISTINCT = 1e-3  # how far from parallel the two columns must be for two factors


class PrefillSpeed:
    """`tokens_per_s`: what is believed before anything was reported; None: nothing is."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self._known = tokens_per_s is not None
        self._per_token = 1 / tokens_per_s if tokens_per_s else 0.0
        self._per_pair = 0.0
        self._tt = self._tp = self._pp = self._ts = self._ps = 0.0
        self._behind = BEHIND_FIRST

    @property
    def known(self) -> bool:
        """Whether `seconds` means anything."""
        return self._known

    def observe(self, start: int, tokens: int, seconds: float) -> None:
        """`tokens` tokens behind the first `start` took so long."""
        expected_s = self.seconds(start + tokens) - self.seconds(start)
        if start and expected_s > 0:
            self._behind = (self._behind + min(max(seconds / expected_s, 1.0), BEHIND_MAX)) / 2
        pairs = tokens * (start + tokens / 2)
        self._tt = self._tt * DECAY + tokens * tokens
        self._tp = self._tp * DECAY + tokens * pairs
        self._pp = self._pp * DECAY + pairs * pairs
        self._ts = self._ts * DECAY + tokens * seconds
        self._ps = self._ps * DECAY + pairs * seconds
        self._known = True
        self._per_token, self._per_pair = self._fit()

    def seconds(self, tokens: int) -> float:
        """For the first `tokens` tokens of a prompt."""
        return self._per_token * tokens + self._per_pair * tokens * tokens / 2

    def saved(self, prefix: int, tokens: int) -> float:
        """By how much sooner `tokens` tokens are computed when the first `prefix` are there; less than 0: later."""
        whole_s = self.seconds(tokens)
        return whole_s - self._behind * (whole_s - self.seconds(prefix))

    def _fit(self) -> tuple[float, float]:
        determinant = self._tt * self._pp - self._tp * self._tp
        if determinant > DISTINCT * self._tt * self._pp:
            per_token = (self._ts * self._pp - self._ps * self._tp) / determinant
            per_pair = (self._ps * self._tt - self._ts * self._tp) / determinant
            if per_token >= 0 and per_pair >= 0:
                return per_token, per_pair
            if per_token < 0:
                return 0.0, self._ps / self._pp
        return self._ts / self._tt, 0.0
