"""Annotations of ops: written, read back, copied, compared, and named in messages."""

from __future__ import annotations

import pytest
from xdsl.dialects.builtin import FileLineColLoc, IntAttr, StringAttr
from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import (
    annotate,
    arguments_of,
    copy_of,
    describe,
    joined_layers,
    layer_of,
    origin_of,
    phase_of,
    properties_without,
    set_copy,
    set_layer,
    set_origin,
    set_phase,
    set_sharding_attrs,
    set_shardings,
    set_wanted_attrs,
    sharding_attrs_of,
    wanted_attrs_of,
)
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding, contiguous
from shardweave.ir.program.program import Program, shardings_of, wishes_of
from shardweave.ir.verify.program import verify
from shardweave.tests.ir_text import step

MESH = "data=2"


def program() -> Program:
    return step(
        """
        input %x : tensor<4x8xf32>
        %y = aten.mul.Scalar(%x, other = 2) : tensor<4x8xf32>
        %z = aten.neg(%y) : tensor<4x8xf32>
        output %z
        """,
        MESH,
    )


def annotate_all(step_: Program) -> None:
    """Say of every op that its result is cut, as its input is."""
    for op in step_.ops:
        set_shardings(op, [cut()], [(4, 8)])
    attribute = ShardingAttr.of(cut(), (4, 8))
    step_.set_argument_attributes("dist.sharding", {0: attribute})
    step_.set_result_attributes("dist.sharding", {0: attribute})


def cut() -> Sharding:
    return Sharding((contiguous(["data"], 4, Mesh.parse(MESH)), ()))


def test_op_without_annotations_belongs_to_the_root_and_the_forward_pass() -> None:
    step_ = program()
    op = next(step_.ops)
    assert (layer_of(op), phase_of(op), origin_of(op), copy_of(op)) == ("", "forward", None, None)
    assert sharding_attrs_of(op) is None
    assert shardings_of(op, step_) == [None]


def test_annotations_that_are_set_come_back_and_out_of_the_text() -> None:
    step_ = program()
    op = next(step_.ops)
    set_layer(op, "h.0.mlp")
    set_phase(op, "recompute")
    set_origin(op, "mul")
    set_copy(op, (0, 1))
    annotate_all(step_)
    for read in (step_, Program.parse(str(step_))):
        op = next(read.ops)
        assert (layer_of(op), phase_of(op)) == ("h.0.mlp", "recompute")
        assert (origin_of(op), copy_of(op)) == ("mul", (0, 1))
        assert sharding_attrs_of(op) == (ShardingAttr.of(cut(), (4, 8)),)
        assert shardings_of(op, read) == [cut()]
        assert verify(read) == []


def test_unknown_phase_cannot_be_set() -> None:
    with pytest.raises(ValueError, match="phase 'sideways' is unknown; use one of"):
        set_phase(next(program().ops), "sideways")


def test_sharding_is_taken_away() -> None:
    op = next(program().ops)
    set_shardings(op, [cut()], [(4, 8)])
    set_sharding_attrs(op, None)
    assert "sharding" not in op.properties
    set_sharding_attrs(op, None)


def test_wish_is_kept_apart_from_the_sharding() -> None:
    step_ = program()
    op = next(step_.ops)
    set_wanted_attrs(op, [ShardingAttr.of(cut(), (4, 8))])
    for read in (step_, Program.parse(str(step_))):
        op = next(read.ops)
        assert wanted_attrs_of(op) == (ShardingAttr.of(cut(), (4, 8)),)
        assert wishes_of(op, read) == [cut()]
        assert sharding_attrs_of(op) is None
        assert verify(read) == []
    set_wanted_attrs(op, None)
    assert wishes_of(op, step_) == [None]


def test_annotate_fills_in_what_is_missing_but_shardings() -> None:
    source, op = program().ops
    set_wanted_attrs(source, [ShardingAttr.of(cut(), (4, 8))])
    set_layer(source, "h.0")
    set_copy(source, (1,))
    set_shardings(source, [cut()], [(4, 8)])
    source.location = FileLineColLoc(StringAttr("model.py"), IntAttr(7), IntAttr(1))
    set_layer(op, "h.1")
    annotate(op, source)
    assert (layer_of(op), copy_of(op), sharding_attrs_of(op)) == ("h.1", (1,), None)
    assert wanted_attrs_of(op) is None
    assert op.location is source.location
    assert describe(op) == "aten.neg (%z) in layer 'h.1' at model.py:7"


def test_message_of_several_values_names_the_layers_that_make_them() -> None:
    def message(count: int) -> Operation:
        """An all-reduce of a value of the root, and of as many of other layers."""
        lines = [f'%y{i} = aten.neg(%x) {{layer = "h.{i}"}} : tensor<4xf32>' for i in range(count)]
        values = ", ".join(["%s", *(f"%y{i}" for i in range(count))])
        results = ", ".join(["%z", *(f"%z{i}" for i in range(count))])
        types = ", ".join(["tensor<4xf32>"] * (count + 1))
        text = [
            "input %x : tensor<4xf32>",
            *lines,
            "%s = aten.neg(%x) : tensor<4xf32>",
            f'{results} = dist.all_reduce({values}, axes = ["data"]) : {types}',
            "output %s",
        ]
        return list(step("\n".join(text), MESH).ops)[-1]

    assert describe(message(0)) == "dist.all_reduce (%z)"
    assert joined_layers(message(1)) == ["h.0"]
    assert describe(message(1)) == "dist.all_reduce (%z) in layer 'h.0'"
    assert describe(message(3)) == "dist.all_reduce (%z) in layers 'h.0', 'h.1', 'h.2'"
    assert describe(message(6)) == "dist.all_reduce (%z) in layers 'h.0', 'h.1', 3 more, 'h.5'"


def test_ops_are_compared_by_their_arguments_and_chosen_annotations() -> None:
    one, other = next(program().ops), next(program().ops)
    set_layer(one, "h.0")
    set_copy(one, (0,))
    set_copy(other, (1,))
    assert (
        arguments_of(one)
        == arguments_of(other)
        == set(other.properties.items()) - {("copy", other.properties["copy"])}
    )
    assert arguments_of(one, "copy") != arguments_of(other, "copy")
    assert properties_without(one, "layer", "copy") == properties_without(other, "copy")


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("layer = 3 : i64", "layer is 3 : i64, expected a string"),
        ('origin = ["x"]', 'origin is ["x"], expected a string'),
        ("copy = 1 : i64", "copy is 1 : i64, expected a list of whole numbers"),
        ("wanted = []", "wanted must list one #dist.sharding for each result"),
        ("sharding = 1 : i64", "sharding must list one #dist.sharding for each result"),
    ],
)
def test_annotation_of_another_kind_is_one_problem(annotation: str, expected: str) -> None:
    text = str(program()).replace("aten.neg(%y)", f"aten.neg(%y) {{{annotation}}}")
    (problem,) = verify(Program.parse(text))
    assert problem == f"aten.neg (%z): {expected}."
