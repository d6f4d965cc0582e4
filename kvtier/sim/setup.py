"""What is simulated: a trace's requests on a configuration's tiers.

Owns no state. Always: a block is as long as the trace's, so that its block numbers are block keys; its bytes follow
from the configuration's model. Where that has groups with blocks of several lengths, a block of the trace is the
shortest run of tokens that has whole ones in each, as in a recording. Units: bytes, seconds, tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvtier.blocks.spec import block_specs, span_bytes, span_tokens
from kvtier.cache.level import Level
from kvtier.config import Config, TierConfig
from kvtier.config.codecs import coded_model
from kvtier.sim.hints import Hints
from kvtier.sim.tier_model import Speed, TierModel, modelled
from kvtier.types import ModelSpec

PREFILL_TOKENS_PER_S = 50_000.0  # of an engine that nothing is known about: a model of 8 B on a few GPUs
ADMITTED_MAX = 16  # requests that load or compute at once; the others wait without slots


@dataclass(frozen=True)
class Setup:
    """One simulation.

    policy: for all tiers, instead of the configuration's. step_s: between the verbs of one request (match, reserve,
    commit, release); what one begins has ended before the next if that is long. hints: are made up of the trace's
    future; else those that it holds are passed on, if `recorded_hints`.
    """

    config: Config
    block_tokens: int
    policy: str | None = None
    speeds: Mapping[str, Speed] = field(default_factory=dict)  # by tier name, instead of the type's usual ones
    prefill_tokens_per_s: float | None = None  # None: the configuration's, or the usual
    admitted_max: int = ADMITTED_MAX
    step_s: float = 0.0
    hints: Hints | None = None
    recorded_hints: bool = True

    @property
    def model(self) -> ModelSpec:
        """The configuration's model, in blocks of the trace's length. Those of several groups keep their proportions,
        if that gives whole tokens."""
        groups, span = self.config.model.groups, span_tokens(block_specs(self.config.model))
        sizes = [group.block_tokens * self.block_tokens // span for group in groups]
        if any(group.block_tokens * self.block_tokens % span for group in groups):
            sizes = [self.block_tokens for _ in groups]
        resized = zip(groups, sizes, strict=True)
        return replace(self.config.model, groups=tuple(replace(group, block_tokens=size) for group, size in resized))

    @property
    def parts(self) -> tuple[int, ...]:
        """How many blocks of each group one block of the trace is."""
        return tuple(self.block_tokens // group.block_tokens for group in self.model.groups)

    @property
    def block_bytes(self) -> int:
        """What all groups keep of one block of the trace."""
        return span_bytes(block_specs(self.model))

    @property
    def tokens_per_s(self) -> float:
        """How fast the engine computes."""
        return self.prefill_tokens_per_s or self.config.limits.prefill_tokens_per_s or PREFILL_TOKENS_PER_S

    def tiers(self) -> list[tuple[TierModel, Level]]:
        """The tiers, empty. Raises ConfigError for one without room for a few blocks."""
        specs = block_specs(self.model)
        codings = coded_model(self.model, self.config.tiers)
        return [
            modelled(tier, specs, self.policy, self.speeds.get(tier.name), coded)
            for tier, coded in zip(self.config.tiers, codings, strict=True)
        ]

    def with_more(self, name: str, more_bytes: int) -> "Setup":
        """The same with a larger tier."""
        tiers = tuple(_larger(tier, more_bytes) if tier.name == name else tier for tier in self.config.tiers)
        return replace(self, config=replace(self.config, tiers=tiers))


def _larger(tier: TierConfig, more_bytes: int) -> TierConfig:
    return tier.model_copy(update={"capacity_bytes": tier.capacity_bytes + more_bytes})
