"""Models for tests of steps, and training beside eager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.tests.compiled import compile_copy

F64 = torch.float64


class Normed(nn.Module):
    """A linear map, batch norm, a linear map; the loss and the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.down(self.norm(self.up(x)).relu())
        return nn.functional.mse_loss(out, y), out


class Masked(nn.Module):
    """Hides patches in an order that is drawn for all samples, as masked autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 8, dtype=F64), nn.Linear(8, 4, dtype=F64)
        self.hidden = nn.Parameter(torch.randn(8, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        order = torch.rand(x.shape[:2], dtype=F64).argsort(1)
        back = order.argsort(1)
        seen = order[:, :2, None]
        part = self.encoder(x.gather(1, seen.expand(-1, -1, 4))).tanh()
        rest = self.hidden.expand(len(x), x.shape[1] - 2, -1)
        whole = torch.cat([part, rest], 1).gather(1, back[..., None].expand(-1, -1, 8))
        is_hidden = (back >= 2).to(F64)
        return ((self.decoder(whole) - x).square().mean(-1) * is_hidden).sum() / is_hidden.sum()


class Mixed(nn.Module):
    """Mixes each sample with another one of the batch, by weights that no shard could count out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, dtype=F64), nn.Linear(8, 4, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.linspace(0.5, 1, len(x), dtype=F64)[:, None, None]
        mixed = weight * x + (1 - weight) * x[torch.randperm(len(x))]
        return (self.last(self.first(mixed).relu()) - mixed).square().mean()


def batch(rows: int = 8) -> dict[str, Any]:
    """Inputs of `Normed`."""
    return {"x": torch.randn(rows, 4, dtype=F64), "y": torch.randn(rows, 4, dtype=F64)}


def compiled(model: nn.Module, example: Mapping[str, Any], **options: Any) -> sw.CompiledModule:
    """A step on a virtual mesh."""
    return compile_copy(
        model, kwargs=example, **{"mesh": "data=2,tensor=2", "backend": "reference", **options}
    )


def assert_same_state(step: nn.Module, model: nn.Module) -> None:
    """Parameters, gradients and buffers are those of eager, to the last digits of float64."""
    for name, parameter in model.named_parameters():
        ours = step.get_parameter(name)
        close(ours, parameter, name)
        assert (ours.grad is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            close(ours.grad, parameter.grad, f"gradient of {name}")
    for name, buffer in model.named_buffers():
        close(step.get_buffer(name), buffer, name)


def close(found: Any, expected: Any, what: str = "") -> None:
    """Equal but for rounding in float64, as plain tensors."""
    found, expected = (t.detach() if isinstance(t, Tensor) else t for t in (found, expected))
    torch.testing.assert_close(
        found, expected, rtol=1e-11, atol=1e-13, msg=lambda text: f"{what}: {text}"
    )


def optimizers(modules: Iterable[nn.Module]) -> list[torch.optim.Optimizer]:
    """One for each of some modules."""
    return [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in modules]


def two_devices() -> Cluster:
    """The testbed, with float64."""
    found = find_cluster("testbed")
    devices = {
        name: replace(one, flops={**one.flops, "float64": 1e10})
        for name, one in found.devices.items()
    }
    return replace(found, devices=devices)
