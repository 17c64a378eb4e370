"""A call of a step: its inputs, and the modes in which it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardweave.ir.capture.arguments import Form
from shardweave.ir.dialects.types import dtype_word, form_of

AUTOGRAD, IN_CALL = "autograd", "in_call"
"""Arrival of a step's gradients: at `backward()`, or in the call."""


@dataclass(frozen=True)
class StepCall:
    """One call of a step: its inputs by name, the nested structure that held them, and its modes.

    grad: whether gradients are computed. modes: whether each module is in training mode. trained:
    whether each parameter requires a gradient. autocast: the dtype of torch.autocast, if it is on.
    tangents: the outputs whose gradients the backward pass takes, as in `Kind`; None if the call
    itself runs the loss's backward pass. rows: the numbers of rows that ranks give, a
    `batch.rows.Rows`, if each rank gives its own rows.
    """

    form: Form
    inputs: Mapping[str, Tensor]
    grad: bool
    modes: tuple[bool, ...]
    trained: tuple[bool, ...]
    autocast: torch.dtype | None = None
    tangents: tuple[int, ...] | None = None
    rows: Any = None

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shape and dtype of each input, and whether it requires a gradient: hashable."""
        tensors = self.inputs.values()
        return tuple([(t.shape, t.dtype, self.grad and t.requires_grad) for t in tensors])

    @property
    def key(self) -> tuple[Any, ...]:
        """A hashable key, equal for calls that the same program runs."""
        trained = self.trained if self.grad else ()
        tangents = self.tangents if self.grad else None
        return self.form, self.shapes, self.grad, self.modes, trained, self.autocast, tangents

    def __str__(self) -> str:
        return f"{self.shapes_text} in {self.mode}"

    @property
    def mode(self) -> str:
        """The mode, as text: training or evaluation, and the dtype of autocast."""
        cast = f" in {dtype_word(self.autocast)}" if self.autocast else ""
        if self.grad:
            return f"training{cast}"
        if not any(self.modes):
            return f"evaluation{cast}"
        modes = "training mode without gradients" if self.modes[0] else "evaluation of some modules"
        return modes + cast

    @property
    def shapes_text(self) -> str:
        """The inputs as text, such as `x (4, 8) float32`, and the constants."""
        tensors = [f"{name} {form_of(tensor)}" for name, tensor in self.inputs.items()]
        constants = [f"{name}={value!r}" for name, value in self.form.constants]
        return ", ".join([*tensors, *constants]) or "no inputs"


def check_values(inputs: Mapping[str, Tensor]) -> None:
    """Raise ValueError for an input, by name, that no program can read."""
    for name, tensor in inputs.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "a meta tensor, without values" if tensor.is_meta else str(tensor.layout)
            raise ValueError(f"input '{name}' is {kind}; give a dense tensor with values.")


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of torch.autocast for a device type; None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
