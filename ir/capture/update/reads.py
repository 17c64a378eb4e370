# pyright: basic
# torch's dispatch modes are private and only partly typed.
"""The values that an optimizer's step reads to update each parameter.

The optimizer's own step runs on the meta device while a mode sees every ATen op. If each op of an
update reads only the same element of other tensors, the update may run on a shard; if some op reads
more (a norm, a product of matrices), it needs full values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardweave.ir.capture.update.held import instances_in, mapped
from shardweave.ir.capture.update.ops_seen import OpsSeen, OwnMessagesError, is_torchs


@dataclass(frozen=True)
class Sizes:
    """Shapes of a parameter: its full shape, its largest shard and its smallest shard."""

    full: tuple[int, ...]
    largest: tuple[int, ...]
    smallest: tuple[int, ...]


@dataclass(frozen=True)
class Calls:
    """The ops that an optimizer runs to update one parameter, and the state after them.

    ops: the parameter's ops, then all ops that make constants, for any parameter. numbers: the
    floats in the ops' arguments. state: the parameter's new state, with tensors on `meta`.
    """

    ops: tuple[tuple[str, tuple[Any, ...]], ...]
    numbers: tuple[float, ...]
    state: Any
    is_joint: bool
    """True if an op of the update also reads other parameters."""


@dataclass(frozen=True)
class Reads:
    """Parameters whose updates need unsharded values, and the reason in words.

    full: indices of these parameters. joint: indices of those whose updates may read other
    parameters too. may_draw: whether an op may draw random numbers; `full` then has all. calls: by
    index of each parameter that has a gradient, the ops of its update.
    """

    full: frozenset[int]
    joint: frozenset[int]
    reason: str = ""
    may_draw: bool = False
    calls: Mapping[int, Calls] = field(default_factory=dict)


def reads_of(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    sizes: Sequence[Sizes],
    has_gradient: Sequence[bool],
    *,
    has_closure: bool = False,
) -> Reads:
    """Find the parameters whose updates need full values; the optimizer itself does not change.

    parameters: all parameters of all groups, in order. If the step cannot run on the meta device,
    as when it branches on values of tensors, all updates need full values. Raises OwnMessagesError.
    """
    runs: list[_Seen] = []
    copies: list[MetaCopy] = []
    everything = frozenset(range(len(parameters)))
    for shapes in (
        [size.full for size in sizes],
        [size.largest for size in sizes],
        [size.smallest for size in sizes],
    ):
        if runs and shapes == [size.full for size in sizes]:
            continue
        try:
            copies.append(MetaCopy(optimizer, parameters, sizes, shapes, has_gradient))
            runs.append(_seen(copies[-1], has_closure))
        except OwnMessagesError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything here
            joint = runs[0].reads.joint if runs else everything
            return Reads(everything, joint, _first_line(error), may_draw=True)
    first, *others = runs
    reads = replace(first.reads, calls=copies[0].all_calls(first, has_gradient))
    if any(not _agree(first.calls, run.calls, sizes) for run in others):
        return replace(reads, full=everything, reason="it computes with the shapes of parameters")
    return reads


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# One run


def calls_of(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    sizes: Sequence[Sizes],
    has_gradient: Sequence[bool],
) -> dict[int, Calls]:
    """Run the next step on full meta tensors; return the calls per parameter with a gradient."""
    shapes = [size.full for size in sizes]
    on_meta = MetaCopy(optimizer, parameters, sizes, shapes, has_gradient)
    return on_meta.all_calls(_seen(on_meta, has_closure=False), has_gradient)


@dataclass(frozen=True)
class _Seen:
    """The record of an optimizer's step. calls: its ops, each with the arguments that are no
    tensors. of: for each call, the indices of the parameters that its operands derive from."""

    reads: Reads
    calls: tuple[tuple[str, tuple[Any, ...]], ...]
    of: tuple[frozenset[int], ...]


def _seen(on_meta: MetaCopy, has_closure: bool) -> _Seen:
    with on_meta.mode:
        run_step(on_meta.optimizer, *((lambda: torch.zeros(()),) if has_closure else ()))
    return _Seen(on_meta.reads(), tuple(on_meta.mode.calls), tuple(on_meta.mode.of))


class MetaCopy:
    """A copy of an optimizer with its tensors on the meta device; scalars are copied to the CPU."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        sizes: Sequence[Sizes],
        shapes: Sequence[tuple[int, ...]],
        has_gradient: Sequence[bool],
    ) -> None:
        self.mode = OpsSeen()
        self.parameters = [
            nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for p, shape in zip(parameters, shapes, strict=True)
        ]
        memo: dict[int, Any] = {}
        for index, (old, new) in enumerate(zip(parameters, self.parameters, strict=True)):
            vars(new).update(vars(old))
            if has_gradient[index]:
                new.grad = torch.empty_like(new)
                self.mode.note(new.grad, index)
            self.mode.note(new, index)
            memo[id(old)] = new
        for index, old in enumerate(parameters):
            for value in instances_in(optimizer.state.get(old), Tensor):
                memo[id(value)] = self._state(value, index, sizes[index], shapes[index])
        self.optimizer = copied(optimizer, memo)
        self._kept = memo
        if is_torchs(optimizer):
            # Their fused, foreach and capturable implementations compute the same.
            for group in self.optimizer.param_groups:
                group.update({key: False for key in FORMS if key in group})
            for name in _OF_SCALER:
                vars(self.optimizer).pop(name, None)

    def _state(self, value: Tensor, index: int, size: Sizes, shape: tuple[int, ...]) -> Tensor:
        if not value.ndim:
            return value.detach().to("cpu", copy=True)
        is_beside = tuple(value.shape) == size.full
        made = torch.empty(shape if is_beside else value.shape, dtype=value.dtype, device="meta")
        self.mode.note(made, index, is_aligned=is_beside)
        return made

    def reads(self) -> Reads:
        full: set[int] = set()
        joint: set[int] = set()
        for index, parameter in enumerate(self.parameters):
            tensors = [parameter, *instances_in(self.optimizer.state.get(parameter), Tensor)]
            values = [value for x in tensors if (value := self.mode.value_of(x)) is not None]
            if any(not value.is_aligned for value in values):
                full.add(index)
            others = frozenset[int]().union(*(value.of for value in values)) - {index}
            if others:
                joint |= {index, *others}
        if self.mode.draws:
            full |= {*range(len(self.parameters))}
        reason = self.mode.draws or self.mode.reason
        return Reads(frozenset(full | joint), frozenset(joint), reason, bool(self.mode.draws))

    def all_calls(self, seen: _Seen, has_gradient: Sequence[bool]) -> dict[int, Calls]:
        """Return the ops that the step calls for each parameter with a gradient, by its index."""
        return {index: self._calls(index, seen) for index, has in enumerate(has_gradient) if has}

    def _calls(self, index: int, seen: _Seen) -> Calls:
        """Return the calls on one parameter; ops that make constants keep their floats."""
        ops: list[tuple[str, tuple[Any, ...]]] = []
        numbers: list[float] = []
        for (op, plain), of in zip(seen.calls, seen.of, strict=True):
            if index in of:
                numbers += [x for x in plain if isinstance(x, float)]
                plain = tuple(float if isinstance(x, float) else x for x in plain)
                ops.append((op, plain))
        ops += [call for call, of in zip(seen.calls, seen.of, strict=True) if not of]
        state = self.optimizer.state.get(self.parameters[index])
        is_joint = any(index in of and len(of) > 1 for of in seen.of)
        return Calls(tuple(ops), tuple(numbers), state, is_joint)


def copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer. memo: replacements of objects by id, as in `copy.deepcopy`."""
    memo[id(optimizer)] = made = object.__new__(type(optimizer))
    hooks = {name: value for name, value in vars(optimizer).items() if "hooks" in name}
    own = {name: x for name, x in vars(optimizer).items() if name not in {*hooks, "step"}}
    new = {old: id(x) for old, x in memo.items()}  # where tensors are known by identity
    own = mapped(own, lambda x: new.get(x, x) if type(x) is int else x)
    vars(made).update(copy.deepcopy(own, memo) | hooks)
    return made


def run_step(optimizer: Optimizer, *closure: Any) -> None:
    """Run an optimizer's step without torch's hooks and profiler."""
    step: Any = type(optimizer).step
    with torch.no_grad():
        getattr(step, "__wrapped__", step)(optimizer, *closure)


FORMS = ("foreach", "fused", "capturable")
"""Options of torch's optimizers for implementations that compute the same as the plain one."""

_OF_SCALER = ("grad_scale", "found_inf")
"""Attributes that a GradScaler sets for a fused step; a plain one refuses them."""


def _agree(
    first: Sequence[tuple[str, tuple[Any, ...]]],
    other: Sequence[tuple[str, tuple[Any, ...]]],
    sizes: Sequence[Sizes],
) -> bool:
    """True if two runs on other shapes have the same ops and numbers, apart from these shapes."""
    if len(first) != len(other):
        return False
    pairs = {(s.full, shard) for s in sizes for shard in (s.largest, s.smallest)}
    for (op, arguments), (op_2, arguments_2) in zip(first, other, strict=True):
        if op != op_2 or len(arguments) != len(arguments_2):
            return False
        for x, y in zip(arguments, arguments_2, strict=True):
            same = x == y or (isinstance(x, float) and x != x and y != y)
            if not same and (x, y) not in pairs:
                return False
    return True
