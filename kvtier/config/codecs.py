"""Which codec each tier has, and what follows for the model's identity.

Owns no state. Always: at most one codec of a configuration is lossy, every tier below a lossy one has the same, and the
model's `codec` is the lossy one or `none`. A tier that says nothing keeps what comes from above as it comes.
"""

from collections.abc import Sequence

from kvtier.blocks.coding import LOSSY, NONE, Coding, Codings
from kvtier.blocks.spec import DTYPES
from kvtier.config.schema import GpuTierConfig, LmdbTierConfig, TierConfig
from kvtier.errors import ConfigError
from kvtier.types import GroupSpec, ModelSpec


def codecs_of(tiers: Sequence[TierConfig]) -> list[str]:
    """The codec of each tier, said or inherited."""
    codecs: list[str] = []
    for tier in tiers:
        above = codecs[-1] if codecs else NONE
        codecs.append(above if above in LOSSY and not _says(tier) else tier.codec)
    return codecs


def with_codecs(tiers: Sequence[TierConfig]) -> tuple[TierConfig, ...]:
    """The same tiers, each with the codec that it has."""
    coded = zip(tiers, codecs_of(tiers), strict=True)
    return tuple(tier.model_copy(update={"codec": codec}) if codec != tier.codec else tier for tier, codec in coded)


def identity_of(tiers: Sequence[TierConfig]) -> str:
    """What the tiers' codecs mean for the bytes that come back: a lossy codec, or `none`."""
    return next((codec for codec in codecs_of(tiers) if codec in LOSSY), NONE)


def coded_model(model: ModelSpec, tiers: Sequence[TierConfig]) -> list[Codings]:
    """What the codec of each tier comes to for the model's blocks."""
    return [Codings.of(codec, model) for codec in codecs_of(tiers)]


def stride_bytes_max(model: ModelSpec, codec: str) -> int:
    """The largest slot that a block of the model may need in a tier of this codec, whole pages."""
    codings = Codings.of(NONE if codec == "exp4" else codec, model)  # exp4 keeps some blocks as they are
    return max(codings.slot_bytes(raw_bytes) for raw_bytes in codings.lengths_bytes)


def check_codecs(tiers: Sequence[TierConfig], identity: str | None, problems: list[ConfigError]) -> None:
    """Refuse tiers that would code what is coded already, and a model that says otherwise than they do."""
    codecs = codecs_of(tiers)
    for index, codec in enumerate(codecs[1:], start=1):
        above = codecs[index - 1]
        if above in LOSSY and codec != above:
            problem = f"{codec} below tiers[{index - 1}], whose blocks come down as {above} and stay so"
            problems.append(ConfigError(f"tiers[{index}].codec", problem, f"Leave it out, or write {above}."))
    if len(tiers) > 1 and isinstance(tiers[0], GpuTierConfig) and tiers[0].access == "uva" and codecs[1] != NONE:
        problem = f"{codecs[1]}, and kernels read this tier in place (tiers[0].access)"
        problems.append(ConfigError("tiers[1].codec", problem, "Leave it out, put it on the lmdb tier, or copy."))
    follows = identity_of(tiers)
    if identity is not None and identity != follows:
        index = next((at for at, codec in enumerate(codecs) if codec == follows), 0)
        because = f"tiers[{index}].codec is {follows}" if follows != NONE else "no tier has a lossy codec"
        problems.append(ConfigError("model.codec", f"{identity}, and {because}", "Leave it out: it follows from them."))


def check_codable(groups: Sequence[GroupSpec], tiers: Sequence[TierConfig], problems: list[ConfigError]) -> None:
    """Refuse codecs that some group of the model cannot have."""
    for index, (tier, codec) in enumerate(zip(tiers, codecs_of(tiers), strict=True)):
        for at, group in enumerate(groups):
            coding = Coding(codec, group.dtype, group.head_dim)
            obstacle = coding.obstacle() or _growth(coding, group)
            if obstacle and _says(tier):  # an inherited one is told where it is said
                where = f" in group {at} of the model" if len(groups) > 1 else ""
                problems.append(ConfigError(f"tiers[{index}].codec", obstacle + where, f"Use {_instead(tier)}."))


def _says(tier: TierConfig) -> bool:
    return "codec" in tier.model_fields_set


def _growth(coding: Coding, group: GroupSpec) -> str:
    """Why a lossy codec would make blocks of rows that are very short no smaller."""
    raw_bytes = group.head_dim * DTYPES[group.dtype][0] * group.block_tokens * group.kv_heads
    if coding.codec in LOSSY and coding.room_bytes(raw_bytes) >= raw_bytes:
        return f"with rows of {group.head_dim} values {coding.codec} makes blocks no smaller"
    return ""


def _instead(tier: TierConfig) -> str:
    return "none or exp4" if isinstance(tier, LmdbTierConfig) and tier.codec in LOSSY else "none"
