"""Reordering additions so that partial sums are added first, and only one sum is reduced."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects.annotations import wanted_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.flow import check_not_propagated
from shardweave.passes.partition.propagate_shardings import propagated_forward
from shardweave.passes.program_pass import Analyses, PassWithAnalyses


@dataclass(frozen=True)
class AddPendingSumsPass(PassWithAnalyses):
    """Rewrite (reduced + partial) + partial' to reduced + (partial + partial').

    Autograd adds the gradients of a value's uses in the order in which it meets them: residual,
    then q, k and v. If the gradients of q, k and v are partial sums over an axis, each would be
    reduced before it is added to the residual's; added to each other first, they leave one sum.

    Requires: a global program with a mesh, before `propagate-shardings`. Ensures: numerics
    unchanged except for the order of additions. Takes time linear in the ops.
    """

    name = "add-pending-sums"

    def rewrite(self, program: Program, analyses: Analyses) -> None:
        program.needed_mesh()
        check_not_propagated(program, self.name)
        propagation = analyses.of(propagated_forward)
        known = {value: versions[0] for value, versions in propagation.flow.versions.items()}
        if any([_regroup(op, known) for op in propagation.ops if _is_plain_add(op)]):
            analyses.forget()


def _is_plain_add(op: AtenOp) -> bool:
    return (
        op.name == "aten.add.Tensor"
        and op.value("alpha") == 1
        and op.operands[0].type == op.operands[1].type == op.results[0].type
        and wanted_attrs_of(op) is None
    )


def _regroup(op: AtenOp, known: dict[SSAValue, Sharding]) -> bool:
    for inner, pending in (tuple(op.operands), tuple(reversed(op.operands))):
        first = inner.owner
        if not (isinstance(first, AtenOp) and _is_plain_add(first) and inner.has_one_use()):
            continue
        for whole, other in (tuple(first.operands), tuple(reversed(first.operands))):
            if _same_pending(known[other], known[pending]) and not known[whole].unreduced:
                _rebuild(op, first, whole, other, pending, known)
                return True
    return False


def _same_pending(a: Sharding, b: Sharding) -> bool:
    return bool(a.unreduced) and a == b and a.reduction == "sum"


def _rebuild(
    op: AtenOp,
    first: AtenOp,
    whole: SSAValue,
    other: SSAValue,
    pending: SSAValue,
    known: dict[SSAValue, Sharding],
) -> None:
    """Rewrite `op`, first(whole, other) + pending, to whole + (other + pending)."""
    new = Builder.before(op, first)
    inner = new.aten("aten.add.Tensor", [other, pending], op.results[0].type, first.results[0])
    known[inner] = known[pending]
    op.operands = [whole, inner]
    Rewriter.erase_op(first)
