"""What a model's code reads besides tensors is followed when it changes, wherever it is held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.driver.step.settings import EACH, Settings, changes
from shardweave.tests.compiled import in_eager

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@dataclass
class Config:
    """Settings of `Read`."""

    gain: ClassVar[float] = 1.0
    shift: float = 0.0
    inner: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(power=1))


class Read(nn.Module):
    """A loss by settings of every kind."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.config = nn.Linear(4, 4), Config()
        self.weights, self.by_name = [1.0, 2.0], {"a": 1.0}
        # Not to be pickled, as traces that are shared among tests do not tell globals apart.
        self.activation: Callable[[Tensor], Tensor] = lambda x: x.tanh()
        self._hidden: float | None = None
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.activation(self.fc(x)) * self.scale * self.config.gain + self.config.shift
        out = out * self.weights[0] * self.by_name["a"]
        if self._hidden is not None:
            out = out * self._hidden
        if not self.training:
            out = out / self.temperature
        return (out**self.config.inner.power).square().mean()


def times(factor: int) -> Callable[[nn.Module, object, Tensor], Tensor]:
    """A forward hook."""
    return lambda module, args, out: out * factor


def compiled(model: nn.Module, **options: object) -> sw.CompiledModule:
    options = {"mesh": "data=2", "backend": "reference", "backward": "in_call", **options}
    return sw.compile(model, (X,), **options)  # type: ignore[arg-type]


def changes_of(model: Read) -> list[Callable[[], object]]:
    return [
        lambda: setattr(model, "scale", 2.0),
        lambda: setattr(model.config, "shift", 0.5),
        lambda: setattr(model.config, "gain", 1.25),
        lambda: setattr(model.config.inner, "power", 2),
        lambda: setattr(model, "config", Config(shift=0.25)),
        lambda: model.weights.__setitem__(0, 3.0),
        lambda: model.by_name.update(a=4.0),
        lambda: setattr(model, "activation", torch.sin),
        lambda: setattr(model, "_hidden", 0.5),
    ]


def test_settings_are_followed_wherever_the_model_holds_them() -> None:
    model = Read()
    step = compiled(model)
    before = step(X)
    for change in changes_of(model):
        change()
        after = step(X)
        torch.testing.assert_close(after, in_eager(model, X).detach())
        assert not torch.equal(after, before)
        before = after


def test_setting_that_is_changed_back_and_forth_keeps_both_programs() -> None:
    model = Read()
    step = compiled(model)
    results: dict[float, Tensor] = {}
    for scale in (1.0, 2.0, 3.0) * 3:
        model.scale = scale
        torch.testing.assert_close(step(X), results.setdefault(scale, step(X)))
        torch.testing.assert_close(step(X), in_eager(model, X).detach())
    assert len(sw.Step.of(model).programs.kept()) == 3


def test_setting_that_evaluation_alone_reads_is_followed_there() -> None:
    model = Read()
    step = compiled(model)
    step.eval()(X)
    model.temperature = 2.0
    step.train()(X)
    torch.testing.assert_close(step.eval()(X), in_eager(model.eval(), X).detach())


def test_hook_that_takes_the_place_of_another_is_followed() -> None:
    model = Read()
    handles = [model.fc.register_forward_hook(times(2))]
    handles += [model.fc.weight.register_hook(lambda grad: grad * 2)]
    step = compiled(model)
    step(X)
    for handle in handles:
        handle.remove()
    model.fc.register_forward_hook(times(3))
    model.fc.weight.register_hook(lambda grad: grad * 3)
    step.zero_grad()
    loss = in_eager(model, X)
    loss.backward()
    expected = model.fc.weight.grad
    step.zero_grad()
    torch.testing.assert_close(step(X), loss.detach())
    torch.testing.assert_close(step.fc.weight.grad, expected)


def test_hook_that_was_written_into_the_dict_of_hooks_is_followed_within_some_calls() -> None:
    """No handle of torch's tells of it."""
    model = Read()
    step = compiled(model)
    with torch.no_grad():
        step(X)
        model.fc._forward_hooks[-1] = times(3)
        losses = [step(X) for _ in range(EACH)]
    torch.testing.assert_close(losses[-1], in_eager(model, X).detach())


def test_variable_around_the_loss_is_read_again_by_recompile() -> None:
    factor = 1.0
    model = nn.Linear(4, 4)
    step = compiled(model, loss=lambda out: factor * out.square().mean())
    first = step(X)[0]
    factor = 3.0
    torch.testing.assert_close(step(X)[0], first)
    sw.Step.of(model).recompile()
    torch.testing.assert_close(step(X)[0], first * 3)


class Dropping(nn.Module):
    """Dropout between two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x))).square().mean()


def test_settings_are_followed_in_parameters_of_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardweave")
    model = Dropping()
    step = sw.compile(model, (X,), precision="bf16-true")
    step(X)
    model.drop.p = 0.0
    assert step(X).item() == in_eager(model, X.bfloat16()).item()
    assert caplog.records[-1].getMessage().endswith(": drop.p is 0.0, was 0.5")
    model.up.register_forward_hook(times(2))
    assert step(X).item() == in_eager(model, X.bfloat16()).item()


class Defaulted(nn.Module):
    """Adds numbers of torch's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.square: Callable[[Tensor], Tensor] = lambda x: x.square()  # as in `Read`

    def forward(self, x: Tensor) -> Tensor:
        return self.square(self.fc(x) + torch.ones(4)).mean()


def test_default_dtype_is_followed() -> None:
    model = Defaulted()
    step = compiled(model)
    assert step(X).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert step(X).dtype == in_eager(model, X).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_no_setting_is_not_looked_at() -> None:
    model = Read()
    model.last = torch.ones(2)
    vars(model)["many"] = list(range(1000))
    settings = Settings(model)
    before = settings.now()
    model.last = torch.zeros(2)
    vars(model)["many"][0] = 5
    model.eval()
    assert settings.now().is_same(before)
    model.scale = 2.0
    assert changes(before, settings.now()) == {"scale": "is 2.0, was the class's"}


class Deep(nn.Module):
    """Reads settings of configs in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.stages = [SimpleNamespace(scale=1.0), {"last": SimpleNamespace(scale=1.0)}]

    def forward(self, x: Tensor) -> Tensor:
        last = self.stages[1]["last"].scale  # type: ignore[index, union-attr]
        out = self.fc(x) * self.stages[0].scale * last  # type: ignore[union-attr]
        return out.square().mean()


def test_configs_in_lists_are_followed() -> None:
    model = Deep()
    step = compiled(model, mesh=None)
    for place in (model.stages[0], model.stages[1]["last"]):  # type: ignore[index]
        place.scale = 3.0  # type: ignore[union-attr]
        torch.testing.assert_close(step(X), in_eager(model, X))
