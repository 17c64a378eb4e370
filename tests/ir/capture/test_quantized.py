"""Modules of torch.ao.quantization: their buffers say what they do, and are updated as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import fake_quantize, observer
from torch.nn import functional as F

from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.tests.compiled import compile_copy

PER_CHANNEL = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0, "dtype": torch.qint8}
KINDS: dict[str, Any] = {
    "average": fake_quantize.FakeQuantize.with_args(
        observer=observer.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    ),
    "channels": fake_quantize.FakeQuantize.with_args(
        observer=observer.PerChannelMinMaxObserver, quant_min=-128, quant_max=127, **PER_CHANNEL
    ),
    "fused": fake_quantize.FusedMovingAvgObsFakeQuantize.with_args(
        observer=observer.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    ),
}


class Quantized(nn.Module):
    """A linear map of what is quantized, by a weight that is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.input, self.weight = KINDS["average" if kind == "channels" else kind](), KINDS[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.input(x), self.weight(self.linear.weight)).square().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_quantization_is_that_of_eager_in_training_and_when_its_observers_rest(kind: str) -> None:
    torch.manual_seed(0)
    model, batches = Quantized(kind), torch.randn(3, 4, 4).cumsum(0)
    model(batches[0])  # sizes of buffers per channel
    eager = copy.deepcopy(model)
    step = compile_copy(model, (batches[0],), mesh="data=2,tensor=2", backend="reference")
    for number, x in enumerate(batches):
        if number == 2:
            step.input.disable_observer()
            eager.input.disable_observer()
        step.zero_grad()
        eager.zero_grad()
        loss = eager(x)
        loss.backward()
        torch.testing.assert_close(step(x).detach(), loss.detach())
        torch.testing.assert_close(step.full_gradients()["linear.weight"], eager.linear.weight.grad)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(step.full_state_dict()[name], value, msg=name)


def test_sizes_that_the_first_call_gives_are_asked_for() -> None:
    with pytest.raises(CaptureError, match="run the model once, and compile it then"):
        capture(Quantized("channels"), (torch.randn(4, 4),))
