"""Parameters stored in finer shards than ops read: gathered before use, gradients scattered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import kept_bytes
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.tests.ir_text import step
from shardweave.tests.marks import slow
from shardweave.tests.unforeseen import HERE
from shardweave.tests.zoo import (
    SHARDING_PASSES,
    SPECS,
    assert_equals_eager,
    captured,
    megatron,
    partitioned,
)

LAYERS = 2
GPT = f"gpt:layers={LAYERS},hidden=16,heads=4,vocab=32,seq=8,batch=4"
MAPS = 6 * LAYERS
"""Linear maps: q, k, v, proj, fc_in, fc_out."""

INPUTS = {"input_ids": '[{"data"}, {}]', "labels": '[{"data"}, {}]'}
FSDP = Plan(parameters={"*.weight": '[{"data"}, {}]', "*": '[{"data"}]'}, inputs=INPUTS)

Messages = dict[tuple[str, str], int]


def messages(program: Program) -> Messages:
    found: Messages = {}
    for one in program.stats().collectives:
        assert one.axes == ("data",)
        found[one.kind, one.phase] = found.get((one.kind, one.phase), 0) + one.count
    return found


def of_layers(**shardings: str) -> Plan:
    table = {f"h.*.{name}.weight": text for name, text in shardings.items()}
    return Plan(parameters=table, inputs=INPUTS)


def test_fsdp_gathers_each_parameter_for_each_pass_and_scatters_each_gradient_once() -> None:
    program = partitioned(GPT, "data=4", FSDP)
    embeddings, norms = 2, 2 * (2 * LAYERS + 1)  # of each norm a weight and a bias
    parameters = embeddings + norms + 2 * MAPS
    assert messages(program) == {
        ("all_gather", "forward"): parameters,
        # The backward pass reads the weights of maps, the tied head's, and all of the norms.
        ("all_gather", "recompute"): MAPS + 1 + norms,
        ("reduce_scatter", "backward"): parameters,
        ("all_reduce", "forward"): 2,  # the number of rows, and the loss
    }
    assert_equals_eager(program, captured(GPT))


def test_gathered_weights_are_kept_for_the_backward_pass_where_that_is_asked_for() -> None:
    program = partitioned(GPT, "data=4", FSDP)
    kept = run_passes(program, "delete-redundant-collectives")
    assert ("all_gather", "recompute") not in messages(kept)
    assert kept_bytes(kept) > kept_bytes(program)
    assert_equals_eager(kept, captured(GPT))


def test_budget_keeps_as_many_gathered_weights_as_fit() -> None:
    program = partitioned(GPT, "data=4", of_layers(**{"mlp.fc_in": '[{"data"}, {}]'}))
    one = 64 * 16 * 8
    for count in range(LAYERS + 1):
        kept = run_passes(program, f"delete-redundant-collectives{{budget={count * one}}}")
        assert messages(kept).get(("all_gather", "recompute"), 0) == LAYERS - count


@pytest.mark.parametrize("policy", ["layer", "after-communication", "after-products"])
def test_recomputation_and_gradients_share_one_gather_of_a_weight(policy: str) -> None:
    program = run_passes(partitioned(GPT, "data=4", FSDP), f"rematerialize{{policy={policy}}}")
    again = [op for op in program.ops if phase_of(op) == "recompute"]
    gathered = [op.operands[0] for op in again if op.name == "dist.all_gather"]
    assert len(gathered) == len(set(gathered))
    assert any(op.name == "aten.gelu" for op in again)
    assert_equals_eager(program, captured(GPT))


def test_sub_batches_share_the_gathers_and_add_their_gradients_before_the_scatter() -> None:
    passes = "propagate-shardings,insert-collectives,unroll-time-axes,cse,dce"
    whole, halves = (
        run_passes(
            captured(GPT).program,
            [ApplyPlanPass.of(FSDP), *split, passes],
            mesh="data=2",
        )
        for split in ([], ["split-batch{n=2}"])
    )
    assert_equals_eager(halves, captured(GPT))
    kinds = ("all_gather", "reduce_scatter")
    assert {k: n for k, n in messages(halves).items() if k[0] in kinds} == {
        k: n for k, n in messages(whole).items() if k[0] in kinds
    }


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", slow("bert"), slow("t5"), slow("vit"), "unet", "cnn"]
)
def test_fsdp_of_every_model_equals_eager_and_moves_no_activation(name: str) -> None:
    spec = SPECS[name]
    case = captured(spec)
    over_data: dict[str, dict[str, str]] = {"param": {}, "input": {}}
    for slot in case.program.arguments:
        shape = shape_of(slot.value)
        if slot.kind in over_data and shape and shape[0] % 4 == 0:
            over_data[slot.kind][slot.name] = '[{"data"}' + ", {}" * (len(shape) - 1) + "]"
    plan = Plan(parameters=over_data["param"], inputs=over_data["input"])
    program = partitioned(spec, "data=4", plan)
    counts = messages(program)
    assert not any(kind == "all_to_all" for kind, _ in counts)
    assert counts["all_gather", "forward"] == len(plan.parameters)
    stored = {s.name: s.value.type for s in program.arguments if s.kind == "param"}
    for slot in program.results:
        if slot.kind == "grad":
            assert slot.value.type == stored[slot.name]
    assert_equals_eager(program, case)


def test_axis_that_cuts_the_batch_is_gathered_and_the_tensor_axis_stays() -> None:
    plan = of_layers(
        **{"mlp.fc_in": '[{"tensor", "data"}, {}]', "mlp.fc_out": '[{}, {"tensor", "data"}]'}
    )
    program = partitioned(GPT, "data=2,tensor=2", plan)
    gathers = [op for op in program.ops if op.name == "dist.all_gather"]
    assert {layer_of(op).split(".")[-1] for op in gathers} == {"fc_in", "fc_out"}
    assert {str(op.properties["axes"]) for op in gathers} == {'["data"]'}
    assert_equals_eager(program, captured(GPT))


@pytest.mark.parametrize("recompute", ["layer", "after-communication"])
def test_weight_stored_over_data_before_tensor_is_gathered_recut_and_recomputed_with(
    recompute: str,
) -> None:
    plan = megatron(GPT, "data=2,tensor=2")
    cut = {name: text for name, text in plan.parameters.items() if '"tensor"' in text}
    stored = {name: text.replace('"tensor"', '"data", "tensor"') for name, text in cut.items()}
    plan = replace(plan, parameters=stored, used=cut, recompute=recompute)
    program = local_program(captured(GPT).program, plan)
    again = {op.name for op in program.ops if phase_of(op) == "recompute"}
    assert "aten.gelu" in again
    assert_equals_eager(program, captured(GPT))


def test_plan_can_say_that_a_parameter_is_used_as_it_is_stored() -> None:
    stored = {"h.*.mlp.fc_in.weight": '[{"data"}, {}]'}
    plan = Plan(parameters=stored, used=stored, inputs=INPUTS)
    program = partitioned(GPT, "data=4", plan)
    gathers = [op for op in program.ops if op.name == "dist.all_gather"]
    weights = {s.value for s in program.arguments if s.kind == "param"}
    assert not any(value in weights for op in gathers for value in op.operands)
    assert_equals_eager(program, captured(GPT))


def test_plan_can_say_that_a_parameter_is_gathered_over_an_axis_that_cuts_no_input() -> None:
    plan = Plan(
        parameters={"h.*.mlp.fc_in.weight": '[{"z"}, {}]'},
        used={"h.*.mlp.fc_in.weight": "[{}, {}]"},
    )
    program = run_passes(
        captured(GPT).program, [ApplyPlanPass.of(plan), SHARDING_PASSES], mesh="z=4"
    )
    names = [op.name for op in program.ops if op.name.startswith("dist.")]
    assert set(names) == {"dist.all_gather", "dist.slice"}
    assert_equals_eager(program, captured(GPT))


CAST = """
    param %w : tensor<8x4xf32> [{"data"}, {}]
    input %x : tensor<8x8xbf16> [{"data"}, {}]
    %wt = aten._to_copy(%w, dtype = bf16) {phase = forward} : tensor<8x4xbf16>
    %y = aten.mm(%x, %wt) {phase = forward} : tensor<8x4xbf16>
    output y = %y
