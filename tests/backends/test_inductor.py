"""backend="inductor": steps whose regions PyTorch's compiler compiles, beside eager."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.backends.inductor import compiled_region
from shardweave.backends.inductor.compiled_region import CompiledRegion
from shardweave.driver.models.models import build_example
from shardweave.ir.notes import TorchNote
from shardweave.tests.spawn import run_ranks

GPT = "gpt:layers=2,hidden=16,heads=4,vocab=32,seq=8,batch=4"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))) * 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def assert_trains_as_eager(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> None:
    """Three steps of SGD, losses and trained weights compared."""
    eager = copy.deepcopy(model)
    sw.compile(model, kwargs=inputs, backend="inductor", **options)
    of_both = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager)]
    for _ in range(3):
        losses: list[Tensor] = []
        for m, optimizer in zip((model, eager), of_both, strict=True):
            optimizer.zero_grad()
            losses.append(m(**inputs))
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0)
        for optimizer in of_both:
            optimizer.step()
    trained = sw.Step.of(model).full_state_dict()
    for name, wanted in eager.state_dict().items():
        torch.testing.assert_close(trained[name], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_equal_blocks_are_compiled_once_and_train_as_eager() -> None:
    torch.manual_seed(0)
    model = Net().double()
    compiled_region.COMPILED.clear()
    assert_trains_as_eager(model, {"x": torch.randn(4, 8, dtype=torch.float64)})
    kernels = sw.Step.of(model).kernels
    assert all(isinstance(kernel, CompiledRegion) for kernel in kernels)
    assert len(kernels) > len(compiled_region.COMPILED)
    lines = sw.Step.of(model).explain().splitlines()
    assert all(": Inductor, " in line for line in lines)


def test_region_that_is_not_compiled_runs_op_by_op_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **options: Any) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compiled_region, "standalone_compile", fail)
    compiled_region.COMPILED.clear()
    model = Net().double()
    with pytest.warns(TorchNote, match=r"run one by one: RuntimeError: no C\+\+ compiler"):
        assert_trains_as_eager(model, {"x": torch.randn(4, 8, dtype=torch.float64)})
    assert "since Inductor does not compile it" in sw.Step.of(model).explain()


def on_rank(mesh: str, zero: int) -> None:
    example = build_example(GPT, dtype=torch.float64)
    assert_trains_as_eager(example.module, example.kwargs, mesh=mesh, zero=zero)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2", 3), ("tensor=2", 0), ("stage=2", 0)])
def test_processes_train_as_eager(mesh: str, zero: int) -> None:
    run_ranks(on_rank, 2, mesh, zero, timeout_s=600.0)
