"""A backend of one's own, registered from outside the package."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.backends.reference.reference import VirtualBackend
from shardweave.backends.registry import BACKENDS
from shardweave.backends.step.backend import Runner
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.program.program import Program
from shardweave.tests.compiled import compile_copy


class CountingBackend(VirtualBackend):
    """The reference backend, which counts the regions that it is given."""

    regions = 0

    def load(self, program: Program, pending: Collection[str] = ()) -> Runner:
        CountingBackend.regions += sum(isinstance(op, FusedOp) for op in program.ops)
        return super().load(program, pending)


def make(program: Program, device: torch.device, **options: object) -> CountingBackend:
    assert options == {"cuda_graph": False, "reduce_dtype": None}
    return CountingBackend()


@pytest.fixture
def counting() -> Iterator[None]:
    sw.register_backend("counting", make, has_processes=False, passes="fuse-blocks")
    yield
    del BACKENDS["counting"]


def test_step_runs_on_a_backend_of_ones_own_after_its_passes(counting: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    loss = lambda output: output.square().mean()  # noqa: E731
    step = compile_copy(model, (x,), mesh="data=2", loss=loss, backend="counting")
    ours, _ = step(x)
    torch.testing.assert_close(ours, loss(model(x)), rtol=1e-9, atol=0)
    assert CountingBackend.regions > 0


def test_name_of_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="a backend 'triton' is registered already"):
        sw.register_backend("triton", make)
