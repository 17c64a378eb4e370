"""Run by the ranks of a test: three steps of AdamW, sharded, against three of eager.

Called with the mesh, the plan and a model as `build_example` names it; fails by exception.
"""

import copy
import gc
import sys

import torch

from shardweave.driver.checking.check import scalar_loss
from shardweave.driver.models.models import build_example
from shardweave.driver.processes.launch import end_process
from shardweave.tests.compiled import compile_copy

BOUND = 1e-9


def main(mesh: str, plan: str, spec: str) -> None:
    example = build_example(spec, dtype=torch.float64)
    batch = example.kwargs
    step = compile_copy(example.module, kwargs=batch, mesh=mesh, plan=plan)
    eager = copy.deepcopy(example.module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (step, eager)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, expected = step(**batch), scalar_loss(eager(**batch))
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=BOUND, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    trained = step.full_state_dict()
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=BOUND, atol=BOUND)
    untrained = example.module.state_dict()
    assert any(not torch.equal(trained[name], untrained[name]) for name in trained)


if __name__ == "__main__":
    gc.set_threshold(100_000)
    main(*sys.argv[1:])
    end_process(0)
