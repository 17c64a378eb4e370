"""Models whose Python dynamo does not follow: recorded as Python runs them, and equal to eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardweave as sw
from shardweave.ir.dialects.annotations import layer_of
from shardweave.tests.eager import Model, assert_three_steps_equal_eager, rows

TABLE: dict[str, int] = {}


def _text(error: Exception) -> int:
    return len(str(error))


def _caught() -> int:
    try:
        return TABLE["key"]
    except KeyError as error:
        return _text(error)


def unfollowed(y: Tensor) -> Tensor:
    """y, by a call that stops dynamo."""
    return y if random.random() < 2 else 2 * y


class Scaled(torch.autograd.Function):
    """A function whose gradient is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale * 3, None


def _state(self: Any, y: Tensor) -> Tensor:
    self.ema.mul_(0.9).add_(0.1 * y.detach().mean(0))
    self.other = self.other * 0.5 + y.detach().amax(0)
    self.seen = "unread"
    return y * self.ema


def _in_place(self: Any, y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 0] = 0
    y[y[:, 1] > 0] = self.ema
    y[1:].mul_(2).add_(1)
    with torch.no_grad():
        scale = y.abs().amax()
    y.register_hook(lambda gradient: gradient * 5)
    return y / scale


def _functions(self: Any, y: Tensor) -> Tensor:
    y = Scaled.apply(y, 2.0) + checkpoint(self.linear, y, use_reentrant=True)
    with torch.autocast("cpu", torch.bfloat16):
        z = self.linear(y).double()
    first, *_, last = y.unbind(1)
    return F.dropout(z, 0.5, True) + (first**2 - last)[:, None] + torch.rand(4, 4)


def _distance(y: Tensor) -> Tensor:
    one = torch.distributions.Normal(torch.zeros_like(y), 1.0)
    return torch.distributions.kl_divergence(torch.distributions.Normal(y, y.exp()), one)


def _here(y: Tensor) -> Tensor:
    with torch.device(y.device):
        return y + torch.arange(4)


def _in_range(y: Tensor) -> Tensor:
    with torch.profiler.record_function("doubled"):
        return y * 2


FORWARD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "device": lambda self, y: _here(y),
    "variable": lambda self, y: y + Variable(torch.ones(4)) * Variable(y),
    "text": lambda self, y: y * _caught(),
    "distance": lambda self, y: _distance(y),
    "number": lambda self, y: unfollowed(y) * torch.full((2,), 3.0).max().item(),
    "state": lambda self, y: _state(self, unfollowed(y)),
    "in place": lambda self, y: _in_place(self, unfollowed(y)),
    "functions": lambda self, y: _functions(self, unfollowed(y)),
    "range": lambda self, y: _in_range(unfollowed(y)),
    "numpy's numbers": lambda self, y: unfollowed(y) * np.float64(2.5),
}


@pytest.mark.filterwarnings("ignore::shardweave.PlanNote", "ignore:None of the inputs")
@pytest.mark.parametrize("name", FORWARD)
def test_python_that_dynamo_does_not_follow_is_recorded_and_equals_eager(name: str) -> None:
    model = Model(lambda self, x: FORWARD[name](self, self.linear(x)).square().sum())
    assert_three_steps_equal_eager(model)
    assert not hasattr(model, "seen") or name == "state"


@pytest.mark.parametrize(
    "scale",
    [
        lambda self, x: random.random(),
        lambda self, x: float(np.random.default_rng().random()),
        lambda self, x: unfollowed(x).sum().item(),
        lambda self, x: _counted(self, unfollowed(x)),
    ],
)
def test_what_is_not_the_same_at_each_call_stays_refused(scale: Callable[..., Any]) -> None:
    model = Model(lambda self, x: (self.linear(x) * scale(self, x)).sum(), count=0)
    state = random.getstate()
    with pytest.raises(sw.CaptureError, match=r"test_recorded\.py:\d+"):
        sw.capture(model, rows())
    assert random.getstate() == state
    assert model.count == 0


def _counted(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return x * self.count


def test_layers_of_a_recorded_model_have_their_names_and_a_note_says_why() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = Model(lambda self, x: unfollowed(self.net(x)).sum(), net=model.double())
    with pytest.warns(sw.CaptureNote, match=r"test_recorded\.py.*recorded and compared with eager"):
        program = sw.capture(model, rows())
    layers = {layer_of(op) for op in program.ops if op.name == "aten.relu"}
    assert layers == {"net.1"}


@pytest.mark.filterwarnings("ignore::shardweave.PlanNote")
def test_constants_that_a_recorded_model_makes_or_holds_are_kept() -> None:
    factor = [torch.tensor(2.0)]
    model = Model(
        lambda self, x: self.linear(
            unfollowed(x) + torch.from_numpy(np.arange(4.0)) * factor[0]
        ).sum()
    )
    (x,) = rows()
    expected = model(x).item()
    step = sw.compile(model, (x,), mesh="data=2", backend="reference")
    assert step(x).item() == pytest.approx(expected, rel=1e-12)
