"""Does a propagated global program hold together? Operands fit their ops, reshards can be made."""

from __future__ import annotations

from collections.abc import Mapping

from xdsl.ir import Operation, SSAValue

from shardweave.ir.aten import AtenOp
from shardweave.ir.dist import ReshardOp
from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import Sharding
from shardweave.ir.sharding.fit import Misfit, fitting_factors
from shardweave.ir.sharding.reshard import reshard
from shardweave.ir.sharding.rules import rule_of
from shardweave.ir.types import shape_of


def problem_of_fit(op: Operation, shardings: Mapping[SSAValue, Sharding], mesh: Mesh) -> str | None:
    """Why an op's operands and results, in these shardings, do not fit it; None if they do.

    What is not known of an operand or result is somebody else's problem.
    """
    if not all(value in shardings for value in (*op.operands, *op.results)):
        return None
    operands = tuple(shardings[value] for value in op.operands)
    results = tuple(shardings[value] for value in op.results)
    if isinstance(op, ReshardOp):
        try:
            reshard(shape_of(op.operands[0]), operands[0], results[0], mesh)
        except ValueError as error:
            return str(error).rstrip(".")
    if isinstance(op, AtenOp):
        fit = fitting_factors(rule_of(op), operands, results, mesh)
        if isinstance(fit, Misfit):
            return f"{fit.text(op)}; add a dist.reshard before it, or correct its sharding"
    return None
