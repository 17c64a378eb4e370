"""Compiled copies of models: the model itself stays plain, to be compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.backends.programs import sharding_held
from shardweave.backends.step.compiled_module import as_written
from shardweave.driver.step.precision import copy_of_model
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.program.program import Program


class OfX(nn.Module):
    """A module without parameters, for a program whose input is named x."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def compile_copy(model: nn.Module, *args: Any, **options: Any) -> sw.CompiledModule:
    """Compile a copy of a model, whose calls run backward themselves unless `options` say more."""
    return sw.compile(copy_of_model(model), *args, **{"backward": "in_call", **options})


def step_of_copy(program: Program, model: nn.Module, **options: Any) -> sw.CompiledModule:
    """A copy of a model that runs one program, compiled for zeros as its inputs."""
    inputs = {slot.name: slot for slot in program.arguments if slot.kind == "input"}
    zeros = {
        name: torch.zeros(
            sharding_held(program, slot).global_shape(shape_of(slot.value)),
            dtype=dtype_of_value(slot.value),
        )
        for name, slot in inputs.items()
    }
    return compile_copy(model, kwargs=zeros, program=program, **options)


def in_eager(model: nn.Module, *args: Any) -> Any:
    """What a compiled model computes as it is written, where its tensors are plain."""
    with as_written(model):
        return model(*args)
