"""The programs of a step, looked up by call."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.backends.batch.replicas import ADVICE
from shardweave.backends.batch.rows import LocalRows
from shardweave.backends.programs import Key
from shardweave.backends.step.autograd import check_required
from shardweave.backends.step.bound import BoundProgram
from shardweave.backends.step.step_call import StepCall
from shardweave.ir.capture.arguments import Form, named_arguments, taken_apart
from shardweave.ir.mesh.placement import Sharding
from shardweave.planners.plan.plan import Plan

OPTIONS = ("accumulate", "loss_scale")
"""Arguments of a call that are the step's own, unless the model's forward has one of the name."""


Stored = Mapping[Key, Sharding]
"""Shardings in which a step keeps parameters and buffers."""


class Programs(ABC):
    """Finds the program of a call.

    first: the program by which parameters are sharded. options: the arguments of a call that are
    the step's own. plan, notes: what is followed, and notes on it. autocast: the dtype in which the
    model computes where no torch.autocast around the call says another. seed: of random numbers.
    full_outputs: whether outputs are gathered on every rank. rows: puts the rows together that each
    rank gives, where a batch is made of these; own_rows: whether each takes its own of outputs.
    """

    autocast: torch.dtype | None = None
    seed: int = 0
    full_outputs: bool = False
    rows: LocalRows | None = None
    own_rows: bool = False
    first: BoundProgram
    options: frozenset[str] = frozenset(OPTIONS)
    plan: Plan | None = None
    notes: Sequence[str] = ()

    @abstractmethod
    def taken_apart(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_whole: bool = True
    ) -> tuple[Form, dict[str, Tensor]]:
        """The arguments of a call, or some of them, as the programs name them."""

    @abstractmethod
    def find(self, call: StepCall, stored: Stored) -> BoundProgram:
        """The program that runs a call, made if it has to be. Collective."""

    def in_eager(self, call: StepCall, inputs: Mapping[str, Tensor]) -> Any:
        """Run the model as it is written, with these inputs. Raises ValueError for a program that
        was given."""
        raise ValueError(
            "the model runs one given program, which has no gradients of gradients and no other "
            "tensors; leave `program` out of sw.compile."
        )

    def copied(self, model: nn.Module) -> Programs:
        """Those of a deep copy of the model, with settings of its own: the same ones as yet."""
        del model
        return self

    def joined(self, call: StepCall) -> StepCall:
        """The call of the global batch, of one that is made with a rank's rows. Collective."""
        return call if self.rows is None else self.rows.joined(call)

    @property
    def advice(self) -> str:
        """Advice for ranks that give different inputs."""
        return ADVICE if self.rows is None else self.rows.advice

    def say_rows(self) -> None:
        """Say what inputs were taken for, which all ranks have given alike."""
        return

    def compile_ahead(self, call: StepCall, stored: Stored) -> BoundProgram:
        """`find` for a call that is to come."""
        return self.find(call, stored)

    def forget(self) -> None:
        """Drop the programs, to make them anew. Raises ValueError for one that was given."""
        raise ValueError("the model runs one given program, which recompile() cannot make anew.")

    def names(self) -> list[str]:
        """The inputs as the model's forward names them."""
        return self.first.inputs

    def kept(self) -> list[tuple[str, BoundProgram]]:
        """The programs there are, and what each is for."""
        return [("every call", self.first)]

    def row_axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes that cut the rows of an input, of a name in programs.

        Those of an input that the first program does not have are those of the others.
        """
        inputs = {n: s for (kind, n), s in self.first.shardings.items() if kind == "input"}
        chosen = [inputs[name]] if name in inputs else list(inputs.values())
        return tuple(dict.fromkeys(p.axis for s in chosen if s.dims for p in s.dims[0]))


class GivenProgram(Programs):
    """One program for every call of a model."""

    def __init__(self, model: nn.Module, program: BoundProgram, seed: int = 0) -> None:
        self.first = program
        self._signature = inspect.signature(model.forward)
        self.seed = seed

    def taken_apart(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_whole: bool = True
    ) -> tuple[Form, dict[str, Tensor]]:
        del is_whole  # what is missing is named by the program's check
        named = named_arguments(self._signature, args, kwargs, is_whole=False)
        return taken_apart(*named)

    def find(self, call: StepCall, stored: Stored) -> BoundProgram:
        del stored
        check_given(self.first, call)
        return self.first


def check_given(bound: BoundProgram, call: StepCall) -> None:
    """Raises ValueError for a call that a given program does not run."""
    bound.check_batch(call.inputs)
    if call.autocast is not None:
        raise ValueError(
            "the step runs one given program, in the dtypes that it has; torch.autocast around "
            "the call would change nothing. Leave it out, or compile without `program`."
        )
    if bound.has_gradients:
        if not call.grad:
            raise ValueError(
                "the step runs one given program, which computes gradients and updates "
                "buffers as in training; to evaluate, make a step of a program captured with "
                "train=False, or leave `program` out so that programs are compiled."
            )
        check_required(bound.program.results, call.inputs)
