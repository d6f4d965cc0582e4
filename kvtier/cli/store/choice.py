"""Which of a store's namespaces an operator means: by fingerprint, the beginning of one, or the model's name.

Pure. A namespace is a number of the store's, with a fingerprint of 32 bytes and a description.
"""

from collections.abc import Mapping, Sequence

from kvtier.blocks import plain_cbor
from kvtier.cli.paper import plain
from kvtier.errors import UsageError

FINGERPRINT_DIGITS_MIN = 4

Namespaces = Mapping[int, tuple[bytes, bytes]]  # id -> (fingerprint, description)


def name_of(description: bytes) -> str:
    """The model's name; empty if the engine described the namespace in another way."""
    try:
        fields = plain_cbor.loads(description)
    except ValueError:
        return ""
    return str(fields.get("name", "")) if isinstance(fields, dict) else ""


def chosen(namespaces: Namespaces, wanted: Sequence[str]) -> list[int]:
    """The ids of the namespaces that `wanted` names, each once, in its order.

    Raises UsageError, with the namespaces there are, for a word that names none, or more than one.
    """
    found: dict[int, None] = {}
    for word in wanted:
        matching = [tier_id for tier_id, identity in namespaces.items() if _means(word, *identity)]
        if len(matching) != 1:
            raise UsageError(_problem(namespaces, word, matching))
        found[matching[0]] = None
    return list(found)


def _means(word: str, fingerprint: bytes, description: bytes) -> bool:
    by_fingerprint = len(word) >= FINGERPRINT_DIGITS_MIN and fingerprint.hex().startswith(word.lower())
    return by_fingerprint or (bool(word) and name_of(description) == word)


def _problem(namespaces: Namespaces, word: str, matching: Sequence[int]) -> str:
    if matching:
        told = "\n".join(_line(*namespaces[tier_id]) for tier_id in matching)
        return f"--namespace {word}: {len(matching)} namespaces are meant by it; give a fingerprint:\n{told}"
    told = "\n".join(_line(*identity) for identity in namespaces.values()) or "it has none"
    return f"--namespace {word}: the store has no such namespace; it has:\n{told}"


def _line(fingerprint: bytes, description: bytes) -> str:
    return f"{fingerprint.hex()} {plain(name_of(description))}".rstrip()
