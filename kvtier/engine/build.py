"""From a configuration to a running cache: tiers, their levels, the core and its thread.

The order in which tiers are opened and wrapped is visible here and nowhere else. Always: if one tier cannot be
opened, those that were are closed again.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from kvtier.allocator import host_memory
from kvtier.allocator.slot_pool import SlotPool
from kvtier.blocks.coding import NONE, UNCODED, Codings
from kvtier.blocks.namespace import NamespaceTable, fingerprint
from kvtier.blocks.spec import BlockSpec, block_specs, span_bytes, span_tokens
from kvtier.cache.level import Level, Room
from kvtier.clock import MonotonicClock
from kvtier.config import Config, GpuTierConfig, HostTierConfig, LmdbTierConfig, TierConfig, load_config
from kvtier.config.codecs import codecs_of, coded_model, identity_of
from kvtier.engine.core import Core
from kvtier.engine.engine import Engine
from kvtier.engine.gates import gate_of
from kvtier.engine.recoding import Recoding
from kvtier.engine.recorder import TraceRecorder
from kvtier.errors import ConfigError, DriverError
from kvtier.notices import say_once
from kvtier.policies import POLICIES
from kvtier.tiers.base import (
    SupportsArray,
    SupportsCapacity,
    SupportsCoding,
    SupportsMeter,
    SupportsPinning,
    SupportsRemap,
    SupportsScan,
    SupportsSidecar,
    SupportsSlots,
    SupportsStrides,
    Tier,
)

log = logging.getLogger("kvtier")

Configuration = Config | Path | str | Mapping[str, Any]


def loaded(config: Configuration) -> Config:
    """The configuration itself, or that of a YAML file or mapping."""
    return config if isinstance(config, Config) else load_config(config)


def start(config: Config, first: int = 0) -> tuple[Engine, Tier]:
    """Open all tiers and start the engine; also returns the top tier, whose slots `kv` shows.

    first: the index in the YAML of the first of these tiers, for errors.
    """
    namespaces = NamespaceTable()
    namespaces.id_of_model(config.model)
    for note in config.notes:
        say_once(log, "configuration", note.partition(":")[0], note)
    expect_codecs(config, first)
    specs, codings = block_specs(config.model), coded_model(config.model, config.tiers)
    length_bytes_max = max(spec.block_bytes for spec in specs)
    with ExitStack() as undo:
        tiers: list[Tier] = []
        for index, (tier_config, coded) in enumerate(zip(config.tiers, codings, strict=True), start=first):
            tier = open_at(index, tier_config, namespaces, length_bytes_max, coded)
            undo.callback(tier.close)
            tiers.append(tier)
        recoding = recoding_for(tiers, codings, length_bytes_max)
        scratch = [] if recoding is None else recoding.memories()
        pin_below(tiers, undo, scratch, in_place=reads_in_place(config.tiers[0]))
        levels = []
        for index, (tier_config, tier, coded) in enumerate(zip(config.tiers, tiers, codings, strict=True), start=first):
            try:
                levels.append(level_of(tier_config, tier, specs, coded))
            except KeyError as error:  # a policy of somebody else's, that is not there
                raise ConfigError(f"tiers[{index}].policy", str(error.args[0]), "Install it, or use lru") from error
        clock = MonotonicClock()
        epoch_ms = time.time_ns() // 10**6 - int(clock.now() * 1000)
        recorder = open_recorder(config, specs, epoch_ms, clock.now())
        if recorder is not None:
            undo.callback(recorder.close)
        core = Core(
            config.model,
            levels,
            namespaces,
            queue_bytes=config.limits.queue_bytes,
            prefetch_budget=config.prefetch.budget,
            lookahead_requests=config.prefetch.lookahead_requests,
            governed=config.limits.governor,
            prefill_tokens_per_s=config.limits.prefill_tokens_per_s,
            pin_quota=config.limits.pin_quota,
            epoch_ms=epoch_ms,
        )
        core.traced.recorder = recorder
        for index, tier in enumerate(tiers):
            if isinstance(tier, SupportsScan):
                sidecar = tier.sidecar() if isinstance(tier, SupportsSidecar) else ()
                core.adopt(index, tier.scan(), sidecar, clock.now())
        host_memory.trim_heap()  # columns that grow leave holes: 40 bytes for each known key
        engine = Engine(core, tiers, clock, recoding, recorder)
        undo.pop_all()  # the engine closes them from now on
    return engine, tiers[0]


def expect_codecs(config: Config, first: int) -> None:
    """Raises ConfigError for a configuration made by hand whose parts do not agree, and for a first tier that codes:
    whoever runs the tier above it copies blocks as they are."""
    if codecs_of(config.tiers)[0] != NONE:
        problem = "its slots are read and written as they are, by who runs the tier above it"
        raise ConfigError(f"tiers[{first}].codec", problem, "Leave it out here, or put it on the lmdb tier.")
    follows = identity_of(config.tiers)
    if config.model.codec != follows:
        problem = f"{config.model.codec}, and the tiers' is {follows}"
        raise ConfigError("model.codec", problem, "Load the configuration, or give the model the tiers' lossy codec.")


def recoding_for(tiers: Sequence[Tier], codings: Sequence[Codings], length_bytes_max: int) -> Recoding | None:
    """What codes between memory tiers; None if all of them hold blocks as they are. A device does it by itself."""
    for tier, coded in zip(tiers, codings, strict=True):
        if isinstance(tier, SupportsSlots) and coded.codec != NONE:
            obstacle = tiers[0].code(coded) if isinstance(tiers[0], SupportsCoding) else "it is no device"
            if isinstance(tiers[0], SupportsCoding) and obstacle:
                say_once(log, f"tier {tiers[0].name}", "codec", f"{coded.codec}: coded by the CPU, for {obstacle}")
            return Recoding(coded, length_bytes_max, tier_codes=not obstacle)
    return None


def open_recorder(config: Config, specs: Sequence[BlockSpec], epoch_ms: int, now_s: float) -> TraceRecorder | None:
    """Who writes requests down from now on, if that is wanted. Raises ConfigError for a file that cannot be written."""
    trace = config.trace
    if trace.record is None:
        return None
    return TraceRecorder(
        trace.record,
        span_tokens(specs),
        span_bytes(specs),
        fingerprint(config.model),
        epoch_ms=epoch_ms,
        now_s=now_s,
        salt=trace.salt,
        bytes_max=trace.max_bytes,
    )


def reads_in_place(config: TierConfig) -> bool:
    """Whether the readers of a tier read what lies in the tier below where it is."""
    return isinstance(config, GpuTierConfig) and config.access == "uva"


def pin_below(
    tiers: Sequence[Tier], undo: ExitStack, others: Sequence[tuple[int, int]] = (), *, in_place: bool = False
) -> None:
    """Let the device read the memory below it directly. Raises ConfigError if it has none to copy to and from, or if
    kernels are to read it `in_place` and cannot.

    others: address and length of memory besides that blocks pass through.
    """
    top = tiers[0]
    if not isinstance(top, SupportsPinning):
        return
    if in_place and not top.reads_host_addresses():
        raise ConfigError("tiers[0].access", "the device does not read host memory by its own addresses", "Use copy.")
    if len(tiers) > 1 and not isinstance(tiers[1], SupportsSlots):
        raise ConfigError("tiers[1].type", "a disk cannot be read into a device", "Put a host tier between them.")
    undo.callback(top.unpin)
    memories = [(f"tier {tier.name}", *_memory_of(tier)) for tier in tiers[1:] if isinstance(tier, SupportsSlots)]
    memories += [("recoding", *memory) for memory in others]
    for name, address, length_bytes in memories:
        try:
            top.pin(address, length_bytes)
        except DriverError as error:
            if in_place:
                problem = f"the device cannot read {name} in place: {error}"
                raise ConfigError("tiers[0].access", problem, "Use copy.") from error
            say_once(log, name, "pin", f"pin: {error}; the device copies more slowly then")


def _memory_of(tier: Tier) -> tuple[int, int]:
    """Address and length of a memory tier's slots."""
    assert isinstance(tier, SupportsSlots)
    first, last = (np.frombuffer(tier.slot(index), np.uint8) for index in (0, tier.traits.slots - 1))
    return first.ctypes.data, last.ctypes.data + last.nbytes - first.ctypes.data


