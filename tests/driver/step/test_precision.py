"""Precision: autocast, asked for or around the call, is that of eager."""

from __future__ import annotations

import copy
import math
import statistics

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.backends.distributed import step_of
from shardweave.ir.capture.capture import capture
from shardweave.tests.driver.step.models import Normed, batch

BF16 = torch.bfloat16


def inputs() -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in batch().items()}


def eager(model: nn.Module, given: dict[str, Tensor], *, cast: bool) -> Tensor:
    """The loss; gradients are in `.grad`."""
    with torch.autocast("cpu", BF16, enabled=cast):
        loss, _ = model(**given)
    loss.backward()
    return loss.detach()


def distance(module: nn.Module, exact: nn.Module) -> float:
    """Of all gradients together, relative."""
    pairs = [
        (module.get_parameter(name).grad, parameter.grad)
        for name, parameter in exact.named_parameters()
    ]
    error = sum(
        ((a.double() - b) ** 2).sum().item() for a, b in pairs if a is not None and b is not None
    )
    return math.sqrt(error / sum((b**2).sum().item() for _, b in pairs if b is not None))


@pytest.mark.parametrize("is_around", [False, True], ids=["asked for", "around the call"])
def test_autocast_on_one_device_is_that_of_eager(is_around: bool) -> None:
    model, given = Normed().float(), inputs()
    step = sw.compile(model, kwargs=given, precision="" if is_around else "bf16")
    with torch.autocast("cpu", BF16, enabled=is_around):
        loss, out = step(**given)
    assert out.dtype == BF16
    assert loss.item() == eager(model, given, cast=True).item()
    for name, parameter in model.named_parameters():
        ours = step.get_parameter(name)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.grad, parameter.grad, rtol=1e-5, atol=1e-6)
    step.eval()
    model.eval()
    with torch.autocast("cpu", BF16):
        torch.testing.assert_close(step(**given)[0], model(**given)[0].detach())


@pytest.mark.parametrize(
    ("mesh", "bound"),
    [
        ("data=2", 1.05),  # the ratios spread by 0.05, so that their mean does by 0.015
        # Each rank rounds its term of a product to bfloat16, and then their sum is rounded.
        ("tensor=2", 1.15),
    ],
)
def test_autocast_on_a_mesh_is_about_as_far_from_float64_as_eager(mesh: str, bound: float) -> None:
    step = sw.compile(
        Normed().float(), kwargs=inputs(), mesh=mesh, backend="reference", precision="bf16"
    )
    ratios: list[float] = []
    for _ in range(16):  # Sums in another order round otherwise: better once, worse once.
        model, given = Normed().float(), inputs()
        exact = copy.deepcopy(model).double()
        eager(exact, {name: tensor.double() for name, tensor in given.items()}, cast=False)
        eager(model, given, cast=True)
        step.zero_grad()
        step.load_state_dict(model.state_dict())
        step(**given)
        assert 1e-4 < distance(model, exact) < 5e-2
        ratios.append(distance(step, exact) / distance(model, exact))
    assert statistics.geometric_mean(ratios) <= bound


def test_programs_with_and_without_autocast_are_kept_apart() -> None:
    model, given = Normed().float(), inputs()
    step = sw.compile(model, kwargs=given, backend="reference")
    plain = step(**given)[1]
    with torch.autocast("cpu", BF16):
        assert step(**given)[1].dtype == BF16
    assert plain.dtype == step(**given)[1].dtype == torch.float32
    assert [name.partition(",")[0] for name, _ in step.programs.kept()] == [
        "training in bfloat16",
        "training",
    ]


def test_autocast_around_a_given_program_is_refused() -> None:
    model, given = Normed().float(), inputs()
    step = step_of(capture(model, kwargs=given), model)
    with torch.autocast("cpu", BF16), pytest.raises(ValueError, match="in the dtypes that it has"):
        step(**given)


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision 'fp8' is unknown"):
        sw.compile(Normed(), kwargs=batch(), precision="fp8")
