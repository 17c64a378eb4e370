"""Programs: their arguments, results, mesh, layers, and copies."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program
from shardweave.tests.ir_text import shardings, step
from shardweave.tests.zoo import SPECS, captured

TEXT = """
    param %w : tensor<8x16xf64> [{}, {"tensor"}]
    buffer %count : tensor<i64>
    input %x : tensor<4x8xf64>
    tangent %t : tensor<f64>
    %h = aten.mm(%x, %w) {layer = "fc", phase = forward} : tensor<4x16xf64>
    %y = aten.relu(%h) {layer = "act", phase = forward} : tensor<4x16xf64>
    %z = aten.neg(%y) {layer = "fc", phase = forward} : tensor<4x16xf64>
    %n = aten.add.Scalar(%count, other = 1) : tensor<i64>
    output %z
    buffer count = %n
"""


def test_arguments_and_results_say_kind_and_name() -> None:
    program = step(TEXT, "tensor=2")
    assert [(s.kind, s.name) for s in program.arguments] == [
        ("param", "w"), ("buffer", "count"), ("input", "x"), ("tangent", "t"),
    ]  # fmt: skip
    assert [(s.kind, s.name) for s in program.results] == [("output", "0"), ("buffer", "count")]
    assert [op.name for op in program.ops] == [
        "aten.mm", "aten.relu", "aten.neg", "aten.add.Scalar",
    ]  # fmt: skip


def test_tied_parameter_lists_its_other_names() -> None:
    tied = captured(SPECS["gpt"]).program.arguments[0]
    assert (tied.name, tied.aliases) == ("wte.weight", ("head.weight",))
    assert step(TEXT).arguments[0].aliases == ()


def test_ops_are_listed_by_layer_in_order_of_first_appearance() -> None:
    layers = step(TEXT).layers()
    assert {layer: [op.name for op in ops] for layer, ops in layers.items()} == {
        "fc": ["aten.mm", "aten.neg"], "act": ["aten.relu"], "": ["aten.add.Scalar"],
    }  # fmt: skip
    assert list(layers) == ["fc", "act", ""]


def test_sharding_of_an_argument_without_annotation_is_replicated() -> None:
    program = step(TEXT, "tensor=2")
    weight, count, *_ = program.arguments
    assert program.sharding_of_slot(weight).placed_axes == {"tensor"}
    assert program.sharding_of_slot(count) == Sharding.replicated(0)


def test_sharding_of_a_local_program_is_read_against_local_shapes() -> None:
    text = 'param %w : tensor<8x8xf64> [{}, {"tensor"}]\n%n = aten.neg(%w) : tensor<8x8xf64>\noutput %n'
    (weight,) = step(text, "tensor=2", local=True).arguments
    program = step(text, "tensor=2", local=True)
    sharding = program.sharding_of_slot(program.arguments[0])
    assert sharding.global_shape((8, 8)) == (8, 16)
    assert sharding.dims[1][0].stride == 8
    assert weight.sharding_attr is not None


def test_attributes_of_arguments_and_results_can_be_set_and_removed() -> None:
    program = step(TEXT, "tensor=2")
    cut = ShardingAttr.parse_text('[{"tensor"}, {}]')
    program.set_argument_attributes("dist.sharding", {0: None, 2: cut})
    program.set_result_attributes("dist.sharding", {0: cut})
    assert shardings(program.arguments) == {"w": "", "count": "", "x": '[{"tensor"}, {}]', "t": ""}
    assert shardings(program.results) == {"0": '[{"tensor"}, {}]', "count": ""}


def test_clone_shares_nothing_with_the_original() -> None:
    program = step(TEXT)
    clone = program.clone()
    assert clone == program
    clone.set_mesh(Mesh(data=2))
    clone.set_local()
    next(clone.ops).properties.pop("layer")
    assert (program.mesh, program.is_local) == (None, False)
    assert layer_of(next(program.ops)) == "fc"
    assert clone != program


def test_programs_are_equal_to_programs_alone() -> None:
    program = step(TEXT)
    assert program != str(program)
    assert len({program, program.clone()}) == 2, "hashed by identity, since they change"


@pytest.mark.parametrize(
    ("mesh", "local", "expected"),
    [
        ("", False, "<global program of 4 ops>"),
        ("data=2,tensor=2", True, "<local program of 4 ops on mesh data=2,tensor=2>"),
    ],
)
def test_repr_is_short(mesh: str, local: bool, expected: str) -> None:
    assert repr(step(TEXT, mesh, local=local)) == expected


def test_mesh_of_size_one_axes_is_kept() -> None:
    program = Program.parse(str(step(TEXT, "data=1,tensor=2")))
    assert program.mesh == Mesh(data=1, tensor=2)
