"""Eager runs of a compiled model, on whole tensors on every rank.

They serve three cases that compiled programs do not: gradients of gradients (`create_graph=True`),
calls with other tensors than the model's own (`torch.func.functional_call`), and evaluation with
arguments that are objects, such as the cache of `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardweave.backends.programs import Key
from shardweave.backends.state.on_whole import whole_tensor
from shardweave.backends.state.places import in_modes, places_of, with_tensors
from shardweave.backends.state.state import ShardedState
from shardweave.backends.step.bound import BoundProgram
from shardweave.backends.step.step_call import StepCall
from shardweave.ir.capture.outputs import tree_of
from shardweave.ir.capture.seeded import SeededRandom
from shardweave.ir.library.philox import STATE
from shardweave.ir.torch_private import pytree

NOTE = (
    "create_graph=True, and torch.func.functional_call with other tensors, run the model as it is "
    "written, on whole tensors on every rank"
)

OBJECTS_NOTE = (
    "in evaluation, calls with arguments that are no tensors, numbers or strings, as the cache "
    "of generate(), run the model as it is written; each gathers all parameters on every rank"
)


def differentiable_gradients(
    step: Any,
    call: StepCall,
    bound: BoundProgram,
    given: Mapping[str, Tensor],
    kept: Mapping[Key, Any],
    targets: Sequence[Tensor],
) -> list[Tensor | None]:
    """Compute gradients that can be differentiated again, by running the call in eager. Collective.
    given: the incoming gradients of outputs, by name. kept: the buffers' values before the call.
    targets: the tensors with respect to which to differentiate, inputs last."""
    inputs = {name: _whole(tensor) for name, tensor in call.inputs.items()}
    state = kept.get(("buffer", STATE))
    with torch.enable_grad(), _as_in_call(step, call, kept):
        if state is None:
            output = step.programs.in_eager(call, inputs)
        else:
            with SeededRandom(state, in_backward=True):
                output = step.programs.in_eager(call, inputs)
        leaves = [leaf for leaf in pytree.tree_leaves(tree_of(output)) if isinstance(leaf, Tensor)]
        values: dict[str, Tensor] = {}
        for leaf, value in zip(bound.returned.leaves, leaves, strict=True):
            if leaf.is_differentiable:
                values.setdefault(leaf.name, value)
        outputs = [_whole(values[name]) for name in given]
        gradients = [_whole(gradient) for gradient in given.values()]
        asked = [inputs.get(name) for name, x in call.inputs.items() if x.requires_grad]
        asked = [*targets[: len(targets) - len(asked)], *asked]
        return list(
            torch.autograd.grad(outputs, asked, gradients, create_graph=True, allow_unused=True)  # pyright: ignore[reportArgumentType]
        )


def _whole(tensor: Tensor) -> Tensor:
    """Gather a DTensor into a plain, whole tensor; return others as they are. Collective."""
    return whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor


@contextmanager
def _as_in_call(step: ShardedState, call: StepCall, kept: Mapping[Key, Any]) -> Iterator[None]:
    """Context with the call's modes, full parameters, and copies of full buffers."""
    with in_modes(step.modes, call.modes), on_full_tensors(step, kept):
        yield


@contextmanager
def on_full_tensors(step: ShardedState, kept: Mapping[Key, Any] | None = None) -> Iterator[None]:
    """Context in which the model has full parameters, and copies of full buffers. Collective.
    kept: values that buffers have in place of their own."""
    kept = kept or {}
    wholes: dict[int, Tensor] = {}
    for key, tensor in step.stored.items():
        held = tensor if key not in kept else step.backend.like(kept[key], tensor)
        wholes[id(tensor)] = _whole(held) if key[0] == "param" else _whole(held).clone()
    with with_tensors(places_of(step.model), wholes):
        yield
