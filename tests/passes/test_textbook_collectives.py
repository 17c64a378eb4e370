"""The messages of a Megatron GPT are those of the papers, and there are no others.

Shoeybi et al. 2019: per layer two all-reduces forward and two backward on the tensor axis.
Korthikanti et al. 2022: with sequence parallelism each becomes a reduce-scatter and an
all-gather. Every message of the step is counted, those outside the layers too. The loss is one
number, which travels with the first message of gradients over the same axes.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.dialects.dist import CollectiveOp, DistOp, sent_bytes
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.plan.plan import Plan
from shardweave.tests.marks import slow
from shardweave.tests.zoo import SHARDING_PASSES, captured, megatron, partitioned

LAYERS = 3
GPT = f"gpt:layers={LAYERS},hidden=16,heads=4,vocab=128,seq=8,batch=4"
NUM_PARAMETERS = (
    4 + 16 * LAYERS
)  # embeddings and last norm; q, k, v, proj, fc_in, fc_out, two norms
UNTIED = f"{GPT},tie=false"

Messages = Counter[tuple[str, str, str]]


def messages(program: Program) -> Messages:
    """How many messages there are of each (kind, axes, phase)."""
    found: Messages = Counter()
    for one in program.stats().collectives:
        found[one.kind, ",".join(one.axes), one.phase] += one.count
    return found


def by_layer(program: Program, kind: str, phase: str) -> list[str]:
    """The layers of the messages of one kind over `tensor` alone, in order."""
    return [
        layer_of(op)
        for op in program.ops
        if isinstance(op, CollectiveOp)
        and (op.name, op.axes, phase_of(op)) == (f"dist.{kind}", ("tensor",), phase)
    ]


def operands_of(program: Program, kind: str, axes: tuple[str, ...], phase: str) -> list[list[str]]:
    """The names of the values that each message of a sort carries."""
    return [
        [operand.name_hint or "" for operand in op.operands]
        for op in program.ops
        if isinstance(op, DistOp)
        and (op.name, op.axes, phase_of(op)) == (f"dist.{kind}", axes, phase)
    ]


def gpt(mesh: str, spec: str = GPT, *, sequence_parallel: bool = False) -> Program:
    return partitioned(spec, mesh, megatron(spec, mesh, sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("spec", [GPT, slow(UNTIED)])
def test_tensor_parallel_step_sends_two_all_reduces_per_layer_and_pass(spec: str) -> None:
    program = gpt("tensor=4", spec)
    embedding, loss, head = 1, 2, 1
    assert messages(program) == {
        ("all_reduce", "tensor", "forward"): 2 * LAYERS + embedding + loss,
        ("all_reduce", "tensor", "backward"): 2 * LAYERS + head,
    }
    branches = [f"h.{i}.{part}" for i in range(LAYERS) for part in ("attn.proj", "mlp.fc_out")]
    assert by_layer(program, "all_reduce", "forward")[1:-2] == branches
    norms = [f"h.{i}.{part}" for i in reversed(range(LAYERS)) for part in ("ln_2", "ln_1")]
    assert by_layer(program, "all_reduce", "backward") == ["", *norms]


def test_loss_on_vocabulary_shards_sends_a_maximum_and_a_sum_per_row_and_one_number() -> None:
    program = gpt("tensor=4")
    sent = operands_of(program, "all_reduce", ("tensor",), "forward")
    assert sent[-2:] == [["amax"], ["sum"]]
    with_gradients = operands_of(program, "all_reduce", ("tensor",), "backward")[0]
    assert with_gradients[0] == "div", "the mean of the rows' losses, of the classes held here"
    for op in list(program.ops):
        if isinstance(op, CollectiveOp):
            assert "x32x" not in str(op.result_types[0]), "a shard of the logits is sent"


@pytest.mark.parametrize("spec", [GPT, slow(UNTIED)])
def test_data_parallel_step_sends_the_gradients_in_one_bucket_and_the_loss(spec: str) -> None:
    program = gpt("data=2", spec)
    assert messages(program) == {
        ("all_reduce", "data", "forward"): 1,
        ("all_reduce", "data", "backward"): 1,
    }
    (gradients,) = operands_of(program, "all_reduce", ("data",), "backward")
    assert len(gradients) == NUM_PARAMETERS + (spec == UNTIED) + 1, "and the loss"
    (sums,) = operands_of(program, "all_reduce", ("data",), "forward")
    assert len(sums) == 1, "the number of rows"


def test_two_axes_send_what_each_sends_alone_and_the_loss_by_itself() -> None:
    loss: Messages = Counter({("all_reduce", "data,tensor", "forward"): 1})
    each = messages(gpt("data=2")) + messages(gpt("tensor=2"))
    assert messages(gpt("data=2,tensor=2")) == each + loss


def test_gradients_fill_as_many_buckets_as_their_bytes_need() -> None:
    case, plan = captured(GPT), megatron(GPT, "data=2")
    sizes = [gradient.numel() * 8 for gradient in case.gradients.values()]
    limit = 4 * max(sizes)
    passes = SHARDING_PASSES + f"{{bucket-bytes={limit}}}"
    program = run_passes(case.program, [ApplyPlanPass.of(plan), passes], mesh="data=2")
    buckets = [
        sum(num_bytes(tensor_type_of(operand)) for operand in op.operands)
        for op in program.ops
        if isinstance(op, DistOp) and phase_of(op) == "backward"
    ]
    loss = 8
    assert sum(buckets) == sum(sizes) + loss
    assert all(size <= limit for size in buckets)
    assert all(one + other > limit for one, other in pairwise(buckets))


@pytest.mark.parametrize("spec", [GPT, slow(UNTIED)])
def test_sequence_parallel_step_scatters_and_gathers_twice_per_layer_and_pass(spec: str) -> None:
    program = gpt("tensor=4", spec, sequence_parallel=True)
    embedding, loss, head = 1, 2, 1
    assert messages(program) == {
        ("reduce_scatter", "tensor", "forward"): 2 * LAYERS + embedding,
        ("all_gather", "tensor", "forward"): 2 * LAYERS + head,
        ("all_reduce", "tensor", "forward"): loss,
        ("reduce_scatter", "tensor", "backward"): 2 * LAYERS + head,
        ("all_gather", "tensor", "backward"): 2 * LAYERS + embedding,
        ("all_reduce", "tensor", "backward"): 1,
    }
    (whole,) = operands_of(program, "all_reduce", ("tensor",), "backward")
    norms, branch_biases, positions = 2 * (2 * LAYERS + 1), 2 * LAYERS, 1
    assert len(whole) == norms + branch_biases + positions + 1, "and the loss"


def test_sequence_parallel_step_on_two_axes_reduces_gradients_of_shared_parameters_once() -> None:
    program = gpt("data=2,tensor=2", sequence_parallel=True)
    assert messages(program) == {
        ("reduce_scatter", "tensor", "forward"): 2 * LAYERS + 1,
        ("all_gather", "tensor", "forward"): 2 * LAYERS + 1,
        ("all_reduce", "tensor", "forward"): 2,
        ("all_reduce", "data", "forward"): 1,
        ("reduce_scatter", "tensor", "backward"): 2 * LAYERS + 1,
        ("all_gather", "tensor", "backward"): 2 * LAYERS + 1,
        ("all_reduce", "data,tensor", "backward"): 1,
        ("all_reduce", "data", "backward"): 1,
    }
    both = operands_of(program, "all_reduce", ("data", "tensor"), "backward")[0]
    data = operands_of(program, "all_reduce", ("data",), "backward")[0]
    assert len(both) + len(data) == NUM_PARAMETERS + 1, "and the loss"


def test_sequence_parallelism_sends_as_many_bytes_as_tensor_parallelism_in_the_layers() -> None:
    def sent(*, sequence_parallel: bool) -> float:
        program = gpt("tensor=4", sequence_parallel=sequence_parallel)
        mesh = Mesh(tensor=4)
        return sum(
            sent_bytes(op, mesh)
            for op in program.ops
            if isinstance(op, CollectiveOp) and layer_of(op).startswith("h.")
        )

    assert sent(sequence_parallel=True) == sent(sequence_parallel=False) > 0


def test_gradient_of_the_embedding_is_summed_over_tokens_where_that_sends_fewer_bytes() -> None:
    few_rows = GPT.replace("vocab=128", "vocab=16")
    plan = megatron(few_rows, "tensor=4", sequence_parallel=True)
    found = messages(partitioned(few_rows, "tensor=4", plan))
    assert found["all_gather", "tensor", "backward"] == 2 * LAYERS
    assert found["reduce_scatter", "tensor", "backward"] == 2 * LAYERS + 2


def test_replicated_step_on_one_axis_only_reduces_gradients_and_the_loss() -> None:
    plan = Plan(inputs={"input_ids": '[{"tensor"}, {}]', "labels": '[{"tensor"}, {}]'})
    assert messages(partitioned(GPT, "tensor=2", plan)) == {
        ("all_reduce", "tensor", "forward"): 1,
        ("all_reduce", "tensor", "backward"): 1,
    }
