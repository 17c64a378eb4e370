"""A training step as each rank of a mesh runs it on torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.checkpoint import checkpointable
from shardweave.backends.emit import Key, emit, load_step
from shardweave.backends.gradients import owned
from shardweave.backends.layout import as_dtensor, local_of, placements_of, whole
from shardweave.backends.runtime import Runtime
from shardweave.ir.program import Program, Slot
from shardweave.ir.sharding import Sharding
from shardweave.ir.shards import take_shard
from shardweave.ir.types import dtype_of_value, shape_of


class Step(nn.Module):
    """A program bound to parameters: calling it runs forward and backward.

    `step(**batch)` returns the loss and leaves gradients in the parameters' `.grad`, added to
    what is there, as `loss.backward()` does; buffers are updated. A program without
    gradients returns its outputs. A batch holds global tensors, the same on every rank, or this
    rank's shards, or DTensors, by the names of the captured arguments.

    Parameters and buffers are copied from `model`, which must hold the same values on every
    rank, under the same names. On a mesh of several devices they are DTensors that hold this
    rank's shard, so that torch's optimizers, `clip_grad_norm_` and `torch.distributed.checkpoint`
    work on them; on one device they are plain tensors. What the program does not use is kept
    whole and gets no gradient.

    program: a local program, or a global one to run on one device. source: the Python module
    that runs. Making a step is collective. Raises ValueError if model and program do not fit.
    """

    def __init__(self, program: Program, model: nn.Module, runtime: Runtime | None = None) -> None:
        super().__init__()
        self.program = program
        self.runtime = runtime or _runtime_for(program, model)
        _check_runtime(program, self.runtime)
        self.runtime.prepare(program)
        self.source = emit(program)
        self._run = load_step(self.source)
        self._shardings = {
            (slot.kind, slot.name): _sharding(program, slot) for slot in program.arguments
        }
        _check_results(program, self._shardings)
        stored = _mirror(model, self, self._stored)
        self._tensors = {key: stored[key] for key in self._stored_keys(stored)}
        self._tangents = self._make_tangents()

    def _stored(self, kind: str, name: str, tensor: Tensor) -> Tensor:
        """The parameter or buffer that stands for one of the model's."""
        sharding = self._shardings.setdefault(
            (kind, name), Sharding.replicated(tensor.ndim)
        )
        shard = take_shard(tensor.detach(), sharding, self.runtime.coordinates)
        # Never the model's own memory: training a step must not change the model.
        local = torch.empty_like(shard, device=self.runtime.device).copy_(shard)
        stored = as_dtensor(local, sharding, self.runtime)
        if kind == "param":
            return nn.Parameter(stored, requires_grad=tensor.requires_grad)
        return stored
