"""Updates as programs: an optimizer's own code, cut into parts on shards and parts on full values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardweave.ir.capture.site import CaptureError
from shardweave.ir.capture.update.cut import CutUpdate, cut_update
from shardweave.ir.capture.update.program import Update, capture_update
from shardweave.ir.capture.update.reads import Sizes, calls_of
from shardweave.ir.torch_private import pytree
from shardweave.tests import own_optimizers as own

ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad),
    *(torch.optim.Adadelta, own.Lion, own.BySize),
)
MATRICES = (
    torch.optim.Muon,
    own.Soap,
    own.Shampoo,
    own.AdamMini,
    own.EightBit,
    own.SometimesNormed,
)
SHAPES = [(6, 8), (4, 4)]


def after_steps(make: Any, steps: int) -> tuple[Optimizer, list[Tensor]]:
    """An optimizer that has taken some steps, with gradients for the next."""
    torch.manual_seed(0)
    parameters: list[Tensor] = [
        nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES
    ]
    optimizer = make(parameters)
    for index in range(steps + 1):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if index < steps:
            optimizer.step()
    return optimizer, parameters


def captured(optimizer: Optimizer, parameters: list[Tensor]) -> tuple[Update, CutUpdate]:
    """The next update of the first parameter."""
    sizes = [Sizes(*[tuple(p.shape)] * 3) for p in parameters]
    calls = calls_of(optimizer, parameters, sizes, [True] * len(parameters))
    update = capture_update(optimizer, parameters, sizes, 0, calls[0])
    return update, cut_update(update, torch.device("cpu"))


def values(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    states = pytree.tree_leaves(optimizer.state.get(parameter))
    return [parameter.detach(), *(x for x in states if isinstance(x, Tensor) and x.ndim)]


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("make", [*ELEMENTWISE, *MATRICES])
def test_parts_of_an_update_compute_what_the_step_does(make: Any, steps: int) -> None:
    optimizer, parameters = after_steps(make, steps)
    update, parts = captured(optimizer, parameters)
    assert update.numbers is not None
    gradient = parameters[0].grad
    assert gradient is not None
    first, *states = (x.clone() for x in values(optimizer, parameters[0]))
    given = [first, gradient.clone(), *states]
    results = parts.core(*parts.before(*given, *update.numbers), *update.numbers)
    computed = parts.after(*given, *results, *update.numbers)
    optimizer.step()
    for new, wanted in zip(computed, values(optimizer, parameters[0]), strict=True):
        assert torch.equal(new, wanted)


@pytest.mark.parametrize("make", ELEMENTWISE)
def test_elementwise_update_gathers_nothing(make: Any) -> None:
    parts = captured(*after_steps(make, 1))[1]
    assert (parts.gathered, parts.results) == ((), ())


def test_muon_sends_its_momentum_and_its_update_in_bfloat16() -> None:
    parts = captured(*after_steps(torch.optim.Muon, 1))[1]
    sent = [(x.shape, x.dtype, x.is_sharded) for x in (*parts.gathered, *parts.results)]
    assert sent == [((6, 8), torch.bfloat16, True)] * 2
    products = 5 * (2 * 6 * 6 * 8 + 2 * 6**3 + 2 * 6 * 6 * 8)
    assert products <= parts.flops < 1.05 * products


def test_new_rate_is_a_number_of_the_same_graph() -> None:
    optimizer, parameters = after_steps(own.Soap, 1)
    sizes = [Sizes(*[tuple(p.shape)] * 3) for p in parameters]
    before = calls_of(optimizer, parameters, sizes, [True, True])[0]
    optimizer.param_groups[0]["lr"] = 0.5
    after = calls_of(optimizer, parameters, sizes, [True, True])[0]
    assert before.ops == after.ops
    assert (before.numbers[-1], after.numbers[-1]) == (0.01, 0.5)


class ChangesGradient(own.Rule):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad.div_(grad.norm())
        p.sub_(grad)


class ReadsRateTensor(own.Rule):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(grad / grad.norm() * torch.tensor([group["lr"]] * p.shape[-1], device=p.device))


@pytest.mark.parametrize("make", [ChangesGradient, ReadsRateTensor])
def test_step_with_other_effects_is_not_captured(make: Any) -> None:
    with pytest.raises(CaptureError):
        captured(*after_steps(make, 1))
