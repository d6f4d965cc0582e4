"""`kvtier import`: brings the blocks of a bundle into a store that nobody has open, or into a new one.

Goes on where an earlier run was interrupted. Exit codes: 0 done, 1 done but for blocks that the disk refused, 2 the
bundle is not to be believed, or nothing could be done. docs/store.md specifies bundles.
"""

import asyncio
import json
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.blocks.namespace import NamespaceTable
from kvtier.cli.inspect.bar import progress_bar
from kvtier.cli.inspect.show import size
from kvtier.cli.store.importing import BundledSlots, Imported, Importer, believed
from kvtier.cli.store.target import tier_of
from kvtier.config.units import Rejected, parse_bytes, readable_bytes
from kvtier.errors import BundleError, UsageError
from kvtier.tiers.bundle.manifest import Manifest, digest_of
from kvtier.tiers.bundle.reading import read_manifest
from kvtier.tiers.lmdb.folder import UnfinishedStore, never_held
from kvtier.tiers.lmdb.foreign import header_of
from kvtier.tiers.lmdb.layout import FORMATS, LOCK_NAME, Header
from kvtier.tiers.lmdb.settings import Settings
from kvtier.tiers.lmdb.store import LmdbTier

DONE, FINDINGS = 0, 1
WHERE = "import"  # in messages


@dataclass(frozen=True, slots=True)
class Target:
    """The store that blocks go to, as it is or will be. `exists`: it is there."""

    folder: Path
    exists: bool
    capacity_bytes: int
    min_free_bytes: int
    durability: str
    payload: str

    def expect_room_for(self, bundle: Path, manifest: Manifest) -> None:
        """Raises BundleError or ConfigError, before a byte of the blocks is read, if the store could not take them."""
        if manifest.block_bytes_max > self.capacity_bytes:
            raise BundleError(str(bundle), "one of its blocks is larger than the store", "Give the store more capacity")
        if not self.exists:
            wanted = self.capacity_bytes, manifest.block_bytes_max, self.min_free_bytes, self.durability
            Settings(WHERE, *wanted, io_threads=1, payload=self.payload).check_new()


def import_(
    path: Path,
    bundle: Path,
    capacity: str | None = None,
    min_free: str | None = None,
    digest: str | None = None,
    json_output: bool = False,
) -> int:
    """Bring the blocks of the folder `bundle` into the store in `path`, or that of a YAML file.

    capacity: of a store that does not exist yet, or the one that it has. min_free: what the disk is to keep free, if no
    YAML file says it. digest: refuse every bundle but that one. Raises UsageError, ConfigError, BundleError,
    StoreLocked or StoreError.
    """
    target = _target(path, capacity, min_free)
    manifest, found = asyncio.run(_imported(target, bundle, digest, json_output))
    if json_output:
        print(json.dumps(_report(target, bundle, manifest, found)))
    else:
        _show(target, manifest, found)
    return FINDINGS if found.failed else DONE


def _target(path: Path, capacity: str | None, min_free: str | None) -> Target:
    tier = tier_of(path)
    folder = path if tier is None else tier.path
    exists = (folder / LOCK_NAME).is_file() and not never_held(folder)
    if tier is not None:
        if capacity is not None or min_free is not None:
            raise UsageError(f"{path} says what the store may take; leave --capacity and --min-free out")
        return Target(folder, exists, tier.capacity_bytes, tier.min_free_bytes, tier.durability, tier.payload)
    min_free_bytes = 0 if min_free is None else _bytes("--min-free", min_free)
    header = _header(folder) if exists else None
    if header is not None:
        if capacity is not None:
            _expect_capacity(folder, header.capacity_bytes, capacity)
        payload = next(name for name, version in FORMATS.items() if version == header.format)
        return Target(folder, True, header.capacity_bytes, min_free_bytes, header.durability, payload)
    if capacity is None:
        raise UsageError(f"{folder}: there is no store; say with --capacity how much of the disk a new one may take")
    return Target(folder, False, _bytes("--capacity", capacity), min_free_bytes, "batch", "slab")


def _header(folder: Path) -> Header | None:
    """None of a store whose creation was cut off: it is made anew."""
    try:
        return header_of(folder)
    except UnfinishedStore:
        return None


def _expect_capacity(folder: Path, kept_bytes: int, capacity: str) -> None:
    """Raises UsageError unless the store has what is asked for, as one has whose import is going on."""
    if _bytes("--capacity", capacity) != kept_bytes:
        raise UsageError(
            f"{folder}: the store exists and keeps its capacity, {readable_bytes(kept_bytes)}; leave --capacity out"
        )


async def _imported(target: Target, bundle: Path, digest: str | None, quiet: bool) -> tuple[Manifest, Imported]:
    manifest = await _manifest(bundle, digest)
    if not manifest.blocks:
        return manifest, Imported()
    target.expect_room_for(bundle, manifest)
    names = NamespaceTable()
    slots = BundledSlots()
    opening = partial(_opened, target, manifest, names, slots)
    with ExitStack() as undo:
        tier = undo.enter_context(opening()) if target.exists else None  # one that is in use is refused at once
        with progress_bar(quiet, reading="checking") as advance:
            contents = await believed(bundle, manifest, slots, advance)
        if tier is None:
            tier = undo.enter_context(opening())
        with progress_bar(quiet, reading="importing") as advance:
            return manifest, await Importer(bundle, manifest, tier, names).run(contents, advance)


async def _manifest(bundle: Path, digest: str | None) -> Manifest:
    manifest = await read_manifest(bundle)
    if digest is not None and digest_of(manifest).hex() != digest.strip().lower():
        raise BundleError(str(bundle), f"its digest is {digest_of(manifest).hex()}, another one", "Do not trust it")
    if not manifest.complete:
        raise BundleError(str(bundle), "its export was interrupted", "Run `kvtier export` again: it goes on")
    return manifest


def _opened(target: Target, manifest: Manifest, names: NamespaceTable, slots: BundledSlots) -> "closing[LmdbTier]":
    """The store, open for as long as the `with`."""
    return closing(
        LmdbTier.open(
            target.folder,
            name=WHERE,
            namespaces=names,
            capacity_bytes=target.capacity_bytes,
            length_bytes_max=manifest.block_bytes_max,
            min_free_bytes=target.min_free_bytes,
            durability=target.durability,
            payload=target.payload,
            codings=slots,
        )
    )


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except Rejected as error:
        raise UsageError(f"{option}: {error}") from None


def _report(target: Target, bundle: Path, manifest: Manifest, found: Imported) -> dict[str, Any]:
    of_bundle = {"digest": digest_of(manifest).hex(), "blocks": manifest.blocks}
    return {"path": str(target.folder), "bundle": str(bundle)} | of_bundle | asdict(found)


def _show(target: Target, manifest: Manifest, found: Imported) -> None:
    of_all = f"{manifest.blocks:,} blocks, {size(manifest.payload_bytes)}"
    print(f"{target.folder}: {found.imported:,} blocks were imported, of {of_all}")
    for name, what in (
        ("present", "were there already"),
        ("repeated", "come again in the bundle, and newer"),
        ("left_out", "were left out: there is no room for them, and they are the oldest"),
        ("no_room", "found no room"),
        ("failed", "were refused by the disk"),
    ):
        if count := getattr(found, name):
            print(f"{count:,} {what}")
