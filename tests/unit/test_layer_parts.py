"""How blocks are cut into the parts that a device's stream brings one after the other."""

import pytest

from kvtier.blocks.layer_parts import layer_parts
from kvtier.blocks.spec import LAYOUTS, block_specs
from kvtier.types import GroupSpec, LayerPart, ModelSpec


def specs(*groups, layout="layer_token_major"):
    return block_specs(ModelSpec("m", "v1", groups, layout))


def full(layers, kind="full"):
    return GroupSpec(kind, layers, 2 if kind == "full" else 1, 8, "float32", 4)


@pytest.mark.parametrize("layout", ["layer_token_major", "layer_head_major"])
def test_a_layer_is_a_part_of_its_own(layout):
    """Layer 0 has to wait for all layers, or for bytes that are not its own."""
    assert layer_parts(specs(full((0, 1, 2)), layout=layout), 1) == (
        LayerPart(0, (0,), 0, 512),
        LayerPart(0, (1,), 512, 512),
        LayerPart(0, (2,), 1024, 512),
    )


def test_layers_that_are_too_short_for_the_link_come_together():
    """A prefix of small layers crosses the link at a tenth of its speed."""
    parts = layer_parts(specs(full((0, 1, 2, 3, 4))), 1000)
    assert [(part.layers, part.offset_bytes, part.length_bytes) for part in parts] == [
        ((0, 1), 0, 1024),
        ((2, 3), 1024, 1024),
        ((4,), 2048, 512),
    ]


def test_a_layout_that_mixes_the_layers_has_one_part():
    """The bytes of one layer are cut out of a block in which they do not lie together."""
    (part,) = layer_parts(specs(full((0, 1, 2)), layout="token_major"), 1)
    assert (part.layers, part.offset_bytes, part.length_bytes) == ((0, 1, 2), 0, 1536)


def test_groups_come_in_the_order_of_the_model():
    """The layer that is needed first comes last, because its group does."""
    parts = layer_parts(specs(full((1, 3)), full((0, 2), "mla")), 1)
    assert [(part.group, part.layers) for part in parts] == [(1, (0,)), (0, (1,)), (1, (2,)), (0, (3,))]


def test_layers_lie_where_their_group_lists_them():
    """Of a group that lists its layers in another order, a wrong layer is told to have come."""
    parts = layer_parts(specs(full((2, 0))), 1)
    assert [(part.layers, part.offset_bytes) for part in parts] == [((0,), 512), ((2,), 0)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part_bytes_min", [1, 700, 10**6])
def test_the_parts_are_the_whole_block(layout, part_bytes_min):
    """A byte of a block never comes."""
    for spec in specs(full((0, 2)), full((1, 3, 4), "mla"), layout=layout):
        parts = [part for part in layer_parts([spec], part_bytes_min) if part.group == spec.group]
        covered = sorted(i for p in parts for i in range(p.offset_bytes, p.offset_bytes + p.length_bytes))
        assert covered == list(range(spec.block_bytes))
        assert sorted(layer for part in parts for layer in part.layers) == sorted({s.layer for s in spec.segments})
