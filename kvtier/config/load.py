"""From a YAML file or a mapping to a `Config`, or to one ConfigError that tells everything that is wrong.

Owns no state. Read in stages, each only where the one before left something to work with: sources are merged,
sections validated, rules between values checked, weight files read. What pydantic thinks never reaches the user.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.config import rules
from kvtier.config.codecs import check_codable, check_codecs, identity_of, with_codecs
from kvtier.config.document import read_document
from kvtier.config.fields import validated
from kvtier.config.model import groups_of, model_spec, resolve_epoch
from kvtier.config.notes import notes_on
from kvtier.config.schema import Config, LimitsConfig, ModelSection, PrefetchConfig, TierConfig, TraceConfig
from kvtier.config.settings import settings_of
from kvtier.config.sources import SECTIONS, Sources, argument_overrides, environment_overrides
from kvtier.config.tiers import tiers_of
from kvtier.errors import ConfigError
from kvtier.registry import suggestion
from kvtier.types import ModelSpec


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Load a configuration from a YAML file, or from the mapping that one would hold.

    overrides: values by path, as from the command line: ``{"tiers[1].capacity": "8GiB"}``. environ: where the
    ``KVTIER_...`` variables are, by default the process's. Precedence: overrides, environment, file, default.
    Relative paths in a file are relative to its folder, all others to the current one.
    Raises ConfigError, which lists every problem found; its `path` is that of the first.
    """
    environ = os.environ if environ is None else environ
    if not isinstance(source, Mapping | str | os.PathLike):
        raise ConfigError("", f"{source!r} is no configuration", "Pass the name of a YAML file, or a mapping.")
    if isinstance(source, Mapping):
        sources = Sources.of_mapping(source)
    else:
        path = Path(source)
        sources = Sources.of_file(read_document(path), path)
    for where, value, origin in environment_overrides(environ) + argument_overrides(overrides or {}):
        sources.override(where, value, origin)
    return _load(sources, environ)


def _load(sources: Sources, environ: Mapping[str, str]) -> Config:
    data = sources.data
    problems = [
        ConfigError(str(key), f"unknown key {key!r}", suggestion(str(key), SECTIONS))
        for key in data
        if key not in SECTIONS
    ]
    section = _model_section(data.get("model", {}), sources, problems)
    tiers = tiers_of(data.get("tiers"), sources, problems)
    prefetch = validated(PrefetchConfig, data.get("prefetch", {}), "prefetch", problems)
    limits = validated(LimitsConfig, data.get("limits", {}), "limits", problems)
    trace = _trace_section(data.get("trace", {}), sources, problems)
    model = None if section is None else _model(section, tiers, environ, problems)
    if model and limits:
        rules.check_sizes(model, tiers, limits, problems)
    if model:
        rules.check_sequence_views(model, tiers, problems)
        rules.check_access(model, tiers, problems)
    if model and prefetch:
        rules.check_prefetch(model, tiers, prefetch, problems)
    if problems or not (section and model and prefetch and limits and trace):
        raise _combined(problems)
    tiers = with_codecs(tiers)
    config = Config(model, tiers, prefetch, limits, trace, notes=notes_on(model, tiers))
    return replace(config, settings=settings_of(config, section, sources))


def _model_section(raw: object, sources: Sources, problems: list[ConfigError]) -> ModelSection | None:
    section = validated(ModelSection, raw, "model", problems)
    if section is None or section.weights is None:
        return section
    weights = sources.resolve_path(section.weights, ("model", "weights"), problems)
    return section.model_copy(update={"weights": weights})


def _trace_section(raw: object, sources: Sources, problems: list[ConfigError]) -> TraceConfig | None:
    trace = validated(TraceConfig, raw, "trace", problems)
    if trace is None:
        return None
    rules.check_trace(trace, problems)
    if trace.record is None:
        return trace
    return trace.model_copy(update={"record": sources.resolve_path(trace.record, ("trace", "record"), problems)})


def _model(
    section: ModelSection, tiers: tuple[TierConfig, ...], environ: Mapping[str, str], problems: list[ConfigError]
) -> ModelSpec | None:
    groups = groups_of(section, problems)
    if tiers:
        check_codecs(tiers, section.codec if "codec" in section.model_fields_set else None, problems)
        check_codable(groups, tiers, problems)
    rules.check_hash(section.hash, tiers, problems)
    if section.weights_epoch == "auto":
        rules.check_store_outside_weights(section.weights, tiers, problems)
    try:
        epoch = resolve_epoch(section, environ)
    except ConfigError as error:
        problems.append(error)
        return None
    return model_spec(section, groups, epoch, identity_of(tiers)) if groups else None


def _combined(problems: list[ConfigError]) -> ConfigError:
    """The first problem, with all of them in its text, one a line."""
    first = problems[0]
    error = ConfigError(first.path, first.problem, first.remedy)
    error.args = ("\n".join(str(problem) for problem in problems),)
    return error
