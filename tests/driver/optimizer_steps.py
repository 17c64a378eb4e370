"""Three steps of optimizers on the processes of a test, beside the same steps of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import shardweave as sw
from shardweave.backends.optimizers.shards import full_value
from shardweave.tests import own_optimizers
from shardweave.tests.compiled import compile_copy

STEPS = 3

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}],
    "Adadelta": [{}],
    "Adafactor": [{}],
    "Adagrad": [{"initial_accumulator_value": 0.1}],
    "Adam": [{"amsgrad": True}],
    "AdamW": [{"maximize": True}, {"fused": True}, {"foreach": True}],
    "Adamax": [{}],
    "Muon": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "SGD": [{"momentum": 0.9, "nesterov": True}],
}
"""Settings with which each class of torch.optim is tried."""

NOT_TRIED = {"Optimizer", "SparseAdam", "LBFGS"}
"""Of torch.optim: the base class, one of sparse gradients, and one that is tried with a closure."""


class Uneven(nn.Module):
    """Matrices and biases of sizes that do not all divide by the mesh."""

    def __init__(self, *, is_even: bool) -> None:
        super().__init__()
        width = 8 if is_even else 7
        self.up = nn.Linear(6, width, bias=not is_even)
        self.mid = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, 6, bias=not is_even)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.mid(F.gelu(self.up(x))))).square().mean()


def full(tensor: Tensor) -> Tensor:
    return (full_value(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def maker(name: str) -> Callable[..., Optimizer]:
    own = vars(own_optimizers)
    return cast("Callable[..., Optimizer]", own.get(name) or getattr(torch.optim, name))


def cases() -> list[tuple[str, dict[str, Any]]]:
    names = {
        name: cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and name not in NOT_TRIED
    }
    assert names.keys() == SETTINGS.keys(), "a class of torch.optim without settings to try"
    own = [(cls.__name__, dict[str, Any]()) for cls in own_optimizers.OWN]
    return [(name, settings) for name in sorted(names) for settings in SETTINGS[name]] + own


def groups_of(model: nn.Module, *, matrices: bool) -> list[dict[str, Any]]:
    """Two groups with settings of their own; matrices: those alone."""
    named = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 or not matrices]
    first = [p for n, p in named if n.startswith("up")]
    rest = [p for n, p in named if not n.startswith("up")]
    return [{"params": first, "lr": 0.02}, {"params": rest}]


def errors_of(
    options: dict[str, Any], chosen: list[tuple[str, dict[str, Any]]], *, is_even: bool
) -> dict[str, float]:
    """The largest error of a parameter after the steps of each optimizer."""
    model, x, step = _compiled(options, is_even=is_even)
    start = copy.deepcopy(model.state_dict())
    errors: dict[str, float] = {}
    for name, settings in chosen:
        step.load_state_dict(start)
        eager = copy.deepcopy(model)
        pairs = [(each, _optimizer(name, settings, each)) for each in (step, eager)]
        errors[f"{name} {settings}"] = _error_of_steps(pairs, x)
    return errors


def errors_of_resumed(
    options: dict[str, Any], others: dict[str, Any], names: list[str], folder: str
) -> dict[str, float]:
    """The same, where a checkpoint of the steps goes on with other options of compile."""
    model, x, step = _compiled(options, is_even=True)
    start = copy.deepcopy(model.state_dict())
    resumed = compile_copy(copy.deepcopy(model), (x,), **others)
    errors: dict[str, float] = {}
    for name in names:
        step.load_state_dict(start)
        eager = copy.deepcopy(model)
        first, last, wanted = (_optimizer(name, {}, each) for each in (step, resumed, eager))
        _error_of_steps([(step, first), (eager, wanted)], x)
        sw.save_checkpoint(f"{folder}/{name}", STEPS, {"model": step, "optimizer": first})
        sw.load_checkpoint(f"{folder}/{name}", {"model": resumed, "optimizer": last})
        errors[name] = _error_of_steps([(resumed, last), (eager, wanted)], x)
    return errors


def _compiled(options: dict[str, Any], *, is_even: bool) -> tuple[nn.Module, Tensor, Any]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Uneven(is_even=is_even).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    return model, x, compile_copy(model, (x,), **options)


def _optimizer(name: str, settings: dict[str, Any], module: nn.Module) -> Optimizer:
    is_one_group = name in ("AcrossParameters", "Lookahead", "Wrapper")
    parameters: Any = (
        list(module.parameters()) if is_one_group else groups_of(module, matrices=name == "Muon")
    )
    return maker(name)(parameters, lr=0.05, **settings)


def _error_of_steps(pairs: list[tuple[Any, Optimizer]], x: Tensor) -> float:
    (step, _), (eager, _) = pairs
    for index in range(STEPS):
        for module, optimizer in pairs:
            optimizer.zero_grad()
            loss = module(x)
            if module is eager:
                loss.backward()
        for _, optimizer in pairs:
            optimizer.param_groups[0]["lr"] = 0.02 / (index + 1)
            torch.manual_seed(index)
            optimizer.step()
    wanted = dict(eager.named_parameters())
    return max(float((full(p) - wanted[n]).abs().max()) for n, p in step.named_parameters())
