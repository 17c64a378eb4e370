"""Mistakes that passes could make, planted in what the right passes give.

Each defect names its pass, runs that pass, and then does to the program what a slip in the
pass's code would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    annotate,
    copy_of,
    layer_of,
    phase_of,
    set_sharding_attrs,
)
from shardweave.ir.dialects.aten import create
from shardweave.ir.dialects.literals import to_attribute, to_python
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import parse_passes

Mistake = Callable[[Program], None]


@dataclass(frozen=True)
class Defect:
    """A mistake in a pass: `case` is the program that it is looked for in (see PIPELINES)."""

    name: str
    case: str
    pass_name: str
    mistake: Mistake


DEFECTS: list[Defect] = []


def defect(case: str, pass_name: str) -> Callable[[Mistake], Mistake]:
    """Register a mistake."""

    def register(mistake: Mistake) -> Mistake:
        DEFECTS.append(Defect(mistake.__name__, case, pass_name, mistake))
        return mistake

    return register


def broken(spec: str, mistake: Mistake) -> ModulePass:
    """The pass of a spec, with a mistake in it."""
    (right,) = parse_passes(spec)

    def apply(self: ModulePass, ctx: Context, op: builtin.ModuleOp) -> None:
        right.apply(ctx, op)
        mistake(Program(op))

    return type("BrokenPass", (ModulePass,), {"name": right.name, "apply": apply})()


# Finding and changing


def found(
    program: Program, name: str = "", phase: str = "", layer: str = "", **arguments: object
) -> Iterator[Operation]:
    """Ops of a name, in a phase, below a layer, with these properties."""
    for op in program.ops:
        right = all(
            key in op.properties and to_python(op.properties[key]) == value
            for key, value in arguments.items()
        )
        if right and op.name.startswith(name) and phase_of(op).startswith(phase):
            if layer_of(op).startswith(layer):
                yield op


def one(program: Program, *given: str, at: int = 0, **arguments: object) -> Operation:
    return list(found(program, *given, **arguments))[at]


def integer(op: Operation, name: str) -> int:
    value = to_python(op.properties[name])
    assert isinstance(value, int)
    return value


def drop(op: Operation) -> None:
    """Let the users of an op read its first operand."""
    forget_sharding(op.operands[0])
    op.results[0].replace_all_uses_with(op.operands[0])
    op.detach()
    op.erase()


def forget_sharding(value: SSAValue) -> None:
    """Without it, verify cannot know that the value is a pending sum."""
    if isinstance(value.owner, Operation):
        set_sharding_attrs(value.owner, None)


def insert_after(op: Operation, new: Operation) -> None:
    """Put an op on the first result of another, before all its users."""
    annotate(new, op)
    block = op.parent_block()
    assert block is not None
    block.insert_op_after(new, op)
    for use in list(op.results[0].uses):
        if use.operation is not new:
            use.operation.operands[use.index] = new.results[0]


def swap(a: Operation, b: Operation) -> None:
    """Let two ops read each other's operands."""
    operands = list(a.operands), list(b.operands)
    a.operands, b.operands = operands[1], operands[0]


def scale(op: Operation, factor: float) -> None:
    result = op.results[0]
    insert_after(op, create("aten.mul.Scalar", [result], [result.type], {"other": factor}))


# insert-collectives


@defect("gpt", "insert-collectives")
def all_reduce_over_the_wrong_axis(program: Program) -> None:
    op = one(program, "dist.all_reduce", "forward", "h.0", axes=["tensor"])
    op.properties["axes"] = to_attribute(["data"])


@defect("gpt", "insert-collectives")
def all_reduce_in_too_large_a_group(program: Program) -> None:
    op = one(program, "dist.all_reduce", "backward", "h.1", axes=["tensor"])
    op.properties["axes"] = to_attribute(["data", "tensor"])


@defect("gpt", "insert-collectives")
def missing_reduction_in_the_forward_pass(program: Program) -> None:
    drop(one(program, "dist.all_reduce", "forward", "h.1.mlp", axes=["tensor"]))


@defect("gpt", "insert-collectives")
def missing_reduction_of_a_gradient(program: Program) -> None:
    drop(one(program, "dist.all_reduce", "backward", "h.0.ln_1", axes=["data"]))


@defect("gpt", "insert-collectives")
def reduction_left_where_verify_sees_it(program: Program) -> None:
    op = one(program, "dist.all_reduce", "forward", "h.0.attn", axes=["tensor"])
    op.results[0].replace_all_uses_with(op.operands[0])
    op.detach()
    op.erase()


