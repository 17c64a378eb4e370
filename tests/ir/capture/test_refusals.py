"""What has no exact form is refused at capture, in one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.ir.capture.trace import trace
from shardweave.tests.ir.test_capture import Model, x


@pytest.fixture(autouse=True)
def own_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace each model here, be it one that another test has traced."""
    monkeypatch.setattr("shardweave.ir.capture.capture.trace", trace)


def _raise(message: str, *more: object) -> bool:
    raise ValueError(message, *more)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lambda self, a: self.drop(self.linear(a)).sum(),
            r"^module 'drop' \(test_\w+\.py:\d+: `.*`\): aten\.rrelu\S* draws random numbers in a way",
        ),
        (
            lambda self, a: (
                self.linear(a).sum() + torch.tensor([float(i) for i in range(99)]).sum()
            ),
            r"^the model \(test_\w+\.py:\d+: `.*`\): forward holds a constant tensor of 99 "
            r"different values, too many to write into the program; register it as a buffer",
        ),
        (
            lambda self, a: self.linear(a).sum() if a.sum() > 0 else self.linear(a).mean(),
            r"^the model \(test_\w+\.py:.*: Data-dependent branching.*torch\.where",
        ),
        (
            lambda self, a: self.linear(a)[a > 0].sum(),
            r"^the model \(test_\w+\.py:\d+: `.*`\): the shape of this result depends on the "
            r"data, .*torch\.where\(mask, x, 0\)",
        ),
        (
            lambda self, a: self.linear(a)[torch.where(a[:, 0] > 0)[0]].sum(),
            r"the shape of this result depends on the data",
        ),
        (
            lambda self, a: self.linear(a).sum() * a.sum().item(),
            r"^the model \(test_\w+\.py:\d+: `.*`\): a Python number is read out of a tensor",
        ),
        (
            lambda self, a: sum(self.linear(a).sum() for _ in range(int(a.sum()))),
            r"^the model \(test_\w+\.py:\d+: `.*`\): a Python number is read out of a tensor",
        ),
        (
            lambda self, a: (self.linear(a) @ torch.ones(3, 3, dtype=a.dtype)).sum(),
            r"^the model \(test_\w+\.py:\d+: `.*`\): a and b must have same reduction dim, but "
            r"got \[2, 4\] X \[3, 3\]",
        ),
        (
            lambda self, a: self.linear(a).sum() if a.ndim > 2 else _raise("expected 7 dims"),
            r"^the model \(test_\w+\.py:\d+: `.*`\): forward raises ValueError: expected 7 dims$",
        ),
        (
            lambda self, a: self.linear(a).sum() if a.ndim > 2 else _raise('it\'s ("seven")'),
            r": forward raises ValueError: it's \(\"seven\"\)$",
        ),
        (
            lambda self, a: self.linear(a).sum() if a.ndim > 2 else _raise("(dims)", 7, None),
            r": forward raises ValueError: '\(dims\)', 7, None$",
        ),
        (
            lambda self, a: (
                self.linear(a).sum()
                if torch.compiler.is_compiling() and torch.compiler.is_exporting()
                else _raise("compiled, and not exported")
            ),
            r": forward raises ValueError: compiled, and not exported$",
        ),
        (
            lambda self, a: checkpoint_sequential(self.linear, 1, a, use_reentrant=False).sum(),
            r"^the model \(test_\w+\.py:\d+: .*call checkpoint on each part\.$",
        ),
        (
            lambda self, a: self.linear(a),
            r"^the model's output has no scalar loss; return the loss, a tuple that begins with it",
        ),
        (
            lambda self, a: {"logits": self.linear(a)},
            r"^the model's output has no scalar loss",
        ),
        (
            lambda self, a: self.linear({"a": a}).sum(),
            r"^module 'linear' \(test_\w+\.py:.*: forward raises TypeError: linear\(\): "
            r"argument 'input' \(position 1\) must be Tensor, not dict$",
        ),
        (
            lambda self, a: self.linear(a).sum() + _raise(),  # type: ignore[call-arg]
            r"function _raise\); call it with the arguments that it takes, as in|argument: message",
        ),
        (
            lambda self, a: self.linear(a.add_(1)).sum(),
            r"^the model \(test_\w+\.py:.*: forward changes input 'arg0' in place; copy it first",
        ),
        (
            lambda self, a: self.linear(a).sum().maximum(torch.full((), -1e300)),
            r"^the model \(test_\w+\.py:\d+: .*the constant -1e\+300 does not fit in torch\.float32.*dtype=x\.dtype",
        ),
        (
            lambda self, a: self.linear(a)[torch.nonzero(a[:, 0])[:, 0]].sum(),
            r"the shape of this result depends on the data|keep all elements and mask them",
        ),
        (
            lambda self, a: (self.linear(a) + torch.empty_like(a)).sum(),
            r"aten\.empty_like\S* makes an uninitialized tensor.*use torch\.zeros in the model\.$",
        ),
    ],
)
def test_what_has_no_exact_form_is_refused_with_what_to_do(
    function: Callable[..., Any], expected: str
) -> None:
    model = Model(function, drop=nn.RReLU())
    with pytest.raises(CaptureError, match=expected) as error:
        capture(model, [x()])
    assert "\n" not in str(error.value)
