"""split-batch: which inputs are cut, how, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.ir_text import assert_same_values, lines, shardings, step
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured

LOCAL = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives"

LINEAR = """
    param %w : tensor<4x6xf64>
    input %x : tensor<8x4xf64> [{"data"}, {}]
    input %g : tensor<8x6xf64> [{"data"}, {}]
    %y = aten.mm(%x, %w) : tensor<8x6xf64>
    %z = aten.mul.Tensor(%y, %g) {phase = backward} : tensor<8x6xf64>
    %xt = aten.permute(%x, dims = [1, 0]) {phase = backward} : tensor<4x8xf64>
    %dw = aten.mm(%xt, %z) {phase = backward} : tensor<4x6xf64>
    output %y
    grad w = %dw
"""


def test_inputs_are_cut_inside_the_part_of_each_device() -> None:
    before = step(LINEAR, "data=2")
    after = run_passes(before, "split-batch{n=2}")
    assert after.mesh is not None
    assert after.mesh.axes == (Axis("data", 2), Axis("batch", 2, "time"))
    assert shardings(after.arguments) == {
        "w": "",
        "x": '[{"data", "batch"}, {}]',
        "g": '[{"data", "batch"}, {}]',
    }
    assert lines(after) == lines(before)


def test_sub_batches_cut_every_second_run_of_a_strided_shard() -> None:
    text = LINEAR.replace(
        '%x : tensor<8x4xf64> [{"data"}, {}]', '%x : tensor<8x4xf64> [{"data":2}, {}]'
    )
    after = run_passes(step(text, "data=2"), "split-batch{n=2}")
    assert shardings(after.arguments)["x"] == '[{"data":2, "batch":1}, {}]'
    whole = run_passes(after, f"{LOCAL},unroll-time-axes")
    assert_same_values(step(text, "data=2"), whole)


def test_input_without_the_batch_stays_whole() -> None:
    text = """
        input %x : tensor<8x4xf64>
        input %g : tensor<8x4xf64>
        input %mask : tensor<1x4xf64>
        input %scale : tensor<f64>
        %a = aten.mul.Tensor(%x, %mask) : tensor<8x4xf64>
        %b = aten.mul.Tensor(%g, %scale) : tensor<8x4xf64>
        output %a
        output %b
    """
    after = run_passes(step(text), "split-batch{n=4}")
    cut = '[{"batch"}, {}]'
    assert shardings(after.arguments) == {"x": cut, "g": cut, "mask": "", "scale": ""}


def test_annotations_of_a_plan_on_values_with_the_batch_are_cut_too() -> None:
    text = """
        input %x : tensor<8x4xf64>
        %a = aten.relu(%x) {wanted = [#dist.sharding<[{}, {"tensor"}]>]} : tensor<8x4xf64>
        %s = aten.sum.dim_IntList(%a, dim = [0]) {wanted = [#dist.sharding<[{"tensor"}]>]} : tensor<4xf64>
        %b = aten.mul.Tensor(%a, %s) : tensor<8x4xf64>
        output %b
    """
    before = step(text, "tensor=2")
    after = run_passes(before, "split-batch{n=2}")
    assert lines(after, shardings=True)[:2] == [
        '%a = aten.relu(%x) <[{"batch"}, {"tensor"}]> : tensor<8x4xf64>',
        '%s = aten.sum.dim_IntList(%a, dim = [0]) <[{"tensor"}]> : tensor<4xf64>',
    ]
    assert_same_values(before, run_passes(after, f"{LOCAL},unroll-time-axes"))


@pytest.mark.parametrize("num", [1, 2, 4])
def test_any_number_of_sub_batches_that_divides_gives_equal_values(num: int) -> None:
    before = step(LINEAR, "data=2")
    after = run_passes(before, f"split-batch{{n={num}}},{LOCAL},unroll-time-axes")
    assert_same_values(before, after)
    copies = {str(op.properties["copy"]) for op in after.ops if "copy" in op.properties}
    assert len(copies) == (num if num > 1 else 0)


def test_another_dim_and_axis_can_be_named() -> None:
    text = """
        input %x : tensor<3x4x2xf64>
        %y = aten.relu(%x) : tensor<3x4x2xf64>
        output %y
    """
    before = step(text)
    after = run_passes(before, 'split-batch{n=2 dim=1 axis="tokens"}')
    assert shardings(after.arguments) == {"x": '[{}, {"tokens"}, {}]'}
    assert_same_values(before, run_passes(after, f"{LOCAL},unroll-time-axes"))


def test_two_time_axes_nest() -> None:
    before = step(LINEAR, "data=2")
    after = run_passes(before, "split-batch{n=2 axis=micro},split-batch{n=2}")
    assert shardings(after.arguments)["x"] == '[{"data", "micro", "batch"}, {}]'
    assert_same_values(before, run_passes(after, f"{LOCAL},unroll-time-axes"))


def test_one_sub_batch_changes_nothing() -> None:
    before = step(LINEAR, "data=2")
    assert run_passes(before, "split-batch{n=1}") == before


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (
            "split-batch{n=3}",
            "input 'x' has 4 samples per device along dim 0, which do not divide into 3 sub-batches; "
            "use n in [1, 2, 4].",
        ),
        ("split-batch{n=0}", "n=0 sub-batches; use n >= 1."),
        (
            "split-batch{dim=2}",
            "no input has a dim 2 to split; give the dim along which inputs hold the samples, "
            "as split-batch{dim=0}.",
        ),
        ("split-batch{dim=-1}", "dim=-1; count dims from 0."),
        (
            "split-batch{axis=data}",
            "the mesh data=2 has an axis 'data' already; name another with axis=...",
        ),
        (
            "propagate-shardings,split-batch",
            "the program is propagated already; run split-batch before propagate-shardings.",
        ),
        (
            f"{LOCAL},split-batch",
            "the program is local already; run split-batch before propagate-shardings.",
        ),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(passes: str, message: str) -> None:
    with pytest.raises(PassError) as error:
        run_passes(step(LINEAR, "data=2"), passes)
    assert str(error.value) == f"pass 'split-batch': {message}"


def test_what_a_plan_cuts_further_keeps_the_sub_batches_of_the_inputs() -> None:
    text = """
        param %w : tensor<4x4xf64>
        input %x : tensor<16x4xf64> [{"data"}, {}]
        %y = aten.mm(%x, %w) {wanted = [#dist.sharding<[{"data":8, "spare":2}, {}]>]} : tensor<16x4xf64>
        %z = aten.mm(%y, %w) {wanted = [#dist.sharding<[{"data"}, {}]>]} : tensor<16x4xf64>
        output %z
    """
    before = step(text, "data=2,spare=2")
    after = run_passes(before, "split-batch{n=2}")
    first, second = (str(op.properties["wanted"]) for op in after.ops)
    # Samples 0-3 of a device's eight are sub-batch 0, wherever they are.
    assert '{"data", "batch", "spare"}' in first
    assert '{"data", "batch"}' in second
    assert_same_values(before, run_passes(after, f"{LOCAL},unroll-time-axes"))


@pytest.mark.slow
def test_replicated_values_of_sub_batches_cross_stages() -> None:
    """T5's mask has no sharding of its own where a stage passes it on."""
    stages = (
        ("encoder.embed_tokens", "encoder.block.0"),
        ("encoder.block.1", "encoder.final_layer_norm", "decoder.embed_tokens"),
        ("decoder.block.0",),
        ("decoder.block.1", "decoder.final_layer_norm", "lm_head"),
    )
    model = captured(SPECS["t5"])
    mesh = Mesh(pipeline=4, data=2)
    plan = replace(
        plan_megatron(model.program, mesh),
        zero=3,
        batch_split=2,
        recompute="after-products",
        pipeline=Pipeline(stages, micro_batches=2),
    )
    assert_equals_eager(run_passes(model.program.clone(), plan_passes(plan)), model)
