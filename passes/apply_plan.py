from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.sharding.flow import check_not_propagated
from shardweave.passes.program_pass import PassOnProgram
from shardweave.planners.annotate import annotate
from shardweave.planners.plan import Plan


@dataclass(frozen=True)
class ApplyPlanPass(PassOnProgram):
    """Annotate parameters, inputs and layer outputs with the shardings of a plan.

    The plan is read from `file`, or given as JSON text in `json`. A program without a mesh
    takes the plan's. A parameter's sharding is how it is stored. How ops read it (`dist.used`,
    where that is another) is what the plan's `used` says; without an entry, axes that cut the
    batch, dim 0 of an input, are gathered before use, as in FSDP. A pattern is for the
    parameters with as many dims as its sharding.

    A plan whose axes factor those of the program's mesh (tensor.0=2,tensor.1=2 for tensor=4)
    refines it.

    Requires: a global program before `propagate-shardings` that has what the plan names.
    Ensures: arguments named by the plan carry `dist.sharding` (and `dist.used`), layer outputs
    `wanted`; numerics unchanged.
    """

    name = "apply-plan"
    file: str = ""
    json: str = ""

    @staticmethod
    def of(plan: Plan) -> ApplyPlanPass:
        return ApplyPlanPass(json=plan.to_json())

    def run(self, program: Program) -> None:
        if bool(self.file) == bool(self.json):
            raise ValueError('give one of file="plan.json" and json="...".')
        check_not_propagated(program, self.name)
        annotate(Plan.load(self.file) if self.file else Plan.from_json(self.json), program)
