from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.sharding.pending_sums import add_pending_sums
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class AddPendingSumsPass(PassOnProgram):
    """Rewrite (whole + pending) + pending to whole + (pending + pending).

    Autograd adds the gradients of a value's uses in the order in which it meets them: residual,
    then q, k and v. Where those of q, k and v will be pending sums over an axis, each would be
    reduced before it meets the residual; added to each other first, they leave one sum to reduce.

    Requires: a global program with a mesh, before `propagate-shardings`. Ensures: numerics
    unchanged but for the order of additions. Linear in the ops.
    """

    name = "add-pending-sums"

    def run(self, program: Program) -> None:
        add_pending_sums(program)
