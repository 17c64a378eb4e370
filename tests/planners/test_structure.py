"""Pairs of linear maps found by structure, on small programs."""

from __future__ import annotations

from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.planners.structure.linear_maps import input_embeddings, parameter_of
from shardweave.planners.structure.structure import parallel_pairs
from shardweave.tests.ir_text import step

PAIR = """
    param %up : tensor<16x8xf64>
    param %up.bias : tensor<16xf64>
    param %down : tensor<8x16xf64>
    param %down.bias : tensor<8xf64>
    input %x : tensor<4x8xf64>
    %ut = aten.permute(%up, dims = [1, 0]) : tensor<8x16xf64>
    %h = aten.addmm(%up.bias, %x, %ut) : tensor<4x16xf64>
    %a = aten.gelu(%h) : tensor<4x16xf64>
    %dt = aten.permute(%down, dims = [1, 0]) : tensor<16x8xf64>
    %y = aten.addmm(%down.bias, %a, %dt) : tensor<4x8xf64>
    output %y
"""


def pairs(text: str, size: int = 2) -> dict[str, str]:
    """By parameter name its cut over an axis `t`, as plans write it."""
    program = step(text)
    names = {slot.value: slot.name for slot in program.arguments}
    return {
        names[value]: str(ShardingAttr.of(Sharding(cut), shape_of(value)))
        .removeprefix("#dist.sharding<")
        .removesuffix(">")
        for value, cut in parallel_pairs(program, "t", size).items()
    }


def test_two_linear_maps_around_an_activation_are_a_pair() -> None:
    assert pairs(PAIR) == {
        "up": '[{"t"}, {}]',
        "up.bias": '[{"t"}]',
        "down": '[{}, {"t"}]',
    }


def test_pair_that_does_not_divide_is_cut_with_padding() -> None:
    assert pairs(PAIR, size=3) == {
        "up": '[{"t"} of 16, {}]',
        "up.bias": '[{"t"} of 16]',
        "down": '[{}, {"t"} of 16]',
    }


def test_op_that_needs_the_features_together_keeps_a_pair_apart() -> None:
    assert (
        pairs(PAIR.replace("aten.gelu(%h)", "aten._softmax(%h, dim = 1, half_to_float = false)"))
        == {}
    )


def test_gated_pair_is_cut_together() -> None:
    text = """
        param %gate : tensor<8x16xf64>
        param %up : tensor<8x16xf64>
        param %down : tensor<16x8xf64>
        input %x : tensor<4x8xf64>
        %g = aten.mm(%x, %gate) : tensor<4x16xf64>
        %s = aten.silu(%g) : tensor<4x16xf64>
        %u = aten.mm(%x, %up) : tensor<4x16xf64>
        %h = aten.mul.Tensor(%s, %u) : tensor<4x16xf64>
        %y = aten.mm(%h, %down) : tensor<4x8xf64>
        output %y
    """
    assert pairs(text) == {
        "gate": '[{}, {"t"}]',
        "up": '[{}, {"t"}]',
        "down": '[{"t"}, {}]',
    }


def test_where_the_gate_of_a_pair_cannot_be_cut_the_rest_is_still_a_pair() -> None:
    text = """
        param %gate : tensor<8x16xf64>
        param %up : tensor<8x16xf64>
        param %down : tensor<16x8xf64>
        input %x : tensor<4x8xf64>
        %g = aten.mm(%x, %gate) : tensor<4x16xf64>
        %s = aten._softmax(%g, dim = 1, half_to_float = false) : tensor<4x16xf64>
        %u = aten.mm(%x, %up) : tensor<4x16xf64>
        %h = aten.mul.Tensor(%s, %u) : tensor<4x16xf64>
        %y = aten.mm(%h, %down) : tensor<4x8xf64>
        output %y
    """
    assert pairs(text) == {"up": '[{}, {"t"}]', "down": '[{"t"}, {}]'}


def test_fused_projection_is_cut_within_each_slice() -> None:
    text = """
        param %qk : tensor<8x16xf64>
        param %down : tensor<8x8xf64>
        input %x : tensor<4x8xf64>
        %f = aten.mm(%x, %qk) : tensor<4x16xf64>
        %q = aten.slice.Tensor(%f, dim = 1, start = 0) : tensor<4x8xf64>
        %k = aten.slice.Tensor(%f, dim = 1, start = 8) : tensor<4x8xf64>
        %h = aten.mul.Tensor(%q, %k) : tensor<4x8xf64>
        %y = aten.mm(%h, %down) : tensor<4x8xf64>
        output %y
    """
    assert pairs(text) == {"qk": '[{}, {"t":4}]', "down": '[{"t"}, {}]'}


