"""A store whose maker was killed before it was one: nothing, for every verb, and anew for whoever writes to it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.cmd_export import export
from kvtier.cli.cmd_fsck import fsck
from kvtier.cli.cmd_gc import gc
from kvtier.cli.cmd_import import import_
from kvtier.cli.cmd_inspect import inspect
from kvtier.errors import BundleError, StoreFormatError, UsageError
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb import opening
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.folder import UnfinishedStore
from kvtier.tiers.lmdb.index import Index
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.lock import StoreLock
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.types import Status

# where its maker dies: on the n-th call of this
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "the lock is there": (opening, "sync_folder", 1),
    "the index has no tables": (Index, "_following", 1),
    "the index has two tables": (Index, "_following", 4),
    "the slab has a page": (os, "truncate", 1),
    "the slab is there": (BlockFile, "punches", 1),
    "payloads have a table": (InlineSlab, "_over", 1),
    "nothing says who opened it": (StoreLock, "write_state", 1),
    "no header": (OpenStore, "_commit_stock", 1),
}
OF_INLINE = {"payloads have a table"}
OF_SLAB = {"the slab has a page", "the slab is there"}
MADE = [
    (moment, payload)
    for moment in MOMENTS
    for payload in ("slab", "inline")
    if moment not in (OF_INLINE if payload == "slab" else OF_SLAB)
]


def dying(call: Callable[..., object], calls: int) -> Callable[..., object]:
    """The process is gone on the n-th call, with nothing undone."""
    left = [calls]

    def died(*args: object, **options: object) -> object:
        left[0] -= 1
        if not left[0]:
            os._exit(9)
        return call(*args, **options)

    return died


def die_at(moment: str, folder: Path, payload: str) -> None:
    owner, name, calls = MOMENTS[moment]
    child = os.fork()
    if not child:
        call = getattr(owner, name)
        died = dying(call, calls)
        setattr(owner, name, died if name != "_over" else classmethod(lambda cls, *args, **options: died()))
        StoreDriver(folder, payload=payload)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, "it was not killed where it should be"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    store = StoreDriver(folder / "s", durability="batch")
    store.write(range(5))
    store.close()
    assert export(folder / "s", folder / "b") == 0
    return folder / "b"


@pytest.mark.parametrize(("moment", "payload"), MADE)
def test_it_is_no_store_and_no_damage(
    tmp_path: Path, bundle: Path, capsys: pytest.CaptureFixture[str], moment: str, payload: str
) -> None:
    """An operator would be told of damage where nothing ever was, in a folder that is not the store's; and an import
    that was killed early could only go on after somebody had removed the folder."""
    folder = tmp_path / "s"
    die_at(moment, folder, payload)
    for verb in (fsck, gc, lambda folder: fsck(folder, mend=True)):
        with pytest.raises(UnfinishedStore, match="its creation is not finished") as caught:
            verb(folder)
        assert str(caught.value).startswith(f"{folder}: ")
    assert inspect(folder) == 2
    assert f"{folder}: its creation is not finished" in capsys.readouterr().err
    with pytest.raises(StoreFormatError, match="not finished"):
        export(folder, tmp_path / "of nothing")
    with pytest.raises(UsageError, match="there is no store; say with --capacity"):
        import_(folder, bundle)
    assert import_(folder, bundle, capacity="4MiB") == 0
    assert fsck(folder) == 0
    assert not (folder / "payload").exists(), "imports make a slab"
    assert "5 of 5 blocks are sound" in capsys.readouterr().out


def test_a_bundle_that_lies_makes_no_store_of_it(tmp_path: Path, bundle: Path) -> None:
    """A store would be made for a bundle that is not to be believed, if a YAML file says where."""
    folder, lies, yaml = tmp_path / "s", tmp_path / "lies", tmp_path / "kvtier.yaml"
    die_at("the index has two tables", folder, "slab")
    shutil.copytree(bundle, lies)
    part = next(lies.glob("*.frames"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    model = "{name: m, weights_epoch: v1, layers: 2, kv_heads: 2, head_dim: 64, dtype: float32}"
    tiers = f"[{{type: gpu, capacity: 4MiB}}, {{type: lmdb, path: {folder}, capacity: 8MiB}}]"
    yaml.write_text(f"model: {model}\ntiers: {tiers}\n")
    with pytest.raises(BundleError):
        import_(yaml, lies)
    with pytest.raises(UnfinishedStore):
        fsck(yaml)
    assert import_(yaml, bundle) == 0
    assert fsck(yaml) == 0


@pytest.mark.parametrize(("moment", "payload"), MADE)
def test_a_cache_makes_it_anew(tmp_path: Path, moment: str, payload: str) -> None:
    """A cache that was killed while it started for the first time could never start again, or not otherwise."""
    for number, kind in enumerate(("slab", "inline")):
        folder = tmp_path / str(number)
        die_at(moment, folder, payload)
        store = StoreDriver(folder, payload=kind)
        assert store.write([1]) == [Status.DONE]
        store.reopen()
        assert store.read([1]) == [Status.DONE]
        store.close()
        assert {path.name for path in folder.iterdir()} == {"lock", "index", {"inline": "payload"}.get(kind, kind)}


def test_an_empty_lock_beside_blocks(tmp_path: Path) -> None:
    """A store full of blocks would be called one that holds nothing, and an import make it anew."""
    store = StoreDriver(tmp_path / "s", durability="batch")
    store.write([1])
    store.close()
    (tmp_path / "s" / "lock").write_bytes(b"")
    assert fsck(tmp_path / "s") == 1, "it is damage that the lock says nothing"
