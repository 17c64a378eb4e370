"""Cost of an optimizer's update after a step, from its own code, as ranks run it.

Element-wise ops run on shards. An op that needs full matrices runs on each matrix's owner, one of
the ranks; one all-to-all brings all matrices there, and another one back. An update whose code
branches on tensors' values runs op by op on shards, and ranks all-reduce sums and norms
(`backends/optimizers`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import torch

from shardweave.ir.capture.update.owners import dealt_out, senders_of
from shardweave.ir.capture.update.streams import streamed_bytes
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import StagePlaces, functions_of, is_staged
from shardweave.planners.cost.memory import is_mixed
from shardweave.planners.cost.model import CostModel
from shardweave.planners.simulate.update_cost import FOR_THE_REST, UpdateCost, optimizer_class
from shardweave.planners.simulate.update_programs import Core, PricedUpdate, priced_update

_MASTER = torch.float32
"""Dtype of the master copy of 16-bit parameters, which the optimizer updates in mixed precision."""


@dataclass(frozen=True, eq=False)
class _Layout:
    """Placement of a parameter: each rank's coordinates on sharding axes and its elements."""

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
    cost = _Costs(model, flat, kinds).total(name)
    return _with_copies(cost, flat, kinds, model) if programs[0].has_host_states else cost


def _with_copies(
    cost: UpdateCost, stored: Sequence[_Stored], kinds: Sequence[PricedUpdate], model: CostModel
) -> UpdateCost:
    """Add the copies of states that the host keeps. They overlap with compute, and take longer than
    issuing the groups' updates. If an update reads more than its own element, all states are copied
    before it."""
    copies_s, held = 2 * cost.state_bytes / model.host_bandwidth_bytes_s, cost.state_bytes
    if not any(kind.core or kind.joined for kind in kinds):
        order = _as_in_blocks(stored)
        sizes = [torch.Size(stored[i].local).numel() * stored[i].dtype.itemsize for i in order]
        states = [kinds[i].state_bytes + stored[i].copy_bytes for i in order]
        copies_s, held = max(0.0, copies_s - cost.compute_s), streamed_bytes(sizes, states)
    temporary_bytes = cost.temporary_bytes + min(held, cost.state_bytes)
    return replace(cost, host_s=copies_s, temporary_bytes=temporary_bytes)


def _as_in_blocks(stored: Sequence[_Stored]) -> list[int]:
    """Order parameters, by index, as in a model of equal blocks: equal ones spread evenly."""
    counts, seen = Counter(stored), Counter[_Stored]()
    places: list[float] = []
    for parameter in stored:
        places.append(seen[parameter] / counts[parameter])
        seen[parameter] += 1
    return sorted(range(len(stored)), key=places.__getitem__)


def _class_for(name: str, stored: _Stored) -> str:
    return FOR_THE_REST if name == "Muon" and len(stored.shape) != 2 else name


# Parameters and their shards


def _counts(program: Program, precision: str) -> dict[int, Counter[_Stored]]:
    """For each stage, its distinct parameters, and the number of equal ones of each."""
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
    """Seconds and bytes by rank, summed over the updates of all parameters."""

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
        with the parameter does. Unsharded results are also sent to the ranks of other stages."""
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
