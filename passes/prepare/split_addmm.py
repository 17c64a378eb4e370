"""Splitting an addmm whose contracted dim a plan shards.

An addmm cannot be computed on shards of its contracted dim: the sum over shards would add the bias
several times. A product and an addition can: the product is reduced before the bias is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects.annotations import set_wanted_attrs, wanted_attrs_of
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.ops.spec import Product
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.flow import check_not_propagated
from shardweave.passes.program_pass import PassOnProgram


def split_addmms(program: Program) -> int:
    """Split every addmm whose weight is sharded along the contracted dim; returns how many. The
    weight is followed back through permutations and views to an annotated argument."""
    check_not_propagated(program, "split-addmm")
    shardings = {slot.value: program.sharding_of_slot(slot) for slot in program.arguments}
    splits = [
        (op, product)
        for op in program.ops
        if isinstance(op, AtenOp)
        and (product := spec_of(op).product) is not None
        and product.plain
        and _is_cut_along_rows(op.operands[product.factors[1]], shardings)
    ]
    for op, product in splits:
        _split(op, product)
    return len(splits)


def _is_cut_along_rows(weight: SSAValue, shardings: dict[SSAValue, Sharding]) -> bool:
    dim, value = 0, weight
    while isinstance(value.owner, AtenOp) and spec_of(value.owner).keeps_weight:
        owner = value.owner
        if owner.name == "aten.permute":
            dim = owner.value("dims")[dim]
        elif shape_of(owner.operands[0]) != shape_of(value):
            return False
        value = owner.operands[0]
    sharding = shardings.get(value)
    return sharding is not None and bool(sharding.dims[dim])


def _split(op: AtenOp, product: Product) -> None:
    beta, alpha = op.value("beta"), op.value("alpha")
    assert product.addend is not None
    (result,), new = op.results, Builder.before(op)
    factors = [op.operands[index] for index in product.factors]
    terms = [new.aten(product.plain, factors, result.type, "mm"), op.operands[product.addend]]
    for index, factor in enumerate((alpha, beta)):
        if factor != 1:
            terms[index] = new.aten("aten.mul.Scalar", [terms[index]], None, None, other=factor)
    total = create("aten.add.Tensor", terms, [result.type])
    set_wanted_attrs(total, wanted_attrs_of(op))
    Rewriter.replace_op(op, [], new.insert(total, result).results)


@dataclass(frozen=True)
class SplitAddmmPass(PassOnProgram):
    """Split an addmm whose weight is sharded along the contracted dim into a product and an
    addition.

    An addmm adds its bias once, so that it cannot be computed on shards of the contracted dim.
    Other addmms are kept, since they round once where two ops in half precision would round twice.

    Requires: a global program before `propagate-shardings`; weights annotated. Ensures: numerics
    unchanged. Takes time linear in the ops.
    """

    name = "split-addmm"

    def run(self, program: Program) -> None:
        split_addmms(program)