@defect("gpt", "insert-collectives")
def mean_over_each_rank_instead_of_all(program: Program) -> None:
    # The number of labels that count: without its sum each rank divides by its own.
    division = one(program, "aten.div.Tensor", "forward")
    owner = division.operands[1].owner
    assert isinstance(owner, dist.AllReduceOp)
    drop(owner)


@defect("gpt", "insert-collectives")
def double_reduction(program: Program) -> None:
    op = one(program, "dist.all_reduce", "forward", "h.0.mlp", axes=["tensor"])
    new = dist.create_dist(dist.AllReduceOp, [op.results[0]], [op.results[0].type], axes=["tensor"])
    insert_after(op, new)


@defect("gpt", "insert-collectives")
def maximum_for_sum(program: Program) -> None:
    one(program, "dist.all_reduce", "forward", "h.0.attn").properties["op"] = to_attribute("max")


@defect("gpt", "insert-collectives")
def bias_added_by_every_rank_before_the_reduction(program: Program) -> None:
    op = one(program, "dist.all_reduce", "forward", "h.0.attn.proj")
    (use,) = op.results[0].uses
    addition = use.operation
    forget_sharding(op.operands[0])
    addition.results[0].replace_all_uses_with(op.results[0])
    addition.detach()
    op.parent_block().insert_op_before(addition, op)  # pyright: ignore[reportOptionalMemberAccess]
    addition.operands[use.index] = op.operands[0]
    set_sharding_attrs(addition, None)
    op.operands[0] = addition.results[0]


@defect("gpt", "insert-collectives")
def vocabulary_offset_off_by_one(program: Program) -> None:
    op = one(program, "aten.mul.Scalar", "forward", "wte")
    op.properties["other"] = to_attribute(integer(op, "other") - 1)


@defect("gpt", "insert-collectives")
def mesh_axis_of_the_shard_index_is_another(program: Program) -> None:
    one(program, "dist.shard_index", "forward").properties["axes"] = to_attribute(["data"])


