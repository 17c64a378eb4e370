"""Three steps of a model and of its program on a virtual mesh, compared with nothing left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.driver.checking.check import scalar_loss
from shardweave.driver.step.precision import copy_of_model
from shardweave.ir.capture.seeded import SeededRandom
from shardweave.ir.library.philox import STATE

BOUND = 1e-9
ROUNDING = 1e-11
NUM_STEPS = 3
SEED = 0

State = dict[str, Tensor]


class Model(nn.Module):
    """A linear map, two buffers, and a function of these that is the forward pass."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("ema", torch.ones(4, dtype=torch.float64))
        self.register_buffer("other", torch.full((4,), 2.0, dtype=torch.float64))
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def rows() -> tuple[Tensor]:
    """One input of 4 x 4."""
    return (torch.randn(4, 4, dtype=torch.float64),)


def assert_three_steps_equal_eager(
    model: nn.Module, batch: Callable[[], Sequence[Tensor]] = rows, mesh: str = "data=2"
) -> None:
    """Loss, every gradient and every buffer, over steps with other inputs each.

    The model is compiled before it is run, both begin in the same state and draw the same numbers.
    """
    batches = [batch() for _ in range(NUM_STEPS)]
    # Hooks may read tensors of the model itself, so that it is the one to compile.
    model, compiled = copy_of_model(model), model
    options = {"mesh": mesh, "backend": "reference", "seed": SEED, "backward": "in_call"}
    step = sw.compile(compiled, batches[0], **options)
    numbers = SeededRandom(SEED)
    for number, inputs in enumerate(batches):
        with numbers:
            expected = after_call(model, inputs)
        found = after_call(step, inputs)
        found.pop(f"buffer {STATE}", None)
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            error = (found[name] - tensor).norm() / max(tensor.norm().item(), 1e-3)
            assert error <= BOUND, f"step {number}: {name} is off by {error:.1e}"


def assert_step_equals_eager(
    step: CompiledModule, model: nn.Module | State, *inputs: Tensor, bound: float = ROUNDING
) -> None:
    """Loss and every gradient, of one call with both in the same state.

    model: or what it gave (`after_call`) before it was compiled. bound: of an entry's difference,
    absolute and relative.
    """
    expected = after_call(model, inputs) if isinstance(model, nn.Module) else model
    found = after_call(step, inputs)
    for kind, tensor in expected.items():
        if not kind.startswith("buffer "):
            torch.testing.assert_close(
                found[kind], tensor, rtol=bound, atol=bound, msg=lambda t, kind=kind: f"{kind}: {t}"
            )


def after_call(step: nn.Module, inputs: Sequence[Tensor]) -> State:
    """The loss, gradients and buffers after a call."""
    step.zero_grad(set_to_none=True)
    inputs = [tensor.clone() for tensor in inputs]
    loss = scalar_loss(step(*inputs))
    if not isinstance(step, CompiledModule):
        loss.backward()
    grads = {
        f"grad {name}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in step.named_parameters()
    }
    buffers = {f"buffer {name}": b.double() for name, b in step.named_buffers()}
    return {"loss": loss.detach(), **grads, **copy.deepcopy(buffers)}
