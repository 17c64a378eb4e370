"""fuse-kernels: which regions it makes, what it never crosses, and that nothing changes."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from shardweave.backends.reference.reference import Key, run_reference, values_of
from shardweave.backends.triton.kernels.generate import generate
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.dist import SendOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of
from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.ir_text import step
from shardweave.tests.marks import slow, slow_where
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron, partitioned

KINDS = ("gpt", "gpt2", "llama", "bert", "t5", "vit", "unet", "cnn")


def regions(program: Program) -> list[list[str]]:
    """The ops of each region."""
    return [
        [inner.name.removeprefix("aten.") for inner in op.fused_ops]
        for op in program.ops
        if isinstance(op, FusedOp)
    ]


@cache
def in_float32(kind: str) -> tuple[Program, dict[Key, Tensor]]:
    """A model's program and arguments in float32: kernels leave products of float64 alone."""
    example = build_example(SPECS[kind], dtype=torch.float32)
    program = capture(example.module, kwargs=example.kwargs)
    return program, values_of(program, example.module, example.kwargs)


WITHOUT_CASTS = ("gpt2", "bert", "vit", "cnn")
"""Models whose programs differ in float32 and float64 by their types alone."""


@cache
def fused_in_float32(kind: str) -> Program:
    if kind in WITHOUT_CASTS:
        text = str(captured(SPECS[kind]).program)
        return run_passes(Program.parse(text.replace("f64", "f32")), "fuse-kernels")
    return run_passes(in_float32(kind)[0], "fuse-kernels")


@cache
def fused_step(kind: str) -> Program:
    """A model's global program, fused; not to be changed."""
    return run_passes(captured(SPECS[kind]).program, "fuse-kernels")


@pytest.mark.parametrize("kind", slow_where(lambda kind: kind in ("t5", "bert", "gpt2"), KINDS))
def test_fused_step_equals_eager_and_unfuses_to_the_same_program(kind: str) -> None:
    case = captured(SPECS[kind])
    fused = fused_step(kind)
    assert regions(fused)
    assert_equals_eager(fused, case)
    again = run_passes(fused, "unfuse-kernels")
    assert again == case.program
    assert str(again) == str(case.program)
    assert_equals_eager(again, case)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_fused_local_program_equals_eager(kind: str) -> None:
    plan = megatron(SPECS[kind], "data=2,tensor=2", sequence_parallel=True)
    program = partitioned(SPECS[kind], "data=2,tensor=2", plan)
    fused = run_passes(program, "fuse-kernels")
    assert_equals_eager(fused, captured(SPECS[kind]))
    assert run_passes(fused, "unfuse-kernels") == program


def test_stages_send_what_kernels_give() -> None:
    spec, mesh = (
        "gpt:layers=2,hidden=8,heads=2,vocab=8,seq=4,batch=4",
        Mesh.parse("stage=2,tensor=2"),
    )
    program = captured(spec).program
    pipeline = Pipeline(balanced_stages(program, 2), 2, schedule="1f1b")
    plan = replace(plan_megatron(program, mesh), pipeline=pipeline)
    staged = run_passes(partition(program, mesh, plan), "preset:kernels")
    sent = [op.operands[0].owner for part in parts_of(staged) for op in part.ops
            if isinstance(op, SendOp)]  # fmt: skip
    assert any(isinstance(owner, FusedOp) for owner in sent)
    assert verify(staged) == []
    assert_equals_eager(staged, captured(spec))


def test_started_collectives_keep_what_is_before_and_after_them() -> None:
    plan = megatron(SPECS["gpt"], "data=2,tensor=2")
    program = run_passes(partitioned(SPECS["gpt"], "data=2,tensor=2", plan), "start-collectives")
    order = [op.name for op in program.ops]
    fused = run_passes(program, "fuse-kernels")
    places = {op: place for place, op in enumerate(program.ops)}
    barriers = [place for op, place in places.items() if op.name.startswith("dist.")]
    assert barriers
    for op in fused.ops:
        if isinstance(op, FusedOp):
            low, high = min(op.places), max(op.places)
            waits = [b for b in barriers if low < b < high and "shard" not in order[b]]
            assert [order[b] for b in waits if order[b] != "dist.slice"] == []
    assert_equals_eager(fused, captured(SPECS["gpt"]))