@defect("sequence-parallel", "insert-collectives")
def gather_in_another_order(program: Program) -> None:
    op = one(program, "dist.all_gather", "forward")
    op.properties["block"] = to_attribute(integer(op, "block") // 2)


@defect("sequence-parallel", "insert-collectives")
def scatter_in_another_order(program: Program) -> None:
    op = one(program, "dist.reduce_scatter", "forward")
    op.properties["block"] = to_attribute(integer(op, "block") // 2)


@defect("sequence-parallel", "insert-collectives")
def reduce_scatter_along_another_dim(program: Program) -> None:
    op = one(program, "dist.reduce_scatter", "forward")
    op.properties["dim"] = to_attribute(2 if integer(op, "dim") != 2 else 1)


@defect("sequence-parallel", "insert-collectives")
def norm_weight_gradient_of_a_part_of_the_sequence(program: Program) -> None:
    ops = found(program, "dist.all_reduce", "backward", "h.0.ln_1")
    op = next(op for op in ops if isinstance(op, dist.DistOp) and "tensor" in op.axes)
    op.properties["axes"] = to_attribute(["data"])


@defect("cnn", "insert-collectives")
def batch_norm_over_each_rank_alone(program: Program) -> None:
    drop(one(program, "dist.all_reduce", "forward", "bn_in"))


# Other passes on the way to a local program


@defect("gpt", "propagate-shardings")
def split_addmm_forgets_the_bias(program: Program) -> None:
    drop(one(program, "aten.add.Tensor", "forward", "h.0.mlp.fc_out"))


@defect("gpt", "propagate-shardings")
def regrouped_sum_takes_a_term_twice(program: Program) -> None:
    op = one(program, "aten.add.Tensor", "backward", "h.0.attn")
    op.operands[1] = op.operands[0]


@defect("gpt", "cse")
def ops_that_differ_in_an_operand_are_merged(program: Program) -> None:
    q, k = (one(program, "aten.addmm", "forward", f"h.0.attn.{name}") for name in "qk")
    k.results[0].replace_all_uses_with(q.results[0])


@defect("gpt", "dce")
def residual_is_taken_for_dead(program: Program) -> None:
    drop(one(program, "aten.add.Tensor", "forward", "h.1", at=-1))


@defect("gpt", "merge-collectives")
def results_of_a_merged_collective_are_swapped(program: Program) -> None:
    for op in found(program, "dist.all_reduce", "backward"):
        for i, first in enumerate(op.results):
            for second in op.results[i + 1 :]:
                if first.type == second.type:
                    uses = list(first.uses)
                    second.replace_all_uses_with(first)
                    for use in uses:
                        use.operation.operands[use.index] = second
                    return
    raise AssertionError("nothing to swap")


@defect("gpt", "merge-collectives")
def merged_collective_runs_in_the_group_of_one(program: Program) -> None:
    ops = found(program, "dist.all_reduce", "backward", axes=["data"])
    next(op for op in ops if len(op.operands) > 1).properties["axes"] = to_attribute(["tensor"])


@defect("gpt", "bucket-collectives")
def bucket_returns_its_parts_in_another_order(program: Program) -> None:
    results_of_a_merged_collective_are_swapped(program)


# Sub-batches


def of_copy(program: Program, copy: int, name: str, layer: str) -> Operation:
    return one(program, name, "forward", layer, copy=[copy])


@defect("sub-batches", "unroll-time-axes")
def op_reads_the_other_sub_batch(program: Program) -> None:
    first, second = (of_copy(program, copy, "aten.gelu", "h.0") for copy in (0, 1))
    place = second.parent_block()
    assert place is not None
    if not first.is_before_in_block(second):
        first, second = second, first
    second.operands[0] = first.operands[0]


@defect("sub-batches", "unroll-time-axes")
def gradient_of_one_sub_batch_is_lost(program: Program) -> None:
    drop(accumulation(program))


@defect("sub-batches", "unroll-time-axes")
def gradient_is_the_mean_over_sub_batches_twice(program: Program) -> None:
    scale(accumulation(program), 0.5)


def accumulation(program: Program) -> Operation:
    """The sum of a weight's gradients over the sub-batches."""
    for op in found(program, "aten.add.Tensor", "backward", "h.0"):
        owners = [value.owner for value in op.operands]
        copies = {copy_of(o) for o in owners if isinstance(o, Operation)}
        if copy_of(op) is None and len(copies) == 2:
            return op
    raise AssertionError("no sum over sub-batches")


@defect("sub-batches", "unroll-time-axes")
def sub_batch_starts_one_sample_early(program: Program) -> None:
    ops = found(program, "aten.slice.Tensor", "forward")
    op = next(op for op in ops if integer(op, "start") > 0)
    op.properties["start"] = to_attribute(integer(op, "start") - 1)


# Recomputation


@defect("recomputed", "rematerialize")
def recomputed_op_reads_another_layer(program: Program) -> None:
    ops = [one(program, "aten.addmm", "recompute", f"h.{i}.mlp.fc_in") for i in (1, 0)]
    if not ops[0].is_before_in_block(ops[1]):
        ops.reverse()
    ops[1].operands[1] = ops[0].operands[1]


@defect("recomputed", "rematerialize")
def op_is_left_out_of_the_recomputation(program: Program) -> None:
    drop(one(program, "aten.add.Tensor", "recompute", "h.0"))


@defect("recomputed", "delete-redundant-collectives")
def recomputed_collective_takes_another_twin(program: Program) -> None:
    twins = [one(program, "dist.all_reduce", "forward", f"h.{i}.attn.proj") for i in (0, 1)]
    for use in list(twins[1].results[0].uses):
        if phase_of(use.operation) in ("recompute", "backward"):
            use.operation.operands[use.index] = twins[0].results[0]
            return
    raise AssertionError("the twin is not read again")


# Started collectives


@defect("started", "start-collectives")
def wait_is_dropped(program: Program) -> None:
    drop(one(program, "dist.wait", "forward"))


@defect("started", "start-collectives")
def waits_take_each_others_collectives(program: Program) -> None:
    waits = list(found(program, "dist.wait", "backward"))
    for a, b in pairwise(waits):
        late = b.operands[0].owner
        if a.result_types == b.result_types and isinstance(late, Operation):
            assert not any(v.owner is a for v in late.operands)
            late.detach()
            a.parent_block().insert_op_before(late, a)  # pyright: ignore[reportOptionalMemberAccess]
            swap(a, b)
            return
    raise AssertionError("no two waits of one type")


@defect("started", "overlap-communication")
def op_is_ordered_before_what_it_reads(program: Program) -> None:
    op = one(program, "aten.gelu", "forward", "h.0")
    owner = op.operands[0].owner
    assert isinstance(owner, Operation)
    op.detach()
    owner.parent_block().insert_op_before(op, owner)  # pyright: ignore[reportOptionalMemberAccess]


@defect("started", "overlap-communication")
def reordered_op_takes_its_operands_the_wrong_way_round(program: Program) -> None:
    op = one(program, "aten.sub.Tensor", "forward", at=-1)
    op.operands = [op.operands[1], op.operands[0]]
