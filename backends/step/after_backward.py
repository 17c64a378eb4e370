"""Outputs of a step in training mode: tensors that raise, asked for gradients: backward has run.

In eager PyTorch they would hang on parameters and inputs. So these do, by a graph of one node that
raises when autograd comes to it, whichever way it is asked: `backward`, or `torch.autograd.grad`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardweave.ir.torch_private import pytree

_OF_LOSS = (
    "backward ran in the step already: gradients are in .grad. Leave loss.backward() and "
    "torch.autograd.grad out; scale the loss by step(.., loss_scale=..), and accumulate by "
    "step(.., accumulate=k) or calls under step.no_sync(). Only a term of the parameters alone, "
    "such as a penalty, may have a backward() of its own."
)

_OF_OUTPUT = (
    "an output of the step has no gradient: the step ran backward in its call, from the model's "
    "own loss. Compute this loss in the model's forward, or by sw.compile(.., loss=function); "
    "detach an output that you only look at."
)


class BackwardRan:
    """Marks what calls of a step return, for its parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._trained: tuple[bool, ...] = ()
        self._anchor: Tensor | None = None
        """A scalar that hangs on all parameters that require a gradient; None if none does."""

    def mark(
        self,
        outputs: dict[str, Any],
        loss: str,
        differentiable: Collection[str],
        inputs: Collection[Tensor],
        trained: tuple[bool, ...],
    ) -> dict[str, Any]:
        """The outputs, tensors or lists of them, of which the loss and those that are
        differentiable hang on parameters and inputs, as far as these require gradients."""
        names = [loss, *(name for name in outputs if name in differentiable and name != loss)]
        leaves, tree = pytree.tree_flatten([outputs[name] for name in names])
        anchors = [tensor for tensor in inputs if tensor.requires_grad]
        with torch.enable_grad():
            anchor = self._anchor_for(trained)
            anchors += [] if anchor is None else [anchor]
            if not anchors:
                return outputs
            marked = _Returned.apply(len(leaves), *leaves, *anchors)
        return outputs | dict(zip(names, pytree.tree_unflatten(marked, tree), strict=True))

    def _anchor_for(self, trained: tuple[bool, ...]) -> Tensor | None:
        """Made once, as it takes time for each parameter."""
        if trained != self._trained:
            self._trained = trained
            leaves = [parameter for parameter in self._parameters if parameter.requires_grad]
            self._anchor = _Anchor.apply(*leaves) if leaves else None  # pyright: ignore[reportAttributeAccessIssue]
        return self._anchor


class _Anchor(torch.autograd.Function):
    """A scalar that hangs on some tensors. No gradient comes here: what hangs on it raises."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        del ctx, tensors
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        del ctx, gradients
        raise AssertionError("what hangs on an anchor has not raised")


class _Returned(torch.autograd.Function):
    """The first of some tensors, the loss before others, which from now on hang on the rest."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Not views of what comes in: those could not be changed in place.
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        del ctx
        of_output = any(gradient is not None for gradient in gradients[1:])
        raise RuntimeError(_OF_OUTPUT if of_output else _OF_LOSS)
