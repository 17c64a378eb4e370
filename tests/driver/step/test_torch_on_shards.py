"""What PyTorch does with the parameters of a step, on two processes where they are DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardweave as sw
from shardweave.tests.compiled import compile_copy
from shardweave.tests.driver.step.models import F64, Normed, batch, close, optimizers
from shardweave.tests.spawn import run_ranks
from shardweave.tests.torch_versions import new_torch


def steps_beside_eager() -> None:
    torch.manual_seed(0)
    model = Normed()
    step = compile_copy(model, kwargs=batch(), mesh="tensor=2")
    both = optimizers([step, model])
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (step, model)]
    assert step.to("cpu").double() is step
    numbers: dict[nn.Module, list[float]] = {step: [], model: []}
    for _ in range(2):
        inputs = batch()
        for module, average, optimizer in zip((step, model), averages, both, strict=True):
            optimizer.zero_grad(set_to_none=False)
            loss, _ = module(**inputs)
            if module is model:
                loss.backward()
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            numbers[module] += [norm.item(), *numbers_of(module)]
            optimizer.step()
            average.update_parameters(module)
    assert numbers[step] == pytest.approx(numbers[model], rel=1e-9, abs=1e-12)
    for name, parameter in model.named_parameters():
        close(sw.full_tensor(step.get_parameter(name)), parameter, name)
    inputs = batch()
    ours, theirs = (average.eval()(**inputs)[1] for average in averages)
    close(sw.full_tensor(ours), theirs)
    refuses(step)


def numbers_of(module: nn.Module) -> list[float]:
    """What a script logs of gradients: read out of DTensors, each is of the whole tensor."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [
        *(gradient.norm().item() for gradient in gradients),
        float(sum(gradient.mean() for gradient in gradients)),
        float(bool(gradients[0].abs().max() > 1e-3)),
        *(number for gradient in gradients for number in gradient.flatten()[:2].tolist()),
    ]


def refuses(step: sw.CompiledModule) -> None:
    """What would be silently wrong, or end in words of torch's."""
    loss, out = step(**batch())
    assert isinstance(out, DTensor)
    for result in (loss, out.sum(), sw.full_tensor(out).sum()):
        with pytest.raises(RuntimeError, match="the step"):
            torch.autograd.grad(result, list(step.parameters()), allow_unused=True)
    with pytest.raises(TypeError, match="in the compiled programs"):
        step.bfloat16()
    twin = copy.deepcopy(step)
    twin.up.weight.data = twin.up.weight.data * 2
    with pytest.raises(
        ValueError, match=r"the \.data of 'up.weight' was set, which does not reach"
    ):
        twin(**batch())
    sharded = Normed()
    parallelize_module(sharded, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"'up\.weight' of the model is a DTensor already"):
        compile_copy(sharded, kwargs=batch(), mesh="tensor=2")


@new_torch("DTensor does not flatten a sharded dim")
def test_averages_copies_and_clipping_are_those_of_eager_and_the_rest_is_refused() -> None:
    run_ranks(steps_beside_eager, 2)


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "RAdam": torch.optim.RAdam,
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
}


class Plain(nn.Module):
    """Without a norm, behind which gradients of a bias are rounding, which Adam divides by."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=F64), nn.Linear(8, 4, dtype=F64)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.down(self.up(x).relu())
        return nn.functional.mse_loss(out, y), out


def three_steps_of_each() -> None:
    for make in OPTIMIZERS.values():
        torch.manual_seed(0)
        model = Plain()
        step = compile_copy(model, kwargs=batch(), mesh="tensor=2")
        torch.manual_seed(1)
        three_steps(step, make)
        torch.manual_seed(1)
        three_steps(model, make)
        for key, parameter in model.named_parameters():
            ours = sw.full_tensor(step.get_parameter(key)).detach()
            torch.testing.assert_close(ours, parameter.detach(), rtol=1e-9, atol=1e-9)


def three_steps(module: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = make(list(module.parameters()))
    for _ in range(3):
        inputs = batch()

        def loss(inputs: dict[str, Tensor] = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = module(**inputs)[0]
            if not isinstance(module, sw.CompiledModule):
                loss.backward()
            return loss.detach()

        optimizer.step(loss)  # type: ignore[arg-type]


@pytest.mark.slow
def test_optimizers_on_shards_are_those_of_eager() -> None:
    run_ranks(three_steps_of_each, 2)