"""


def test_weight_is_cast_before_it_is_gathered() -> None:
    program = step(CAST, "data=2")
    plan = Plan(parameters={"w": '[{"data"}, {}]'}, inputs={"x": '[{"data"}, {}]'})
    local = run_passes(program, [ApplyPlanPass.of(plan), SHARDING_PASSES])
    cast, gather, product = local.ops
    assert [op.name for op in (cast, gather, product)] == [
        "aten._to_copy",
        "dist.all_gather",
        "aten.mm",
    ]
    assert shape_of(cast.results[0]) == (4, 4)


def test_pattern_is_for_the_parameters_of_its_rank() -> None:
    program = captured(GPT).program
    plan = Plan(parameters={"h.*.weight": '[{"data"}, {}]'}, inputs=INPUTS)
    marked = run_passes(program, [ApplyPlanPass.of(plan)], mesh="data=4")
    sharded = {s.name for s in marked.arguments if s.kind == "param" and s.sharding_attr}
    assert "h.0.mlp.fc_in.weight" in sharded
    assert "h.0.ln_1.weight" not in sharded


def test_pattern_whose_parameters_all_have_another_rank_is_refused() -> None:
    plan = Plan(parameters={"h.*.bias": '[{"data"}, {}]'})
    with pytest.raises(
        ValueError, match=r"with 2 dims, but param 'h.0.ln_1.bias' has shape \[16\]"
    ):
        run_passes(captured(GPT).program, [ApplyPlanPass.of(plan)], mesh="data=4")


@pytest.mark.parametrize("recompute", ["none", "layer", "after-communication"])
def test_loss_that_reads_the_parameters_themselves_equals_eager(recompute: str) -> None:
    case = captured(f"{HERE}:penalised")
    plan = plan_megatron(case.program, Mesh(data=2, tensor=2))
    assert_equals_eager(
        local_program(case.program, replace(plan, zero=3, recompute=recompute)), case
    )


def test_views_of_weights_that_are_gathered_again_belong_to_the_backward_pass() -> None:
    case = captured("gpt:layers=2,hidden=16,heads=2,vocab=16,seq=8,batch=8,experts=4,choices=2")
    program = local_program(
        case.program, replace(plan_megatron(case.program, Mesh(data=2)), zero=3)
    )
    forward = (op for op in program.ops if phase_of(op) == "forward")
    makers = (value.owner for op in forward for value in op.operands)
    assert all(phase_of(maker) == "forward" for maker in makers if isinstance(maker, Operation))