def test_no_region_reaches_from_one_phase_into_another() -> None:
    for op in fused_step("gpt").ops:
        if isinstance(op, FusedOp) and phase_of(op) == "forward":
            assert {phase_of(inner) for inner in op.fused_ops} == {"forward"}


def test_ops_outside_regions_keep_their_order() -> None:
    program, fused = captured(SPECS["llama"]).program, fused_step("llama")
    inside = {place for op in fused.ops if isinstance(op, FusedOp) for place in op.places}
    outside = [op.name for place, op in enumerate(program.ops) if place not in inside]
    assert [op.name for op in fused.ops if not isinstance(op, FusedOp)] == outside


@pytest.mark.parametrize("kind", ["gpt", slow("llama")])
def test_regions_with_products_compute_the_same_bit_for_bit(kind: str) -> None:
    program, values = in_float32(kind)
    fused = fused_in_float32(kind)
    assert any("mm" in name for region in regions(fused) for name in region)
    assert run_passes(fused, "unfuse-kernels") == program
    wanted, found = run_reference(program, values), run_reference(fused, values)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_residual_joins_the_product_before_it() -> None:
    assert ["addmm", "view", "add.Tensor"] in regions(fused_in_float32("gpt"))


def test_products_stay_outside_if_asked() -> None:
    program, _ = in_float32("gpt")
    found = regions(run_passes(program, "fuse-kernels{matmul=false}"))
    assert not any("mm" in name for region in found for name in region)
    assert any(region[0] == "add.Tensor" and "native_layer_norm" in region for region in found)


def test_a_chain_through_an_op_that_does_not_fit_is_no_region() -> None:
    program = step("""
        input %x : tensor<8x8xf32>
        %a = aten.exp(%x) : tensor<8x8xf32>
        %c = aten.cumsum(%a, dim = 0) : tensor<8x8xf32>
        %m = aten.mul.Tensor(%a, %c) : tensor<8x8xf32>
        output %m
    """)
    assert regions(run_passes(program, "fuse-kernels")) == []


def test_no_region_forms_a_cycle_with_the_op_between() -> None:
    program = step("""
        input %x : tensor<8x8xf32>
        %a = aten.exp(%x) : tensor<8x8xf32>
        %b = aten.neg(%a) : tensor<8x8xf32>
        %c = aten.cumsum(%b, dim = 0) : tensor<8x8xf32>
        %m = aten.mul.Tensor(%a, %c) : tensor<8x8xf32>
        %n = aten.sin(%m) : tensor<8x8xf32>
        output %n
    """)
    fused = run_passes(program, "fuse-kernels")
    assert regions(fused) == [["exp", "neg"], ["mul.Tensor", "sin"]]
    assert verify(fused) == []


def test_fusing_twice_is_refused() -> None:
    program = captured(SPECS["gpt"]).program
    with pytest.raises(PassError, match="run unfuse-kernels before this pass"):
        run_passes(program, "fuse-kernels,fuse-kernels")


@pytest.mark.parametrize("kind", slow_where({"t5", "unet"}.__contains__, KINDS))
def test_every_region_has_a_kernel(kind: str) -> None:
    fused = fused_in_float32(kind)
    sources = {generate(op).source for op in fused.ops if isinstance(op, FusedOp)}
    assert sources


def test_equal_layers_share_their_kernels() -> None:
    specs = [f"gpt:layers={n},hidden=16,heads=4,vocab=32,seq=8,batch=2" for n in (3, 5)]
    counts = [
        len({generate(op).source for op in run_passes(captured(spec).program, "fuse-kernels").ops
             if isinstance(op, FusedOp)})
        for spec in specs
    ]  # fmt: skip
    assert counts[0] == counts[1]


def test_fused_layer_moves_fewer_bytes() -> None:
    for kind, bound in (("gpt", 0.9), ("llama", 0.6)):
        program = captured(SPECS[kind]).program
        before = sum(program.stats().moved_bytes.values())
        after = sum(fused_step(kind).stats().moved_bytes.values())
        assert after < bound * before


@pytest.mark.slow
def test_time_grows_no_faster_than_the_program() -> None:
    seconds: list[float] = []
    for layers in (24, 96):
        spec = f"gpt:layers={layers},hidden=16,heads=4,vocab=32,seq=8,batch=2"
        program = captured(spec).program
        start = time.perf_counter()
        run_passes(program, "fuse-kernels")
        seconds.append(time.perf_counter() - start)
    assert seconds[1] < 10 * seconds[0]
