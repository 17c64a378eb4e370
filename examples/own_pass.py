"""A pass of one's own, from outside the package: wait for communication as late as possible.

`python own_pass.py` shows what it gains. On the command line it is a pass like any other:
`shardweave opt step.mlir --load own_pass.py --passes start-collectives,late-waits`.
"""

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

import shardweave as sw
from shardweave.driver.models.models import build_example
from shardweave.ir.dialects.dist import WaitOp


@dataclass(frozen=True)
class LateWaitsPass(ModulePass):
    """Move each wait to just before the first op that reads what arrives."""

    name = "late-waits"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        block = sw.Program(op).function.body.block
        position = {each: index for index, each in enumerate(block.ops)}
        waits = [each for each in position if isinstance(each, WaitOp)]
        for wait in waits:
            users = [use.operation for result in wait.results for use in result.uses]
            wait.detach()
            block.insert_op_before(wait, min(users, key=position.__getitem__))


sw.register_pass(LateWaitsPass)

if __name__ == "__main__":
    example = build_example("gpt:layers=2,hidden=256,vocab=256,seq=128,batch=4")
    step = sw.capture(example.module, kwargs=example.kwargs)
    sw.plan(step, "data=2,tensor=2").save("plan.json")
    spec = 'apply-plan{file="plan.json"},preset:sub-batches,start-collectives'
    for passes in (spec, f"{spec},late-waits"):
        found = sw.simulate(sw.run_passes(step, passes, mesh="data=2,tensor=2"), "oases-3090")
        print(f"{found.exposed_communication_s * 1e3:.3f} ms of communication is exposed")
