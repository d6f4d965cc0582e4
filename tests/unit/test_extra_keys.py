"""What besides its tokens names a block: items, embeddings, and what others register."""

import hashlib

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from kvtier.blocks.chain import HashChain, chain
from kvtier.blocks.extra_keys import PRODUCERS, ExtraKeys, MultiModalItem, register_extra_keys
from kvtier.errors import UsageError


@pytest.fixture(autouse=True)
def _own_producers(monkeypatch):
    monkeypatch.setattr(PRODUCERS, "_entries", {})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=20), st.integers(1, 40))
def test_items_are_found_in_every_block_they_touch(gaps_and_lengths, block_tokens):
    """An image that spans blocks, or shares one, is missing from a key, or is in one it does not touch."""
    items, at = [], 0
    for gap, length in gaps_and_lengths:
        items.append(MultiModalItem(f"item {len(items)}", at + gap, length))
        at += gap + length
    extra = ExtraKeys(items=tuple(items))
    for start in range(0, at + 2 * block_tokens, block_tokens):
        end = start + block_tokens
        touching = [i for i in items if i.offset < end and start < i.offset + i.length]
        expected = tuple(("mm", i.identifier, i.offset - start) for i in touching)
        assert extra.of_block(start, end) == (expected or None)


def test_a_block_looks_at_its_own_items_only():
    """A long prompt with many images takes time that grows with their product."""
    looked = []
    items = tuple(MultiModalItem(str(at), at * 4, 4) for at in range(1000))
    extra = ExtraKeys(items=items)

    class Watched(tuple):
        def __getitem__(self, key):
            looked.append(key)
            return super().__getitem__(key)

        def __iter__(self):
            looked.extend(range(len(self)))
            return super().__iter__()

    object.__setattr__(extra, "items", Watched(items))
    assert extra.of_block(3996, 4000) == (("mm", "999", 0),)
    assert len(looked) <= 3


def test_items_are_as_vllm_expects_them():
    """Items in another order silently leave one out of the key, as vLLM would."""
    a, b = MultiModalItem("a", 4, 4), MultiModalItem("b", 8, 2)
    for items in ((b, a), (a, MultiModalItem("b", 7, 2)), (a, a)):
        with pytest.raises(UsageError, match="by offset, without overlap"):
            ExtraKeys(items=items)
    for wrong in (MultiModalItem("a", -1, 2), MultiModalItem("a", 1, -2), MultiModalItem("a", 1.0, 2)):
        with pytest.raises(UsageError, match="offset and length"):
            ExtraKeys(items=(wrong,))
    with pytest.raises(UsageError, match="identifier"):
        ExtraKeys(items=(MultiModalItem(None, 1, 2),))
    ExtraKeys(items=(a, b))


def test_an_empty_salt_is_refused():
    """A tenant whose name got lost shares with everybody, as vLLM's Request lets him."""
    with pytest.raises(UsageError, match=r"cache_salt is empty.*pass None for no salt"):
        ExtraKeys(cache_salt="")
    assert list(chain(range(4), 4, extra=ExtraKeys())) == list(chain(range(4), 4))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8"])
def test_embeddings_are_named_by_their_bytes(dtype):
    """A tensor and an array of the same bytes get different keys, or a view is read as if it were contiguous."""
    tensor = torch.arange(48).to(getattr(torch, dtype)).reshape(6, 8)
    plain = tensor.view(torch.uint8).numpy().tobytes()
    row_bytes = len(plain) // 6
    views = [tensor, tensor.t().contiguous().t(), torch.cat([tensor, tensor], 1)[:, :8]]
    if tensor.is_floating_point():
        views.append(tensor.clone().requires_grad_())
    if dtype != "bfloat16":
        views += [
            tensor.numpy(),
            np.asfortranarray(tensor.numpy()),
            tensor.numpy().astype(tensor.numpy().dtype.newbyteorder(">")),
        ]
    for view in views:
        extra = ExtraKeys(prompt_embeds=view)
        assert extra.of_block(2, 4) == (
            ("prompt_embeds", hashlib.sha256(plain[2 * row_bytes : 4 * row_bytes]).digest()),
        )
        assert extra.of_block(4, 8) == (("prompt_embeds", hashlib.sha256(plain[4 * row_bytes :]).digest()),)
        assert extra.of_block(8, 12) == (("prompt_embeds", hashlib.sha256(b"").digest()),)


def test_embeddings_are_digested_once():
    """Each question about a block hashes its embeddings anew."""
    rows = np.ones((8, 4), "float32")
    extra = ExtraKeys(prompt_embeds=rows)
    before = extra.of_block(0, 4)
    rows[:] = 2  # a caller must not; here it shows whether the rows are read again
    assert extra.of_block(0, 4) == before
    assert HashChain(4, extra=extra).extra_of(0) == before