def open_at(
    index: int, config: TierConfig, namespaces: NamespaceTable, length_bytes_max: int, codings: Codings = UNCODED
) -> Tier:
    """Open a tier; what it cannot work with is told by its place in the YAML, which the tier does not know."""
    try:
        return open_tier(config, namespaces, length_bytes_max, codings)
    except ConfigError as error:
        key = error.path.removeprefix("tier ").removeprefix(config.name)
        raise ConfigError(f"tiers[{index}]{key}", error.problem, error.remedy) from error


def open_tier(
    config: TierConfig, namespaces: NamespaceTable, length_bytes_max: int, codings: Codings = UNCODED
) -> Tier:
    """Open one tier for blocks of up to `length_bytes_max`. Imports only what the tier needs.

    codings: the tier's codec for the blocks of the model.
    """
    if isinstance(config, GpuTierConfig):
        device, _, number = config.device.partition(":")
        if device == "cuda":
            from kvtier.tiers.cuda import CudaTier

            return CudaTier.create(
                name=config.name,
                device=int(number or 0),
                capacity_bytes=config.capacity_bytes,
                capacity_max_bytes=config.capacity_max_bytes,
                length_bytes_max=length_bytes_max,
                sequence_views=config.sequence_views,
            )
        from kvtier.tiers.gpu import GpuTier

        return GpuTier.create(
            name=config.name,
            capacity_bytes=config.capacity_bytes,
            capacity_max_bytes=config.capacity_max_bytes,
            length_bytes_max=length_bytes_max,
            sequence_views=config.sequence_views,
        )
    if isinstance(config, HostTierConfig):
        from kvtier.tiers.host import HostTier

        return HostTier.create(
            name=config.name,
            capacity_bytes=config.capacity_bytes,
            length_bytes_max=max(map(codings.room_bytes, codings.lengths_bytes), default=length_bytes_max),
            pin=config.pin,
            hugepages=config.hugepages,
            codec=codings.codec,
        )
    if isinstance(config, LmdbTierConfig):
        from kvtier.tiers.lmdb.store import LmdbTier

        return LmdbTier.open(
            config.path,
            name=config.name,
            namespaces=namespaces,
            capacity_bytes=config.capacity_bytes,
            length_bytes_max=length_bytes_max,
            min_free_bytes=config.min_free_bytes,
            durability=config.durability,
            verify=config.verify,
            codings=codings,
            payload=config.payload,
        )
    assert_never(config)


