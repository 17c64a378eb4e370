"""Steps with fused kernels: on the CPU they run on ATen and say so."""

from __future__ import annotations

import pytest
import torch

from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.driver.models.models import build_example
from shardweave.ir.dialects.kernel import FusedOp, fuse
from shardweave.ir.program.staged import ops_of_parts
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.compiled import OfX, compile_copy, step_of_copy
from shardweave.tests.ir_text import step as step_text
from shardweave.tests.zoo import captured

GPT = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=2"


def test_fused_step_on_the_cpu_equals_the_plain_one() -> None:
    case = captured(GPT)
    plain = step_of_copy(case.program, case.example.module)
    fused = step_of_copy(
        run_passes(case.program, "fuse-kernels"), case.example.module, backend="triton"
    )
    assert "kernels[0](" in fused.source
    torch.testing.assert_close(fused(**case.example.kwargs), plain(**case.example.kwargs))
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_explain_says_what_runs_each_region_and_why() -> None:
    example = build_example(GPT)
    step = compile_copy(example.module, kwargs=example.kwargs, backend="triton")
    assert isinstance(step, CompiledModule)
    lines = step.explain().splitlines()
    assert len(lines) == len(step.kernels) > 3
    assert all("ATen, op by op, since kernels need a GPU: " in line for line in lines)
    plain = compile_copy(example.module, kwargs=example.kwargs)
    assert isinstance(plain, CompiledModule)
    assert plain.explain() == "no fused regions: every op runs on ATen"


@pytest.mark.parametrize("passes", ["", "preset:kernels"], ids=["by default", "among the passes"])
def test_micro_batches_are_fused_once(passes: str) -> None:
    example = build_example(GPT)
    stages = balanced_stages(captured(GPT).program, 1)
    plan = Plan(pipeline=Pipeline(stages, 2, schedule="1f1b"))
    step = compile_copy(
        example.module, kwargs=example.kwargs, plan=plan, passes=passes, backend="triton"
    )
    assert isinstance(step, CompiledModule)
    fused = [op for op in ops_of_parts(step.program) if isinstance(op, FusedOp)]
    assert len(step.kernels) == len(fused) > 3
    torch.testing.assert_close(step(**example.kwargs), example.module(**example.kwargs))


def test_region_that_no_template_fits_runs_on_aten_and_says_why() -> None:
    program = step_text("""
        input %x : tensor<4x4xf32>
        %a = aten.sum.dim_IntList(%x, dim = [0]) : tensor<4xf32>
        %e = aten.exp(%a) : tensor<4xf32>
        output %e
    """)
    ops = list(program.ops)
    fuse(ops, program.return_op, [0, 1])
    step = step_of_copy(program, OfX(), backend="triton")
    said = step.kernels[0].explain(torch.device("cuda"))
    why = "a sum over all rows is known only when the kernel ends"
    assert said == f"ATen, op by op, since {why}: sum.dim_IntList, exp"
    x = torch.randn(4, 4)
    torch.testing.assert_close(step(x=x), x.sum(0).exp())


def test_cuda_graph_off_the_gpu_is_refused() -> None:
    example = build_example(GPT)
    step = compile_copy(example.module, kwargs=example.kwargs, backend="triton", cuda_graph=True)
    with pytest.raises(ValueError, match="needs a GPU, but the step runs on cpu"):
        step(**example.kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["launched", "graph"])
def test_fused_step_on_a_gpu_equals_eager(cuda_graph: bool) -> None:
    example = build_example(GPT)
    eager = example.module(**example.kwargs)
    eager.backward()
    step = compile_copy(
        example.module,
        kwargs=example.kwargs,
        backend="triton",
        device="cuda",
        cuda_graph=cuda_graph,
    )
    batch = {name: tensor.cuda() for name, tensor in example.kwargs.items()}
    for _ in range(3):  # the first call captures; each must give the same
        for parameter in step.parameters():
            parameter.grad = None
        loss = step(**batch)
        torch.testing.assert_close(loss.cpu(), eager.detach(), rtol=1e-4, atol=1e-5)
        for (name, a), (_, b) in zip(
            step.named_parameters(), example.module.named_parameters(), strict=True
        ):
            assert a.grad is not None, name
            torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_tuned_kernels_on_a_gpu_say_what_was_chosen() -> None:
    example = build_example(GPT)
    step = compile_copy(example.module, kwargs=example.kwargs, backend="triton", device="cuda")
    assert isinstance(step, CompiledModule)
    step(**{name: tensor.cuda() for name, tensor in example.kwargs.items()})
    assert "Triton, " in step.explain()
    assert "BLOCK" in step.explain() or "is slower than ATen" in step.explain()
