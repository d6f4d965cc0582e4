"""How layers become groups; that vLLM groups alike is in `test_sizing_oracle`."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvtier.cache.grouping import aligned_to_state, group_layers
from kvtier.cache.specs import FullAttention, Mamba, Mla, SlidingWindow, Spec
from kvtier.errors import ConfigError

FULL = FullAttention(block_tokens=16, kv_heads=8, head_dim=128, dtype="bfloat16")
WINDOW = SlidingWindow(block_tokens=16, kv_heads=8, head_dim=128, dtype="bfloat16", window=512)


def state(elements, **how):
    return Mamba(block_tokens=16, shapes=((elements,),), dtypes=("bfloat16",), **how)


def named(*specs):
    return {f"layers.{index}": spec for index, spec in enumerate(specs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Spec):
    """A kind of layer that this package does not have: 100 bytes a token."""

    kind: ClassVar[str] = "summary"

    @property
    def content_bytes(self):
        return self.block_tokens * 100

    def blocks_max(self, tokens_max, tokens_in_flight):
        return 1


def test_groups_take_every_nth_layer():
    """A pipeline stage would have all layers of one group and none of the next."""
    grouping = group_layers(named(FULL, *[WINDOW] * 4, FULL))
    assert [group.layers for group in grouping.groups] == [
        ("layers.0", "layers.5"),
        ("layers.1", "layers.3"),
        ("layers.2", "layers.4"),
    ]


@pytest.mark.parametrize(("windows", "widths"), [(2, [2, 2]), (3, [2, 2, 1]), (4, [2, 2, 2]), (5, [2, 2, 2, 1])])
def test_the_fewest_layers_are_the_width(windows, widths):
    """A group is so wide that most of a block is padding."""
    grouping = group_layers(named(FULL, FULL, *[WINDOW] * windows))
    assert [len(group.layers) for group in grouping.groups] == widths


def test_a_few_layers_more_are_the_width():
    """Twelve layers and thirteen make three groups, and the third is almost empty."""
    grouping = group_layers(named(*[WINDOW] * 12, *[FULL] * 13))
    assert [len(group.layers) for group in grouping.groups] == [12, 13]
    assert grouping.block_bytes == 13 * FULL.page_bytes


def test_a_value_as_wide_as_a_key_need_not_be_said():
    """The same layer, said in two ways, makes two groups."""
    said = FullAttention(block_tokens=16, kv_heads=8, head_dim=128, value_dim=128, dtype="bfloat16")
    assert len(group_layers(named(FULL, said, WINDOW, WINDOW)).groups) == 2


def test_states_kept_per_block_keep_their_blocks():
    """Aligning the attention blocks makes a state per block thirty times as rare."""
    layers = aligned_to_state(named(FULL, state(200_000, mode="all")))
    assert layers["layers.0"].block_tokens == 112
    assert layers["layers.1"].block_tokens == 16
    assert layers["layers.0"].page_bytes == layers["layers.1"].page_bytes


def test_a_latent_beside_a_state_has_blocks_of_128():
    """The kernels of latents read 128 tokens at once, and a block ends in between."""
    latent = Mla(block_tokens=16, latent_dim=576, dtype="bfloat16")
    layers = aligned_to_state(named(latent, state(1000)))
    assert layers["layers.0"].block_tokens == 128
    assert layers["layers.1"].page_bytes == layers["layers.0"].page_bytes == 128 * 576 * 2


def test_attention_of_two_block_sizes_is_not_aligned():
    """One of two block sizes is chosen silently."""
    other = FullAttention(block_tokens=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    with pytest.raises(ConfigError, match="blocks of 16, 32 tokens"):
        aligned_to_state(named(FULL, other, state(1000)))


def test_a_latent_page_that_cannot_be_padded_is_refused():
    """A latent gets a page that its kernels cannot step through."""
    latent = Mla(block_tokens=16, latent_dim=576, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"layers\.0: a latent page of 18432 bytes does not divide"):
        group_layers(named(latent, state(100_000)))


def test_padding_that_is_there_already_grows():
    """A layer that came padded is given more tokens, and its page stays as it was."""
    padded = FullAttention(block_tokens=16, kv_heads=1, head_dim=128, dtype="bfloat16", padded_bytes=16_384)
    grouping = group_layers(named(padded, WINDOW))
    assert grouping.layers["layers.0"].page_bytes == WINDOW.page_bytes
    assert grouping.layers["layers.0"].block_tokens == 16


def test_a_kind_that_is_not_ours_is_grouped():
    """A new attention layout could not be sized without changes here."""
    grouping = group_layers(named(FULL, Summary(block_tokens=16), Summary(block_tokens=32), Summary(block_tokens=16)))
    assert [group.layers for group in grouping.groups] == [("layers.0",), ("layers.1",), ("layers.3",), ("layers.2",)]
    assert {spec.page_bytes for spec in grouping.layers.values()} == {FULL.page_bytes}