def level_of(config: TierConfig, tier: Tier, specs: Sequence[BlockSpec], codings: Codings = UNCODED) -> Level:
    """The deciding code's view of an opened tier for blocks of these groups."""
    traits = tier.traits
    room = _room_of(tier) if isinstance(tier, SupportsScan) else None
    pool = None if room else SlotPool(traits.slots, null_slot=isinstance(tier, SupportsArray))
    geometry, granules = (
        (tier.geometry, tier.granules_mapped) if isinstance(tier, SupportsRemap) else (None, frozenset())
    )
    if pool and geometry:
        pool.withdraw({*range(geometry.slots)}.difference(*geometry.slots_whole(granules)))
    stride_bytes = geometry.stride_bytes if geometry else tier.stride_bytes if isinstance(tier, SupportsSlots) else 0
    blocks = max(1, traits.capacity_bytes // (stride_bytes or codings.slot_bytes_mean(specs)))
    return Level(
        name=config.name,
        policy=POLICIES.make(config.policy, blocks),
        policy_name=config.policy,
        policy_blocks=blocks,
        batch_bytes=traits.batch_bytes,
        capacity_bytes=traits.capacity_bytes,
        stride_bytes=stride_bytes,
        pool=pool,
        room=room,
        codings=codings,
        host_addressable=traits.host_addressable,
        reads_below=reads_in_place(config),
        geometry=geometry,
        granules=set(granules),
        low_watermark=config.low_watermark,
        high_watermark=config.high_watermark,
        scrub_bytes_per_s=config.scrub_bytes_per_s if isinstance(config, LmdbTierConfig) else 0,
        gate=gate_of(config, blocks, _file_system_bytes(config)),
    )


def _room_of(tier: Any) -> Room:
    """Of a tier that SupportsScan."""
    changes = isinstance(tier, SupportsCapacity)
    capacities = (lambda: (tier.capacity_bytes, tier.traits.capacity_bytes)) if changes else None
    strides = tier.stride_bytes_at if isinstance(tier, SupportsStrides) else None
    written = tier.written if isinstance(tier, SupportsMeter) else None
    return Room(tier.room, tier.neighbours, tier.used_bytes, tier.excess_bytes, capacities, strides, written)


def _file_system_bytes(config: TierConfig) -> int:
    """Of a store; 0 of memory. Imports only what the tier needs."""
    if not isinstance(config, LmdbTierConfig):
        return 0
    from kvtier.tiers.lmdb.meter import file_system_bytes

    return file_system_bytes(config.path)
