"""Cost of an optimizer's update after a step: from its own code, as ranks run it.

Ops element by element run on shards; what needs full values of a matrix runs on its owner, to and
from which one all-to-all of all matrices goes. An update that decides by values of tensors runs on
shards op by op, and ranks put sums and norms together (`backends/optimizers`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from shardweave.ir.capture.site import CaptureError
from shardweave.ir.capture.update.cut import CutUpdate, cut_update
from shardweave.ir.capture.update.owners import dealt_out, senders_of
from shardweave.ir.capture.update.program import Assumed, Update, capture_update, program_of
from shardweave.ir.capture.update.reads import Sizes, calls_of, run_step
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import StagePlaces, functions_of, is_staged
from shardweave.ir.torch_private import pytree
from shardweave.planners.cost.memory import is_mixed, peak_memory
from shardweave.planners.cost.model import CostModel
from shardweave.planners.simulate.update_cost import UpdateCost, optimizer_class


@dataclass(frozen=True)
class _Captured:
    """Captured update of a parameter. states: shape and dtype of each optimizer state that is no
    scalar. by_values: its code branches on tensors' values, so that it runs op by op on shards."""

    update: Update
    states: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    by_values: bool


class Core(NamedTuple):
    """The part of an update that needs full values. held_bytes: bytes of its inputs and results, on
    the owner."""

    parts: CutUpdate
    program: Program
    held_bytes: int


@dataclass(frozen=True)
class PricedUpdate:
    """The update of a parameter as programs. on_shards: the programs on a rank's shard, before and
    after `core`.

    extra_bytes: temporaries while the update runs, besides full values or shards. joined: bytes of
    each sum, mean or norm that the ranks all-reduce.
    """

    on_shards: Sequence[Program]
    core: Core | None
    state_bytes: int
    extra_bytes: int
    joined: Sequence[int] = ()


