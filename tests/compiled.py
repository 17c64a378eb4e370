"""Compiled copies of models: the model itself stays plain, to be compared with."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

import shardweave as sw
from shardweave.backends.distributed.distributed import step_of
from shardweave.backends.step.compiled_module import as_written
from shardweave.ir.program.program import Program


def compile_copy(model: nn.Module, *args: Any, **options: Any) -> sw.CompiledModule:
    """Compile a copy of a model, whose calls run backward themselves unless `options` say more."""
    return sw.compile(copy_of(model), *args, **{"backward": "in_call", **options})


def step_of_copy(
    program: Program, model: nn.Module, *args: Any, **options: Any
) -> sw.CompiledModule:
    """A copy of a model that runs one program."""
    return step_of(program, copy_of(model), *args, **options)


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy, with the hooks of gradients, which torch drops.

    What hooks make anew in each forward pass, as weight norm does, is shared.
    """
    made = [x for m in model.modules() for x in vars(m).values() if isinstance(x, Tensor)]
    memo: dict[int, Any] = {id(x): x.detach() for x in made if not x.is_leaf}
    copied = copy.deepcopy(model, memo)
    for ours, parameter in zip(copied.parameters(), model.parameters(), strict=True):
        for hook in (parameter._backward_hooks or {}).values():
            ours.register_hook(hook)
    return copied


def in_eager(model: nn.Module, *args: Any) -> Any:
    """What a compiled model computes as it is written, where its tensors are plain."""
    with as_written(model):
        return model(*args)
