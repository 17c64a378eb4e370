"""Outputs of a step that has run backward already: differentiating them raises an error.

In eager PyTorch, outputs depend on parameters and inputs in autograd's graph. These do too, through
one node whose backward raises, under `backward` as under `torch.autograd.grad`.
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
    """Attaches to a step's outputs an autograd node that raises when they are differentiated."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._trained: tuple[bool, ...] = ()
        self._anchor: Tensor | None = None
        """A scalar computed from all parameters that require a gradient; None if none does."""

    def mark(
        self,
        outputs: dict[str, Any],
        loss: str,
        differentiable: Collection[str],
        inputs: Collection[Tensor],
        trained: tuple[bool, ...],
    ) -> dict[str, Any]:
        """Return the outputs; make the loss and the `differentiable` ones depend, for autograd, on
        the inputs and parameters that require gradients. trained: a flag for each parameter."""
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
        """Return the anchor, made anew only if `trained` changes: it takes time per parameter."""
        if trained != self._trained:
            self._trained = trained
            leaves = [parameter for parameter in self._parameters if parameter.requires_grad]
            self._anchor = _Anchor.apply(*leaves) if leaves else None  # pyright: ignore[reportAttributeAccessIssue]
        return self._anchor


class _Anchor(torch.autograd.Function):
    """A scalar that depends on some tensors. Its backward never runs: `_Returned` raises before."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        del ctx, tensors
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        del ctx, gradients
        raise AssertionError("the tensor hook that delivers gradients has raised no error")


class _Returned(torch.autograd.Function):
    """Returns the first `count` of its tensors, the loss first, as results that depend on all."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Not views of the arguments: those could not be changed in place.
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        del ctx
        of_output = any(gradient is not None for gradient in gradients[1:])
        raise RuntimeError(_OF_OUTPUT if of_output else _OF_LOSS)
