"""Flow: the versions of values, and what views carry over."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.annotations import set_shardings
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, shardings_of
from shardweave.ir.sharding.flow import (
    MAX_VERSIONS,
    Flow,
    aten_ops,
    moved_back,
    moved_through,
)
from shardweave.tests.ir_text import step

MESH = Mesh(data=2, tensor=2)
VIEWS = """
    input %x : tensor<4x8x6xf64> {x}
    %y = aten.view(%x) : tensor<32x6xf64>
    %z = aten.permute(%y, dims = [1, 0]) : tensor<6x32xf64>
    %w = aten.relu(%z) : tensor<6x32xf64>
    output %w
"""


def flow_of(text: str) -> tuple[Program, Flow, list[AtenOp]]:
    """A program, its flow, and its ops with their results defined as whole."""
    program = step(text, str(MESH))
    flow = Flow(program)
    ops = aten_ops(program)
    for op in ops:
        flow.define(op, [Sharding.replicated(len(shape_of(result))) for result in op.results])
    return program, flow, ops


def views(x: str = "") -> str:
    return VIEWS.replace("{x}", x)


def sharding(text: str, *shape: int) -> Sharding:
    return ShardingAttr.parse_text(text).on(shape, MESH)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('[{"data"}, {}, {}]', '[{"data"}, {}]'),
        ('[{}, {"tensor"}, {}]', '[{"tensor":4}, {}]'),
        ('[{"data"}, {"tensor"}, {}]', '[{"data":16, "tensor":4}, {}]'),
        ('[{}, {}, {"tensor"}]', '[{}, {"tensor"}]'),
    ],
)
def test_shards_move_through_a_view_and_back(before: str, after: str) -> None:
    _, _, ops = flow_of(views())
    narrow, wide = sharding(before, 4, 8, 6), sharding(after, 32, 6)
    assert moved_through(ops[0], narrow) == wide
    assert moved_back(ops[0], wide) == narrow


def test_shard_that_cuts_across_a_split_dim_does_not_survive_the_view() -> None:
    program = step(
        "input %x : tensor<6xf64>\n%y = aten.view(%x) : tensor<3x2xf64>\noutput %y", str(MESH)
    )
    (view,) = aten_ops(program)
    assert moved_through(view, sharding('[{"tensor"}]', 6)) is None
    assert moved_through(view, sharding('[{"tensor":1}]', 6)) == sharding('[{}, {"tensor"}]', 3, 2)


def test_unreduced_axes_move_through_a_view() -> None:
    _, _, ops = flow_of(views())
    before = sharding('[{}, {}, {}], unreduced = ["tensor"]', 4, 8, 6)
    assert moved_through(ops[0], before) == sharding('[{}, {}], unreduced = ["tensor"]', 32, 6)


def test_first_version_of_an_argument_is_its_annotation() -> None:
    program, flow, _ = flow_of(views('[{"data"}, {}, {}]'))
    x = program.arguments[0].value
    assert flow.sharding(x) == sharding('[{"data"}, {}, {}]', 4, 8, 6)
    assert x not in flow.pinned


def test_annotated_parameter_is_pinned_and_so_are_its_views() -> None:
    text = views('[{"data"}, {}, {}]').replace("input", "param")
    program = step(text, str(MESH))
    flow = Flow(program)
    ops = aten_ops(program)
    flow.define(ops[0], [sharding('[{"data"}, {}]', 32, 6)])
    assert program.arguments[0].value in flow.pinned
    assert ops[0].results[0] in flow.pinned


def test_use_in_other_shards_is_remembered_and_then_free() -> None:
    program, flow, _ = flow_of(views())
    x = program.arguments[0].value
    cut = sharding('[{"data"}, {}, {}]', 4, 8, 6)
    assert [step.op.kind() for step in flow.steps(x, cut)[1]] == ["slice"]
    flow.use(x, cut)
    assert flow.versions[x] == [sharding("[{}, {}, {}]", 4, 8, 6), cut]
    assert flow.steps(x, cut) == (cut, ())


def test_view_of_a_value_has_the_versions_of_that_value() -> None:
    program, flow, ops = flow_of(views())
    flow.use(program.arguments[0].value, sharding('[{"data"}, {}, {}]', 4, 8, 6))
    z = ops[1].results[0]
    assert flow.all_versions(z) == [sharding("[{}, {}]", 6, 32), sharding('[{}, {"data"}]', 6, 32)]
    assert flow.all_versions(ops[2].results[0]) == [sharding("[{}, {}]", 6, 32)]


def test_no_more_versions_are_remembered_than_the_limit() -> None:
    program, flow, _ = flow_of(views())
    x = program.arguments[0].value
    texts = ['{"data"}, {}, {}', '{}, {"data"}, {}', '{}, {}, {"data"}', '{"tensor"}, {}, {}']
    kept = [flow.remember(x, sharding(f"[{text}]", 4, 8, 6)) for text in texts]
    assert kept == [True, True, True, False]
    assert len(flow.versions[x]) == MAX_VERSIONS
    assert not flow.remember(x, flow.versions[x][0])


def test_annotations_of_an_op_come_back_as_shardings() -> None:
    program, _, ops = flow_of(views())
    assert shardings_of(ops[0], program) == [None]
    cut = sharding('[{"tensor":4}, {}]', 32, 6)
    set_shardings(ops[0], [cut], [(32, 6)])
    assert shardings_of(ops[0], program) == [cut]


def test_annotation_that_does_not_fit_names_its_op() -> None:
    text = views().replace("%z) :", '%z) {sharding = [#dist.sharding<[{"nope"}, {}]>]} :')
    program = step(text, str(MESH))
    with pytest.raises(ValueError, match=r"^aten\.relu \(%w\): the mesh .* has no axis 'nope'"):
        shardings_of(aten_ops(program)[2], program)


def test_partitioned_program_has_no_list_of_aten_ops() -> None:
    text = """
        input %x : tensor<4xf64>
        %y = dist.all_reduce(%x, axes = ["data"]) : tensor<4xf64>
        output %y
    """
    with pytest.raises(
        ValueError, match=r"the program holds dist\.all_reduce, so that it was partitioned"
    ):
        aten_ops(step(text, str(MESH), local=True))
