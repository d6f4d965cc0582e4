"""Every value of a loaded configuration by its YAML path, spelled as in the YAML, with its origin.

Owns no state. Always: the values, written as YAML, load to an equal configuration; `weights_epoch: auto` appears
as what it came to.
"""

from pathlib import Path

from kvtier.blocks.coding import LOSSY
from kvtier.config.document import Where, path_text
from kvtier.config.fields import Section, yaml_key
from kvtier.config.schema import GROUP_KEYS, Config, ModelSection, Setting
from kvtier.config.sources import Sources
from kvtier.config.units import format_bytes, format_seconds
from kvtier.config.wear import WearConfig


def settings_of(config: Config, section: ModelSection, sources: Sources) -> dict[str, Setting]:
    """The settings in the order of the schema. `section` is what `config.model` was made of."""
    found: dict[Where, object] = {}
    identity = {"weights_epoch": config.model.weights_epoch, "codec": config.model.codec}
    model = section.model_copy(update=identity | {"groups": None})
    found.update(_values(model, ("model",)))
    if section.groups is not None:
        for key in GROUP_KEYS:  # each group says its own
            found.pop(("model", key), None)
        for index, group in enumerate(config.model.groups):
            found.update({("model", "groups", index, key): _spelled(key, getattr(group, key)) for key in GROUP_KEYS})
    for index, tier in enumerate(config.tiers):
        found.update(_values(tier, ("tiers", index)))
    found.update(_values(config.prefetch, ("prefetch",)))
    found.update(_values(config.limits, ("limits",)))
    found.update(_values(config.trace, ("trace",)))
    origins = {where: sources.origin_of(where) for where in found} | _codec_origins(config, sources)
    return {path_text(where): Setting(value, origins[where]) for where, value in found.items()}


def _codec_origins(config: Config, sources: Sources) -> dict[Where, str]:
    """A codec that nobody wrote follows from the tier that has a lossy one."""
    codecs = [tier.codec for tier in config.tiers]
    lossy = next((index for index, codec in enumerate(codecs) if codec in LOSSY), None)
    if lossy is None:
        return {}
    followers: list[Where] = [("model", "codec"), *(("tiers", at, "codec") for at in range(lossy + 1, len(codecs)))]
    silent = [where for where in followers if sources.origin_of(where) == "default"]
    return dict.fromkeys(silent, f"tiers[{lossy}].codec ({sources.origin_of(('tiers', lossy, 'codec'))})")


def _values(section: Section, where: Where) -> dict[Where, object]:
    named = {
        (*where, yaml_key(type(section), name)): (name, getattr(section, name)) for name in type(section).model_fields
    }
    found = {place: _spelled(name, value) for place, (name, value) in named.items() if value is not None}
    return {place: value for whole, part in found.items() for place, value in _single(part, whole).items()}


def _single(value: object, where: Where) -> dict[Where, object]:
    """The value, or each one of a mapping."""
    return {(*where, key): part for key, part in value.items()} if isinstance(value, dict) else {where: value}


def _spelled(name: str, value: object) -> object:
    if name.endswith("_bytes_per_s") and isinstance(value, int):
        return f"{format_bytes(value)}/s" if value else "off"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if name.endswith("_s") and not name.endswith("_per_s") and isinstance(value, float):
        return format_seconds(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, WearConfig):
        return value.spelled()
    return list(value) if isinstance(value, tuple) else value
