"""The YAML file itself: what is wrong with it is told by line and column."""

from pathlib import Path

import pytest

from kvtier.config.document import DOCUMENT_BYTES_MAX, parse_document, path_text, read_document
from kvtier.errors import ConfigError


def test_lines_are_noted() -> None:
    """`config show --origin` would send the reader to the wrong line."""
    document = parse_document(b"model:\n  name: m\ntiers:\n  - type: gpu\n    capacity: 1GiB\n", "k.yaml")
    assert document.data == {"model": {"name": "m"}, "tiers": [{"type": "gpu", "capacity": "1GiB"}]}
    assert document.lines["tiers", 0, "capacity"] == 5
    assert path_text(("tiers", 0, "capacity")) == "tiers[0].capacity"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model:\n  name: m\n bad", r"k\.yaml, line 3, column 2: not valid YAML"),
        ("model: {name: m", "line 1, column 16"),
        ("model:\n\tname: m", "line 2, column 1"),
        ("a: 1\nb: {c: 1,\n  c: 2}", r"k\.yaml:3: the key 'b\.c' is given twice, first in line 2"),
        ("", "is empty"),
        ("# nothing but a comment\n", "is empty"),
        ("- a\n- b\n", "not a mapping"),
        ("just words", "not a mapping"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("a: !!python/object:os.system {}", "tag"),
        ("a: !!binary 'x'", r"k\.yaml"),
        ("a: 2024-99-99", "in quotes"),
        ("? [1, 2]\n: 3", "a key is not a word"),
        ("a: &x [*x]", "deeply nested"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: " + "9" * 5000, "in quotes"),
        ("a: *nowhere", "undefined alias"),
        ("a: \x00", r"k\.yaml"),
    ],
)
def test_broken_files_are_told_with_their_place(text: str, says: str) -> None:
    """A user's slip in the YAML would show a traceback, or be half understood."""
    with pytest.raises(ConfigError, match=says):
        parse_document(text.encode(), "k.yaml")


def test_aliases_cannot_explode() -> None:
    """A page of aliases to aliases would fill the memory."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="too many"):
        parse_document("\n".join(lines).encode(), "k.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing, huge, binary or forbidden file would show a traceback."""
    (tmp_path / "huge").write_bytes(b"#" * (DOCUMENT_BYTES_MAX + 1))
    (tmp_path / "binary").write_bytes(b"model: \xff\xfe")
    for name, says in {"absent": "No such file", ".": "directory", "huge": "1 MiB", "binary": "UTF-8"}.items():
        with pytest.raises(ConfigError, match=says):
            read_document(tmp_path / name)
