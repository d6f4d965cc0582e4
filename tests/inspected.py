"""A store for tests of `kvtier inspect`, and the look at it."""

import json
from pathlib import Path
from typing import Any

import cbor2
import pytest

from kvtier.cli.cmd_inspect import inspect
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.index import Change, Index

FIELDS = {"name": "tiny", "weights_epoch": "v1", "groups": [{"kind": "full"}]}
PLACE, AT_MS = 77, 1_700_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with two namespaces and two size classes; of a third the records are left, not the name."""
    store = StoreDriver(tmp_path / "s", durability="batch")
    store.namespace = store.namespaces.id_of(b"1" * 32, cbor2.dumps(FIELDS))
    store.write(range(10), 5000)
    store.namespace = store.namespaces.id_of(b"2" * 32, b"\xffnot CBOR")
    store.write(range(10, 13), 4096)
    store.namespace = store.namespaces.id_of(b"3" * 32, b"")
    store.write(range(20, 24), 4096)
    store.tier.drop(store.namespace)
    store.close()
    return tmp_path / "s"


def report(capsys: pytest.CaptureFixture[str], path: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    code = inspect(path, True, **options)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return code, json.loads(out)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def change(folder: Path, rows: Change) -> None:
    index = Index.open(folder / "index", "none", 1 << 20)
    index.commit(rows)
    index.close()