def test_embeddings_of_other_kinds_are_refused():
    """A list or a flat array is named by something else than its numbers."""
    for wrong in ([[1.0, 2.0]], np.ones(4), torch.ones(2, 2, 2), np.array([[object()]]), np.array([["a"]]), "rows", 5):
        with pytest.raises(UsageError, match="prompt embeddings"):
            ExtraKeys(prompt_embeds=wrong)


def test_extra_keys_with_embeddings_can_be_compared():
    """Extra keys with arrays in them cannot be compared, or raise when they are."""
    rows = np.ones((2, 2))
    one, other = ExtraKeys(prompt_embeds=rows), ExtraKeys(prompt_embeds=rows)
    assert one != other
    assert len({one, other, one}) == 2


def test_producers_append_in_order_of_registration():
    """Two processes that register the same producers give different keys for one request."""
    register_extra_keys("speaker", lambda data, start, end: [("speaker", data)])
    register_extra_keys("notes", lambda data, start, end: [("note", at - start) for at in data if start <= at < end])
    extra = ExtraKeys(lora=("a", "/a"), cache_salt="s", data={"notes": (1, 3, 9), "speaker": "kim"})
    assert extra.of_block(0, 4) == (
        ("lora", "a", "/a"),
        ("cache_salt", "s"),
        ("speaker", "kim"),
        ("note", 1),
        ("note", 3),
    )
    assert extra.of_block(4, 8) == (("lora", "a", "/a"), ("speaker", "kim"))
    assert ExtraKeys(data={"notes": ()}).of_block(0, 4) is None
    assert list(chain(range(8), 4, extra=extra)) != list(chain(range(8), 4, extra=ExtraKeys(lora=("a", "/a"))))


def test_keys_that_are_equal_but_not_the_same_are_kept_apart():
    """A producer's 1 and True, which Python calls equal, share a name."""
    register_extra_keys("flag", lambda data, start, end: [("flag", data[start // 4])])
    flags = [1, True, 1.0, None]
    whole = HashChain(4, extra=ExtraKeys(data={"flag": flags}))
    whole.update([7] * 16)
    step = HashChain(4, extra=ExtraKeys(data={"flag": flags}))
    for stop in (4, 8, 12, 16):
        step.update([7] * stop)
    assert step.hashes == whole.hashes


def test_producers_that_cannot_work_are_refused():
    """A mistake in an extension makes keys that mean nothing, or a traceback of an encoder."""
    register_extra_keys("wild", lambda data, start, end: data)
    for wrong in ("wild", "", None, "two words"):
        with pytest.raises(UsageError, match="extra-key producer"):
            register_extra_keys(wrong, lambda data, start, end: [])
    with pytest.raises(UsageError, match="function"):
        register_extra_keys("other", 5)
    with pytest.raises(UsageError, match=r"no extra-key producer 'wilt'.*wild"):
        ExtraKeys(data={"wilt": 1})
    with pytest.raises(UsageError, match="no extra-key producer 5 is registered"):
        ExtraKeys(data={5: 1})
    with pytest.raises(UsageError, match="mapping"):
        ExtraKeys(data=[1])
    for hash_name in ("sha256_cbor", "sha256"):
        for made, said in (([5], "returns tuples"), ([(lambda: 0,)], "cannot be hashed as")):
            hashes = HashChain(4, hash_name, extra=ExtraKeys(data={"wild": made}))
            with pytest.raises(UsageError, match=said):
                hashes.update([7] * 8)
            assert hashes.hashes == []


def _broken_generator(data, start, end):
    yield ("note", 1)
    raise RuntimeError("half way")


@pytest.mark.parametrize(
    ("producer", "said", "cause"),
    [
        (
            lambda data, start, end: [("note", 1 // data)],
            "failed for tokens 0 to 4: ZeroDivisionError",
            ZeroDivisionError,
        ),
        (_broken_generator, "failed for tokens 0 to 4: RuntimeError", RuntimeError),
        (lambda data: [], "failed for tokens 0 to 4: TypeError", TypeError),
        (lambda data, start, end: None, "gave None; it returns tuples.*or an empty list", None),
        (lambda data, start, end: 5, "gave 5; it returns tuples", None),
        (lambda data, start, end: "note", "gave .*; it returns tuples", None),
    ],
)
def test_a_producer_that_fails_is_named(producer, said, cause):
    """A request ends in a traceback from code that the reader has never heard of."""
    register_extra_keys("faulty", producer)
    hashes = HashChain(4, extra=ExtraKeys(data={"faulty": 0}))
    with pytest.raises(UsageError, match=f"extra-key producer 'faulty' {said}") as caught:
        hashes.update([7] * 8)
    assert cause is None or isinstance(caught.value.__cause__, cause)
    assert hashes.hashes == []


def test_without_producers_one_is_told_how_to_add_one():
    """The list of known producers is empty, and that is all that one learns."""
    with pytest.raises(UsageError, match=r"'nope' is registered\. None is: register_extra_keys\(name, producer\)"):
        ExtraKeys(data={"nope": 1})
