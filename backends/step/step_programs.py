"""The interface by which a step finds the program of each call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.batch.replicas import ADVICE
from shardweave.backends.batch.rows import LocalRows
from shardweave.backends.programs import Key
from shardweave.backends.step.bound import BoundProgram
from shardweave.backends.step.step_call import StepCall
from shardweave.ir.capture.arguments import Form
from shardweave.ir.inspect.stats import stats
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.staged import ops_of_parts
from shardweave.planners.cost.quantity import bytes_text
from shardweave.planners.plan.plan import Plan

OPTIONS = ("accumulate", "loss_scale")
"""Arguments of a call that the step takes, unless the model's forward has one of the same name."""


Stored = Mapping[Key, Sharding]
"""Shardings in which a step keeps parameters and buffers."""


class Programs(ABC):
    """Finds the program of a call.

    first: the program by whose shardings parameters are sharded. options: names of call arguments
    that the step takes itself. plan, notes: the plan that programs follow, and notes on it.
    autocast: the dtype of autocast for calls outside of torch.autocast. seed: seed of random
    numbers. full_outputs: whether outputs are gathered on every rank. rows: joins the rows of all
    ranks, if each rank gives its own; own_rows: whether each rank then gets only its rows of
    outputs.
    """

    first: BoundProgram
    options: frozenset[str]
    plan: Plan | None
    notes: Sequence[str]
    autocast: torch.dtype | None
    seed: int
    full_outputs: bool
    rows: LocalRows | None = None
    own_rows: bool = False

    @abstractmethod
    def taken_apart(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_whole: bool = True
    ) -> tuple[Form, dict[str, Tensor]]:
        """Split arguments into their form and tensors by name. is_whole: refuse missing ones."""

    @abstractmethod
    def find(self, call: StepCall, stored: Stored) -> BoundProgram:
        """Return the program that runs a call, compiled now if there is none yet. Collective."""

    @abstractmethod
    def compile_ahead(self, call: StepCall, stored: Stored) -> BoundProgram:
        """Call `find` for a call that will be made later; with dynamic=False, allow its shapes."""

    @abstractmethod
    def in_eager(self, call: StepCall, inputs: Mapping[str, Tensor]) -> Any:
        """Run the model's own code eagerly, with these inputs."""

    @abstractmethod
    def copied(self, model: nn.Module) -> Programs:
        """Return the programs for a deep copy of the model; they share those compiled so far."""

    @abstractmethod
    def say_rows(self) -> None:
        """Tell the user that inputs, equal on all ranks, were taken for the global batch."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the compiled programs. Raises ValueError if the step runs a given program."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the inputs in the model's forward."""

    @abstractmethod
    def kept(self) -> list[tuple[str, BoundProgram]]:
        """Return the programs, each with a text that says which calls it runs."""

    def joined(self, call: StepCall) -> StepCall:
        """Make the call of the global batch from a call with this rank's rows. Collective."""
        return call if self.rows is None else self.rows.joined(call)

    @property
    def advice(self) -> str:
        """Advice for ranks that give different inputs."""
        return ADVICE if self.rows is None else self.rows.advice

    def row_axes(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that shard dim 0 of an input, given its name in programs. For an
        input that the first program lacks, these are the axes of all its inputs."""
        inputs = {n: s for (kind, n), s in self.first.shardings.items() if kind == "input"}
        chosen = [inputs[name]] if name in inputs else list(inputs.values())
        return tuple(dict.fromkeys(p.axis for s in chosen if s.dims for p in s.dims[0]))


def summary_of(
    mesh: Mesh,
    parameters: Iterable[Tensor],
    programs: Sequence[tuple[str, BoundProgram]],
    notes: Sequence[str],
) -> str:
    """Describe the mesh, the bytes of parameters, each program's collectives, and the notes."""
    tensors = list(parameters)
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    here = sum(_local(tensor).nbytes for tensor in tensors)
    lines = [
        f"mesh {mesh}" if mesh.axes else "one device",
        f"{len(tensors)} parameters of {bytes_text(whole)}, {bytes_text(here)} in this process",
    ]
    for what, bound in programs:
        collectives = stats(bound.program).collectives
        sent = [f"{c.count} {c.kind} over {', '.join(c.axes)} ({c.phase})" for c in collectives]
        num_ops = sum(1 for _ in ops_of_parts(bound.program))
        lines.append(f"{what}: {num_ops} ops; {'; '.join(sent) or 'no collectives'}")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
