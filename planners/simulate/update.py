"""What the update of an optimizer takes behind a step: from its own code, as ranks run it.

Ops element by element run on shards; what needs full values of a matrix runs on its owner, to and
from which one all-to-all of all matrices goes (`backends/optimizers`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardweave.ir.capture.update.cut import CutUpdate, cut_update
from shardweave.ir.capture.update.owners import dealt_out, senders_of
from shardweave.ir.capture.update.program import capture_update, program_of
from shardweave.ir.capture.update.reads import Sizes, calls_of, run_step
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program
from shardweave.ir.torch_private import pytree
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.model import CostModel
from shardweave.planners.simulate.update_cost import UpdateCost

FOR_THE_REST = "AdamW"
"""Torch's class for parameters that are no matrices, where another takes matrices alone."""


class _Stored(NamedTuple):
    """A parameter: its full shape, that of a shard, and by rank which shard it has."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: torch.dtype
    shards: dict[int, tuple[int, ...]]

    @property
    def is_replicated(self) -> bool:
        return len(set(self.shards.values())) == 1


@dataclass(frozen=True)
class _Kind:
    """The update of parameters that are alike. shards_s: of a rank. core_s: of the owner."""

    parts: CutUpdate
    shards_s: float
    core_s: float
    state_bytes: int
    temporary_bytes: int


def simulate_update(program: Program, optimizer: str, model: CostModel) -> UpdateCost:
    """The update of all parameters of a program by a class of torch.optim, in a later step.

    program: of one rank, or for one device. Parameters that are no matrices are updated by AdamW
    where the class takes matrices alone. Raises ValueError for another class, and for one that
    decides by values of tensors.
    """
    stored = _stored(program)
    kinds: dict[int, _Kind] = {}
    for name, indices in _groups(optimizer, stored).items():
        kinds |= _kinds(name, [stored[i] for i in indices], indices, model)
    costs = _Costs(model, stored, kinds)
    return costs.total(optimizer)


def _stored(program: Program) -> list[_Stored]:
    mesh = program.mesh or Mesh()
    stored: list[_Stored] = []
    for slot in program.arguments:
        if slot.kind == "param":
            sharding, shape = program.sharding_of_slot(slot), program.global_shape_of(slot)
            local = sharding.local_shape(shape)
            dtype = dtype_of_value(slot.value)
            stored.append(_Stored(shape, local, dtype, _shards(sharding, mesh)))
    return stored


def _shards(sharding: Sharding, mesh: Mesh) -> dict[int, tuple[int, ...]]:
    axes = [axis.name for axis in mesh.device_axes if axis.name in sharding.axes]
    at = {rank: mesh.coordinates(rank) for rank in range(max(1, mesh.num_devices))}
    return {rank: tuple(place[axis] for axis in axes) for rank, place in at.items()}


def _groups(name: str, stored: Sequence[_Stored]) -> dict[str, list[int]]:
    """The parameters of each class."""
    if name != "Muon":
        return {name: list(range(len(stored)))}
    matrices = [i for i, each in enumerate(stored) if len(each.shape) == 2]
    return {name: matrices, FOR_THE_REST: [i for i in range(len(stored)) if i not in matrices]}


def _kinds(
    name: str, stored: Sequence[_Stored], indices: Sequence[int], model: CostModel
) -> dict[int, _Kind]:
    """The update of each parameter, captured once for those that are alike."""
    made = _after_one_step(name, stored)
    parameters: list[Tensor] = made.param_groups[0]["params"] if made else []
    sizes = [Sizes(each.shape, each.local, each.local) for each in stored]
    first: dict[tuple[Any, ...], int] = {}
    for position, each in enumerate(stored):
        first.setdefault(each[:3], position)
    if made is None:
        return {}
    chosen = set(first.values())
    calls = calls_of(made, parameters, sizes, [i in chosen for i in range(len(stored))])
    kinds: dict[tuple[Any, ...], _Kind] = {}
    for key, position in first.items():
        update = capture_update(made, parameters, sizes, position, calls[position])
        parts = cut_update(update, torch.device("meta"))
        states = [x for x in pytree.tree_leaves(calls[position].state) if isinstance(x, Tensor)]
        kinds[key] = _kind(stored[position], parts, states, update.numbers or (), model)
    return {index: kinds[each[:3]] for index, each in zip(indices, stored, strict=True)}


def _after_one_step(name: str, stored: Sequence[_Stored]) -> Optimizer | None:
    """An optimizer that has states, on the meta device; None of no parameters."""
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        raise ValueError(
            f"'{name}' is no optimizer of torch.optim; use the name of one, such as AdamW or Muon."
        )
    if not stored:
        return None
    parameters = [
        nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device="meta")) for each in stored
    ]
    made: Optimizer = cls(parameters)  # pyright: ignore[reportCallIssue]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        run_step(made)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"the update of {name} cannot be simulated: it decides by values of tensors; use "
            f"another class of torch.optim."
        ) from error
    return made


def _kind(
    stored: _Stored,
    parts: CutUpdate,
    states: Sequence[Tensor],
    numbers: Sequence[float],
    model: CostModel,
) -> _Kind:
    def on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def local(shape: Sequence[int]) -> Sequence[int]:
        return stored.local if tuple(shape) == stored.shape else shape

    own = [on_meta(stored.local, stored.dtype)] * 2
    own += [on_meta(local(x.shape), x.dtype) for x in states if x.is_meta]
    gathered = [on_meta(x.shape, x.dtype) for x in parts.gathered]
    back = [on_meta(local(x.shape), x.dtype) for x in parts.results]
    before = program_of(parts.before, own, numbers)
    core = program_of(parts.core, gathered, numbers)
    after = program_of(parts.after, [*own, *back], numbers)
    return _Kind(
        parts,
        _seconds(before, model) + _seconds(after, model),
        _seconds(core, model),
        sum(x.numel() * x.element_size() for x in own[2:]),
        peak_memory(core).peak_bytes,
    )


def _seconds(program: Program, model: CostModel) -> float:
    return sum(model.op_time_s(op) + model.issue_s for op in program.ops)


@dataclass(frozen=True)
class _Costs:
    """Adds up the updates of all parameters."""

    model: CostModel
    stored: Sequence[_Stored]
    kinds: dict[int, _Kind]
    compute_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    held: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    there: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    back: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def total(self, name: str) -> UpdateCost:
        owners = self._owners()
        ranks = range(max(1, self.model.mesh.num_devices))
        for index, kind in self.kinds.items():
            for rank in ranks:
                self.compute_s[rank] += kind.shards_s
            if index in owners:
                self._own(index, owners[index])
            else:
                for rank in ranks if kind.parts.results else ():
                    self._compute(rank, kind)
        sent = [self.there[rank] + self.back[rank] for rank in ranks]
        exchanges = [sums for sums in (self.there, self.back) if any(sums.values())]
        return UpdateCost(
            name,
            max(self.compute_s.values(), default=0.0),
            sum(self._exchange_s(max(sums.values())) for sums in exchanges),
            max(sent),
            len(exchanges),
            sum(kind.state_bytes for kind in self.kinds.values()),
            max(self.held.values(), default=0),
        )

    def _owners(self) -> dict[int, int]:
        flops = {
            index: kind.parts.flops
            for index, kind in self.kinds.items()
            if kind.parts.results
            and (not self.stored[index].is_replicated or self._is_worth_sending(kind))
        }
        return dealt_out(flops, {index: list(self.stored[index].shards) for index in flops})

    def _is_worth_sending(self, kind: _Kind) -> bool:
        if self.model.mesh.num_devices < 2:
            return False
        return kind.core_s > self._exchange_s(sum(x.num_bytes for x in kind.parts.results))

    def _own(self, index: int, owner: int) -> None:
        kind, stored = self.kinds[index], self.stored[index]
        count = len(set(stored.shards.values()))
        read = sum(x.num_bytes for x in kind.parts.gathered if x.is_sharded)
        for source in senders_of(stored.shards, owner):
            if source != owner:
                self.there[source] += read // count
        for sent in kind.parts.results:
            others = len(stored.shards) - 1
            share = sent.num_bytes // count if sent.is_sharded else sent.num_bytes
            self.back[owner] += share * others
        self._compute(owner, kind)

    def _compute(self, rank: int, kind: _Kind) -> None:
        self.compute_s[rank] += kind.core_s
        self.held[rank] += kind.temporary_bytes

    def _exchange_s(self, sent: int) -> float:
        mesh = self.model.mesh
        ring = self.model.ring_over(tuple(axis.name for axis in mesh.device_axes), all_pairs=True)
        return self.model.ring_time_s("all_to_all", ring, sent, sent)
