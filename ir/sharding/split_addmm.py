"""Splitting an addmm whose contracted dim a plan cuts.

An addmm adds its bias once, so it cannot be computed on shards of the contracted factor:
the bias would be summed over the shards. Where a weight is row-parallel it becomes a matrix
product and an addition; the sum over shards is then reduced before the bias is added.
Everywhere else it stays whole, which rounds once where half precision would round twice.
"""

from __future__ import annotations

from xdsl.ir import SSAValue

from shardweave.ir.annotations import annotate, set_wanted_attrs, wanted_attrs_of
from shardweave.ir.aten import AtenOp, create
from shardweave.ir.facts import facts_of
from shardweave.ir.placement import Sharding
from shardweave.ir.program import Program
from shardweave.ir.sharding.flow import check_not_propagated
from shardweave.ir.types import shape_of


def split_addmms(program: Program) -> int:
    """Split every addmm whose weight is cut along the contracted dim; returns how many.

    The weight is followed back through permutations and views to an annotated argument.
    """
    check_not_propagated(program, "split-addmm")
    shardings = {slot.value: program.sharding_of_slot(slot) for slot in program.arguments}
    found = [
        op
        for op in program.ops
        if isinstance(op, AtenOp) and op.name == "aten.addmm" and _contracted_is_cut(op, shardings)
    ]
    for op in found:
        _split(op)
    return len(found)


def _contracted_is_cut(op: AtenOp, shardings: dict[SSAValue, Sharding]) -> bool:
    dim, value = 0, op.operands[2]
    while isinstance(value.owner, AtenOp) and facts_of(value.owner).keeps_weight:
        owner = value.owner
        if owner.name != "aten.permute" and shape_of(owner.operands[0]) != shape_of(value):
            return False
        if owner.name == "aten.permute":
            dim = owner.value("dims")[dim]
        value = owner.operands[0]
    sharding = shardings.get(value)
    return sharding is not None and bool(sharding.dims[dim])


def _split(op: AtenOp) -> None:
    bias, left, right = op.operands
    beta, alpha = op.value("beta"), op.value("alpha")
    if beta != 1 or alpha != 1:
        raise ValueError(
            f"aten.addmm with beta={beta}, alpha={alpha} cannot be row-parallel; scale the bias "
            "and the product apart in the model."
        )
    block = op.parent_block()
    assert block is not None
    product = create("aten.mm", [left, right], [op.results[0].type])
    total = create("aten.add.Tensor", [product.results[0], bias], [op.results[0].type])
    for new in (product, total):
        annotate(new, op)
        block.insert_op_before(new, op)
    product.results[0].name_hint = "mm"
    total.results[0].name_hint = op.results[0].name_hint
    set_wanted_attrs(total, wanted_attrs_of(op))
    op.results[0].replace_all_uses_with(total.results[0])
    op.detach()
    op.erase()