@cache
def _captured(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Captured:
    """Trace, on the meta device, a parameter's update by an optimizer that has its states."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    made: Optimizer = optimizer_class(name)([parameter])
    parameter.grad = torch.empty_like(parameter)
    sizes = [Sizes(shape, shape, shape)]
    assumed = Assumed()
    try:
        with Assumed():
            run_step(made)
        _keep_scalars(made, parameter)
        with assumed:
            calls = calls_of(made, [parameter], sizes, [True])[0]
        update = capture_update(made, [parameter], sizes, 0, calls, is_assumed=True)
    except (RuntimeError, NotImplementedError, TypeError, CaptureError) as error:
        raise ValueError(
            f"the step of optimizer {name} cannot be simulated: it calls a closure, needs sparse "
            "gradients, or reads tensors outside its state; use another class of torch.optim."
        ) from error
    states = [x for x in pytree.tree_leaves(calls.state) if isinstance(x, Tensor) and x.is_meta]
    return _Captured(update, tuple((tuple(x.shape), x.dtype) for x in states), bool(assumed.asked))


def _keep_scalars(optimizer: Optimizer, parameter: Tensor) -> None:
    """Replace scalar states by tensors with values, since later steps may read the values."""
    state: dict[str, Any] = optimizer.state[parameter]
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta and not value.ndim:
            state[name] = torch.ones((), dtype=value.dtype)


@cache
def priced_update(
    name: str, shape: tuple[int, ...], local: tuple[int, ...], dtype: torch.dtype
) -> PricedUpdate:
    captured = _captured(name, shape, dtype)
    numbers = captured.update.numbers or ()

    def on_meta(full: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.empty(local if full == shape else full, dtype=kind, device="meta")

    states = [on_meta(*state) for state in captured.states]
    if captured.by_values:
        return _by_values(captured.update, _captured(name, local, dtype), sum(map(_size, states)))
    own = [on_meta(shape, dtype), on_meta(shape, dtype), *states]
    parts = cut_update(captured.update, torch.device("meta"))
    gathered = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in parts.gathered]
    back = [on_meta(x.shape, x.dtype) for x in parts.results]
    before = program_of(parts.before, own, numbers)
    core = program_of(parts.core, gathered, numbers)
    after = program_of(parts.after, [*own, *back], numbers)
    held_bytes = sum(x.num_bytes for x in (*parts.gathered, *parts.results))
    extra = peak_memory(core).peak_bytes - held_bytes
    # New values of what is updated in place are written where the old ones are.
    kept = sum(map(_size, own)) - _size(own[1])
    for program, given in ((before, own), (after, [*own, *back])):
        new = kept if program is after else 0
        extra = max(extra, peak_memory(program).peak_bytes - sum(map(_size, given)) - new)
    needs_full = Core(parts, core, held_bytes) if parts.results else None
    return PricedUpdate((before, after), needs_full, sum(map(_size, states)), max(0, extra))


def _by_values(update: Update, on_shard: _Captured, state_bytes: int) -> PricedUpdate:
    """Price an update that runs op by op on shards, with the all-reduces of `update.joined`."""
    count = len(on_shard.update.inputs) - len(on_shard.update.numbers or ())
    values = [node.meta["val"] for node in on_shard.update.inputs[:count]]
    given = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in values]
    part = fx.GraphModule({}, on_shard.update.graph).forward
    program = program_of(part, given, on_shard.update.numbers or ())
    kept = 2 * sum(map(_size, given)) - _size(given[1])
    extra = max(0, peak_memory(program).peak_bytes - kept)
    joined = tuple(_size(x) for x in update.joined)
    return PricedUpdate([program], None, state_bytes, extra, joined)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


FOR_THE_REST = "AdamW"
"""Optimizer class for parameters that are not matrices, if the requested one needs matrices."""

_MASTER = torch.float32
"""Dtype of the master copy of 16-bit parameters, which the optimizer updates in mixed precision."""


@dataclass(frozen=True, eq=False)
class _Layout:
    """Shards of a parameter: by rank, its coordinates on the sharding axes, and its elements."""

    shards: dict[int, tuple[int, ...]]
    elements: dict[int, int]

    @property
    def is_replicated(self) -> bool:
        return len(set(self.shards.values())) == 1


class _Stored(NamedTuple):
    """A parameter: its full shape, the shape of a shard, and the dtype of its update."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: torch.dtype
    layout: _Layout
    copy_bytes: int
    """Bytes of the master copy of a shard; 0 without one."""


def simulate_update(
    programs: Sequence[Program],
    optimizer: str,
    model: CostModel,
    precision: str = "",
    times: Sequence[float] = (),
) -> UpdateCost:
    """Simulate an update of all parameters by a class of torch.optim, after the first step.

    programs: one program: of a rank, of stages, or for one device. For the stages of a deep model
    also a second program with more blocks: the parameters that it has in addition count times[i]
    times on stage i. For a class that needs matrices, AdamW updates the other parameters.
    precision: as for `state_bytes`. Raises ValueError for another class, and for one that calls a
    closure.
    """
    name = optimizer_class(optimizer).__name__
    stored = _counts(programs[0], precision)
    for further in programs[1:]:
        for stage, more in _counts(further, precision).items():
            few = stored[stage]
            stored[stage] = Counter(
                {key: few[key] + round(times[stage] * (more[key] - few[key])) for key in more}
            )
    flat = [p for counts in stored.values() for p in counts.elements()]
    kinds = [priced_update(_class_for(name, p), *p[:3]) for p in flat]
    return _Costs(model, flat, kinds).total(name)


def _class_for(name: str, stored: _Stored) -> str:
    return FOR_THE_REST if name == "Muon" and len(stored.shape) != 2 else name


# Parameters and their shards


def _counts(program: Program, precision: str) -> dict[int, Counter[_Stored]]:
    """For each stage, its distinct parameters, with how many equal ones there are of each."""
    counts: dict[int, Counter[_Stored]] = {}
    for stage, slot, ranks in _parameters(program):
        shape, sharding = program.global_shape_of(slot), program.sharding_of_slot(slot)
        dtype, local = dtype_of_value(slot.value), sharding.local_shape(shape)
        has_copy = dtype.itemsize == 2 and is_mixed(dtype.itemsize, precision)
        layout = _layout(sharding, tuple(shape), program.mesh or Mesh(), ranks)
        copy_bytes = torch.Size(local).numel() * _MASTER.itemsize if has_copy else 0
        stored = _Stored(
            tuple(shape), tuple(local), _MASTER if has_copy else dtype, layout, copy_bytes
        )
        counts.setdefault(stage, Counter())[stored] += 1
    return counts


def _parameters(program: Program) -> Iterator[tuple[int, Slot, tuple[int, ...]]]:
    """Yield (first stage that reads it, parameter, ranks that hold it) for each parameter."""
    mesh = program.mesh or Mesh()
    everywhere = tuple(range(max(1, mesh.num_devices)))
    if not is_staged(program):
        yield from ((0, s, everywhere) for s in program.arguments if s.kind == "param")
        return
    places, axis = StagePlaces.of(program), mesh.stage_axis
    slots: dict[str, tuple[int, Slot]] = {}
    held: defaultdict[str, set[int]] = defaultdict(set)
    for function in functions_of(program).values():
        for slot in function.arguments:
            if slot.kind == "param":
                slots.setdefault(slot.name, (function.stage, slot))
                held[slot.name].update(places.of_stage[function.stage])
    place = {r: mesh.coordinates(r)[axis.name] if axis else 0 for r in everywhere}
    for name, (stage, slot) in slots.items():
        yield stage, slot, tuple(rank for rank in everywhere if place[rank] in held[name])


@cache
def _layout(
    sharding: Sharding, shape: tuple[int, ...], mesh: Mesh, ranks: tuple[int, ...]
) -> _Layout:
    axes = [axis.name for axis in mesh.device_axes if axis.name in sharding.axes]
    at = {rank: mesh.coordinates(rank) for rank in ranks}
    return _Layout(
        {rank: tuple(place[axis] for axis in axes) for rank, place in at.items()},
        {r: torch.Size(sharding.held_shape(shape, place)).numel() for r, place in at.items()},
    )


# All parameters


@dataclass(frozen=True)
class _Costs:
    """Sums of seconds and bytes over the updates of all parameters, by rank."""

    model: CostModel
    stored: Sequence[_Stored]
    kinds: Sequence[PricedUpdate]
    compute_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    held: Counter[int] = field(default_factory=Counter[int])
    states: Counter[int] = field(default_factory=Counter[int])
    there: Counter[int] = field(default_factory=Counter[int])
    back: Counter[int] = field(default_factory=Counter[int])
    _seconds: dict[int, float] = field(default_factory=dict[int, float])

    def total(self, name: str) -> UpdateCost:
        ranks = range(max(1, self.model.mesh.num_devices))
        alike = Counter(zip(self.stored, map(id, self.kinds), strict=True))
        by_id = {id(kind): kind for kind in self.kinds}
        for (stored, key), count in alike.items():
            kind = by_id[key]
            seconds = count * sum(map(self._seconds_of, kind.on_shards))
            for rank in stored.layout.shards:
                self.compute_s[rank] += seconds
                self.states[rank] += count * (kind.state_bytes + stored.copy_bytes)
        cores = {i: kind.core for i, kind in enumerate(self.kinds) if kind.core is not None}
        owners = self._owners(cores)
        for index, core in cores.items():
            self._core(index, core, owners.get(index))
        joined = [x for kind in self.kinds for x in kind.joined] if len(ranks) > 1 else []
        exchanges = [sums for sums in (self.there, self.back) if any(sums.values())]
        extra = max((kind.extra_bytes for kind in self.kinds), default=0)
        return UpdateCost(
            name,
            max(self.compute_s.values(), default=0.0),
            sum(self._exchange_s(max(sums.values())) for sums in exchanges)
            + sum(self.model.sync_time_s("all_reduce", self._axes, size) for size in joined),
            max(self.there[rank] + self.back[rank] for rank in ranks)
            + sum(2 * (len(ranks) - 1) * size // len(ranks) for size in joined),
            len(exchanges) + len(joined),
            max(self.states.values(), default=0),
            max(self.held.values(), default=0) + extra,
            tuple(self.states[rank] for rank in ranks),
        )

    def _seconds_of(self, program: Program) -> float:
        key = id(program)
        if key not in self._seconds:
            model = self.model
            self._seconds[key] = sum(model.op_time_s(op) + model.issue_s for op in program.ops)
        return self._seconds[key]

    def _owners(self, cores: Mapping[int, Core]) -> dict[int, int]:
        flops = {
            index: core.parts.flops
            for index, core in cores.items()
            if not self.stored[index].layout.is_replicated or self._is_worth_sending(core)
        }
        return dealt_out(flops, {index: list(self.stored[index].layout.shards) for index in flops})

    def _is_worth_sending(self, core: Core) -> bool:
        if self.model.mesh.num_devices < 2:
            return False
        sent = sum(x.num_bytes for x in core.parts.results)
        return self._seconds_of(core.program) > self._exchange_s(sent)

    def _core(self, index: int, core: Core, owner: int | None) -> None:
        """Add the cost of a core and its messages. owner: rank that computes it; None: every rank
        that holds the parameter. Results that are not sharded go to the ranks of other stages."""
        layout, parts = self.stored[index].layout, core.parts
        ranks = list(layout.shards)
        for rank in ranks if owner is None else [owner]:
            self.compute_s[rank] += self._seconds_of(core.program)
            self.held[rank] += core.held_bytes
        each = sum(x.dtype.itemsize for x in parts.gathered if x.is_sharded)
        for source in senders_of(layout.shards, owner) if owner is not None else ():
            if source != owner:
                self.there[source] += layout.elements[source] * each
        first = min(ranks) if owner is None else owner
        for sent in parts.results:
            if sent.is_sharded:
                others = sum(layout.elements[rank] for rank in ranks if rank != owner)
                self.back[first] += 0 if owner is None else others * sent.dtype.itemsize
            else:
                world = max(1, self.model.mesh.num_devices)
                self.back[first] += sent.num_bytes * (world - (len(ranks) if owner is None else 1))

    @property
    def _axes(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.model.mesh.device_axes)

    def _exchange_s(self, sent: int) -> float:
        ring = self.model.ring_over(self._axes, all_pairs=True)
        return self.model.ring_time_s("all_to_all", ring, sent, sent)
