"""`kvtier export`: writes blocks of a store into a bundle that another machine can import.

Read-only for the store, and also beside a live writer; goes on where an earlier run was interrupted. Exit codes: 0
done, 1 done but for bad blocks, 2 nothing could be done. docs/store.md specifies bundles.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from kvtier.cli.inspect.bar import progress_bar
from kvtier.cli.inspect.pace import Pace, parse_rate
from kvtier.cli.inspect.show import size
from kvtier.cli.store.choice import chosen
from kvtier.cli.store.target import folder_of
from kvtier.tiers.bundle.manifest import BundledNamespace, Manifest, digest_of
from kvtier.tiers.bundle.writing import BundleWriter, Outgoing
from kvtier.tiers.lmdb.audit import BATCH_BYTES, Verdict
from kvtier.tiers.lmdb.foreign import Overtaken
from kvtier.tiers.lmdb.layout import CODEC_NUMBERS
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.tiers.lmdb.outgoing import Block, OutgoingBlocks

DONE, FINDINGS = 0, 1


def export(
    path: Path, bundle: Path, namespaces: Sequence[str] = (), rate: str | None = None, json_output: bool = False
) -> int:
    """Write the blocks of the store in `path` (or of a YAML file) into the folder `bundle`.

    namespaces: only these, by fingerprint or name. rate: bytes a second at most.
    Raises UsageError, ConfigError, BundleError or StoreError.
    """
    pace = Pace(None if rate is None else parse_rate(rate))
    folder = folder_of(path)
    try:
        report = asyncio.run(_exported(folder, bundle, namespaces, pace, json_output, live=False))
    except Overtaken:  # a writer came; what was written until then stays
        report = asyncio.run(_exported(folder, bundle, namespaces, pace, json_output, live=True))
    if json_output:
        print(json.dumps(report))
    else:
        _show(report)
    return FINDINGS if report["corrupt"] or report["unreadable"] else DONE


async def _exported(
    folder: Path, bundle: Path, namespaces: Sequence[str], pace: Pace, quiet: bool, live: bool
) -> dict[str, Any]:
    with closing(StoreReader.open(folder, live)) as reader:
        known = reader.namespaces()
        ids = chosen(known, namespaces) if namespaces else list(known)
        named = tuple(BundledNamespace(*known[tier_id]) for tier_id in ids)
        wanted = Manifest(reader.header.store_id, time.time_ns() // 10**6, named)
        writer = await BundleWriter.begin(bundle, wanted)
        try:
            before = writer.manifest.blocks
            blocks = OutgoingBlocks(reader, ids, writer.manifest.generation, pace.batch_bytes(BATCH_BYTES))
            await _write(writer, reader, blocks, pace, quiet)
            reader.expect_undisturbed()
            manifest = await writer.finish()
        finally:
            await writer.close()
        return {
            "path": str(folder),
            "bundle": str(bundle),
            "digest": digest_of(manifest).hex(),
            "blocks": manifest.blocks,
            "payload_bytes": manifest.payload_bytes,
            "bundle_bytes": manifest.length_bytes,
            "blocks_before": before,
            **{verdict.value: blocks.verdicts[verdict] for verdict in Verdict if verdict is not Verdict.SOUND},
            "unknown_records": reader.unknown_records,
        }


async def _write(writer: BundleWriter, reader: StoreReader, blocks: OutgoingBlocks, pace: Pace, quiet: bool) -> None:
    done = done_bytes = 0
    with progress_bar(quiet, reading="exporting") as advance:
        batches = blocks.batches()
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            await writer.add([_outgoing(reader, block) for block in batch])
            done += len(batch)
            batch_bytes = sum(block.stored.stride_bytes for block in batch)
            done_bytes += batch_bytes
            advance(done, len(blocks), done_bytes)
            await asyncio.to_thread(pace.spend, batch_bytes)


def _outgoing(reader: StoreReader, block: Block) -> Outgoing:
    record = block.stored.record
    fingerprint, _ = reader.names[record.namespace]
    coded = record.coded
    if coded is None:
        return Outgoing(fingerprint, record.key, block.payload, record.generation)
    form = CODEC_NUMBERS[coded.codec], coded.raw_bytes, coded.stride_bytes
    return Outgoing(fingerprint, record.key, block.payload, record.generation, *form)


def _show(report: dict[str, Any]) -> None:
    before = f", {report['blocks_before']:,} of them by an earlier run" if report["blocks_before"] else ""
    print(f"{report['bundle']}: {report['blocks']:,} blocks, {size(report['payload_bytes'])}{before}")
    print(f"digest {report['digest']}")
    for name, what in (
        ("moved", "left the store meanwhile"),
        ("corrupt", "are corrupt"),
        ("unreadable", "cannot be read"),
    ):
        if report[name]:
            print(f"left out: {report[name]:,} blocks that {what}")
    if report["unknown_records"]:
        print(f"left out: {report['unknown_records']:,} records of a later version")