def test_residual_branch_ends_a_search() -> None:
    # %w has no partner: its features meet the residual stream, and norms need those whole.
    text = """
        param %w : tensor<8x8xf64>
        param %head : tensor<8x8xf64>
        input %x : tensor<4x8xf64>
        %y = aten.mm(%x, %w) : tensor<4x8xf64>
        %r = aten.add.Tensor(%x, %y) : tensor<4x8xf64>
        %z = aten.mm(%r, %head) : tensor<4x8xf64>
        output %z
    """
    assert pairs(text) == {}


def test_constants_and_parameters_do_not_end_a_search() -> None:
    text = PAIR.replace("aten.gelu(%h)", "aten.mul.Tensor(%h, %scale)").replace(
        "input %x", "param %scale : tensor<16xf64>\n    input %x"
    )
    assert pairs(text)["scale"] == '[{"t"}]'


def test_logits_that_only_meet_sums_and_maxima_are_cut_along_the_vocabulary() -> None:
    text = """
        param %head : tensor<8x32xf64>
        input %x : tensor<4x8xf64>
        %logits = aten.mm(%x, %head) : tensor<4x32xf64>
        %m = aten.amax(%logits, dim = [1], keepdim = true) : tensor<4x1xf64>
        %s = aten.sub.Tensor(%logits, %m) : tensor<4x32xf64>
        %e = aten.exp(%s) : tensor<4x32xf64>
        %z = aten.sum.dim_IntList(%e, dim = [1]) : tensor<4xf64>
        output %z
    """
    assert pairs(text) == {"head": '[{}, {"t"}]'}


def test_map_whose_features_leave_the_step_stays_whole() -> None:
    text = """
        param %w : tensor<8x8xf64>
        input %x : tensor<4x8xf64>
        %y = aten.mm(%x, %w) : tensor<4x8xf64>
        output %y
    """
    assert pairs(text) == {}


def test_convolutions_are_a_pair_along_their_channels() -> None:
    text = """
        param %one : tensor<16x3x3x3xf64>
        param %two : tensor<4x16x1x1xf64>
        input %x : tensor<2x3x8x8xf64>
        %h = aten.convolution(%x, %one, stride = [1, 1], padding = [1, 1], dilation = [1, 1], transposed = false, output_padding = [0, 0], groups = 1) : tensor<2x16x8x8xf64>
        %a = aten.relu(%h) : tensor<2x16x8x8xf64>
        %y = aten.convolution(%a, %two, stride = [1, 1], padding = [0, 0], dilation = [1, 1], transposed = false, output_padding = [0, 0], groups = 1) : tensor<2x4x8x8xf64>
        output %y
    """
    assert pairs(text) == {"one": '[{"t"}, {}, {}, {}]', "two": '[{}, {"t"}, {}, {}]'}


def test_shared_weight_that_two_places_want_cut_differently_stays_whole() -> None:
    text = """
        param %w : tensor<8x8xf64>
        param %v : tensor<8x8xf64>
        input %x : tensor<4x8xf64>
        %h = aten.mm(%x, %w) : tensor<4x8xf64>
        %a = aten.relu(%h) : tensor<4x8xf64>
        %y = aten.mm(%a, %w) : tensor<4x8xf64>
        output %y
    """
    assert pairs(text) == {}


def test_embeddings_of_inputs_are_found_and_those_of_positions_are_not() -> None:
    text = """
        param %tokens : tensor<32x8xf64>
        param %positions : tensor<16x8xf64>
        input %ids : tensor<2x4xi64>
        %shifted = aten.add.Scalar(%ids, other = 1) : tensor<2x4xi64>
        %t = aten.embedding(%tokens, %shifted) {layer = "wte"} : tensor<2x4x8xf64>
        %at = aten.arange.start_step(start = 0) : tensor<4xi64>
        %p = aten.embedding(%positions, %at) {layer = "wpe"} : tensor<4x8xf64>
        %y = aten.add.Tensor(%t, %p) : tensor<2x4x8xf64>
        output %y
    """
    assert [table.name_hint for _, table in input_embeddings(step(text))] == ["tokens"]


def test_parameter_is_found_behind_its_views() -> None:
    text = """
        param %w : tensor<8x16xf32>
        %t = aten.permute(%w, dims = [1, 0]) : tensor<16x8xf32>
        %c = aten._to_copy(%t) : tensor<16x8xf64>
        %r = aten.relu(%c) : tensor<16x8xf64>
        %s = aten.add.Tensor(%r, %c) : tensor<16x8xf64>
        output %s
    """
    program = step(text)
    weight = program.arguments[0].value
    _, cast_op, relu, total = list(program.ops)
    found = parameter_of(cast_op.results[0], {weight})
    assert found is not None
    assert found[0] is weight
    assert [view.name for view in found[1]] == ["aten._to_copy", "aten.permute"]
    assert parameter_of(relu.results[0], {weight}) == (weight, [relu, *found[1]])
    assert parameter_of(total.results[0], {weight}) is None
