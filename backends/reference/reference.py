"""The reference backend: every rank of a virtual mesh in one process, on plain torch.

It runs a local program op by op on lists of one tensor per rank, and a staged program function by
function in the order of its schedule. So a program for 64 ranks can be compared with the model on a
laptop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from xdsl.ir import Operation, SSAValue

from shardweave.backends.programs import Key, completions, sharding_held
from shardweave.backends.reference.virtual_ranks import (
    ReplicaMismatchError,
    collect,
    global_argument,
    run_op_by_op,
    scatter_shards,
    virtual_mesh,
)
from shardweave.backends.reference.virtual_stages import run_staged
from shardweave.backends.state.initial import Source
from shardweave.backends.step.backend import Backend, Runner
from shardweave.ir.library.philox import STATE, random_state
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import is_staged
from shardweave.passes.kernels.unfuse_kernels import without_regions
from shardweave.passes.messages.early_waits import wait_early
from shardweave.passes.stages.split_step import KEPT

__all__ = ["Key", "ReplicaMismatchError", "run_reference", "values_of"]


@torch.no_grad()
def run_reference(program: Program, values: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Run a program on all ranks of its mesh; returns the global results by kind and name.

    `values` holds the global tensor of each argument by kind and name, on the CPU (`values_of`
    takes them from a model); the tangent, d(loss)/d(loss), is 1 unless given. Each rank gets
    its shard. A program that is not local runs on one device; fused regions run op by op.

    Raises ValueError for a missing tensor or one of another shape or dtype, and
    ReplicaMismatchError (a ValueError) if ranks that should hold the same shard of a result
    differ, which means that the program was partitioned wrongly.

    Values that `split_step` passes from the forward to the backward part have a tensor per rank.
    """
    if is_staged(program):
        return run_staged(without_regions(program), values)
    results: dict[Key, Tensor] = {}
    for _ in _run_in_order(without_regions(program), values, results, {}):
        pass
    return results


def _run_in_order(
    program: Program,
    values: Mapping[Key, Tensor],
    results: dict[Key, Tensor],
    complete: Mapping[Operation, Sequence[Slot]],
) -> Iterator[None]:
    """Run a program as `run_reference`, into `results`; yields after each op of `complete` with
    the gradients that it lists."""
    mesh = virtual_mesh(program)
    environment: dict[SSAValue, Any] = {
        slot.value: values[KEPT, slot.name]
        if slot.kind == KEPT
        else scatter_shards(
            global_argument(program, slot, values), sharding_held(program, slot), mesh
        )
        for slot in program.arguments
    }

    def collected(slot: Slot) -> Any:
        tensors = environment[slot.value]
        return tensors if slot.kind == KEPT else collect(slot, tensors, program, mesh)

    early: set[Key] = set()
    for op in run_op_by_op(program, environment, mesh):
        if op in complete:
            for slot in complete[op]:
                results[slot.kind, slot.name] = collected(slot)
                early.add((slot.kind, slot.name))
                del environment[slot.value]
            yield
    slots = {(slot.kind, slot.name): slot for slot in program.results}
    results.update({key: collected(slot) for key, slot in slots.items() if key not in early})


def values_of(
    program: Program, model: nn.Module, batch: Mapping[str, Tensor], seed: int = 0
) -> dict[Key, Tensor]:
    """Collect a program's arguments: parameters and buffers of `model`, inputs of `batch` by name.
    seed: of the random numbers that the program draws. Raises ValueError, naming the argument, if
    the model or the batch lacks one."""
    sources: dict[str, Mapping[str, Tensor]] = {
        "param": dict(model.named_parameters(remove_duplicate=False)),
        "buffer": {STATE: random_state(seed), **dict(model.named_buffers(remove_duplicate=False))},
        "input": batch,
    }
    values: dict[Key, Tensor] = {}
    for slot in program.arguments:
        if slot.kind == "tangent":
            continue
        if slot.name not in sources[slot.kind]:
            raise ValueError(
                f"the program reads {slot.kind} '{slot.name}', which was not given; give it "
                f"besides {sorted(sources[slot.kind])}."
            )
        values[slot.kind, slot.name] = sources[slot.kind][slot.name].detach()
    return values


class VirtualRunner(Runner):
    """Runs every rank of a program's mesh, op by op, and returns global results."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        return run_reference(self.program, given)

    @cached_property
    def _ordered(self) -> tuple[Program, Mapping[Operation, Sequence[Slot]]]:
        program = without_regions(self.program).clone()
        if is_staged(program):
            return program, {}
        wait_early(program)
        return program, completions(program)

    @property
    def order(self) -> Sequence[Key]:
        return [(slot.kind, slot.name) for slots in self._ordered[1].values() for slot in slots]

    def in_order(self, given: dict[Key, Tensor], results: dict[Key, Tensor]) -> Iterator[None]:
        program, complete = self._ordered
        if complete:
            yield from _run_in_order(program, given, results, complete)
        else:
            yield from super().in_order(given, results)


class VirtualBackend(Backend):
    """Stores tensors unsharded on the CPU, and shards them only while a program runs."""

    device = torch.device("cpu")

    def check(self, program: Program) -> None:
        del program

    def load(self, program: Program, pending: Collection[str] = ()) -> Runner:
        assert not pending
        return VirtualRunner(program)

    def stored(self, tensor: Tensor | Source, sharding: Sharding, key: Key) -> Tensor:
        del sharding, key
        if isinstance(tensor, Source):
            return tensor.part(Sharding.replicated(tensor.ndim), {}, self.device)
        return tensor.detach().to("cpu", copy=True)
