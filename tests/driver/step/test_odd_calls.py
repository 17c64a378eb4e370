"""Calls of PyTorch at the edge of what they take, found by OpInfo's samples."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw

F64 = torch.float64


def _inverse_transform(x: Tensor) -> Tensor:
    spectrum = torch.stft(x, 8, window=torch.hann_window(8, dtype=F64), return_complex=True)
    return torch.istft(spectrum, 8, window=torch.hann_window(8, dtype=F64))


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "inverse transform": _inverse_transform,
    "covariance with weights": lambda x: torch.cov(
        x, fweights=torch.arange(1, 33), aweights=torch.linspace(0.5, 1, 32, dtype=F64)
    ),
    "filled by a tensor": lambda x: x.index_fill(1, torch.tensor([1, 5]), x.sum()),
    "put by a mask": lambda x: torch.index_put(x, (torch.arange(4) > 1,), x.sum(0)),
    "added by a mask": lambda x: torch.index_put(x, (torch.arange(4) > 1,), x.sum(0), True),
    "narrowed from a tensor": lambda x: torch.narrow(x, 1, torch.tensor(3), 8),
    "nothing concatenated": lambda x: torch.cat([x[:, :0], x[:, 32:]], 1).sum() + x,
}


class _Calling(nn.Module):
    """A call of what is scaled by a parameter."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call, self.scale = call, nn.Parameter(torch.rand(4, 32, dtype=F64))
        self.none = nn.ParameterList(nn.Parameter(torch.zeros(0, 4, dtype=F64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        nothing = sum((p.sum() for p in self.none), torch.zeros((), dtype=F64))
        return CALLS[self.call](x * self.scale).square().mean() + nothing


@pytest.mark.parametrize("call", CALLS)
def test_calls_equal_eager_where_parameters_are_stored_in_shards(call: str) -> None:
    model, x = _Calling(call), torch.randn(4, 32, dtype=F64)
    eager = copy.deepcopy(model)
    plan = {"scale": '[{}, {"data"}]', "none.*": '[{}, {"data"}]'}
    step = sw.compile(model, (x,), mesh="data=2", plan=plan, backend="reference")
    loss = eager(x)
    loss.backward()
    ours = step(x)
    ours.backward()
    torch.testing.assert_close(ours.detach(), loss.detach())
    torch.testing.assert_close(step.full_gradients()["scale"], eager.scale.grad)


class _Number(nn.Module):
    """A model that returns a number of Python, which its data steers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        y = self.linear(x).square().mean()
        return y, y.item()


def test_number_that_is_returned_is_refused_with_its_line() -> None:
    with pytest.raises(sw.CaptureError, match=r"y\.item\(\)`\): a Python number is read"):
        sw.compile(_Number(), (torch.randn(2, 4),), mesh="data=2", backend="reference")
