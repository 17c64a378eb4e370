"""Detection of column- and row-parallel pairs of linear maps by the structure of a program.

A linear map may be sharded along its output features if every path from them, through ops that
keep features separate (biases, activations, attention by head), ends in a linear map that
contracts them, or in a plain sum or maximum over them (a loss on vocabulary shards). The map that
contracts them is then sharded along its input features. Features that are added to replicated
activations, as at the end of a residual branch, cannot stay sharded. Module names do not matter, so
this finds pairs in transformers, gated and plain MLPs and convolutional blocks alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.mesh.placement import DimSharding, Placement
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.rules import Rule, rule_of
from shardweave.planners.structure.linear_maps import (
    Cut,
    LinearMap,
    back_through,
    linear_maps,
    parameter_of,
    repeated_dims,
)


@dataclass(frozen=True)
class Label:
    """The sharding `cut` of a value, by features that the linear maps `sources` produce."""

    cut: Cut
    sources: frozenset[AtenOp]


@dataclass(frozen=True)
class Pair:
    """Column-parallel linear maps that must be sharded together, and the ops that contract their
    outputs.

    columns: the maps; ends: the contracting ops; both in program order. cuts: the shardings of all
    their parameters.
    """

    columns: tuple[AtenOp, ...]
    ends: tuple[AtenOp, ...]
    cuts: dict[SSAValue, Cut]


def parallel_pairs(
    program: Program,
    axis: str,
    size: int,
    uneven: dict[AtenOp, str] | None = None,
    *,
    stacked: Mapping[AtenOp, int] | None = None,
    among: Mapping[LinearMap, int] | None = None,
) -> dict[SSAValue, Cut]:
    """Shard the parameters of column- and row-parallel maps over an axis of `size`.

    uneven: is filled with the maps that stay replicated because their features do not divide by
    `size`, and a description of these ("4 groups of 6 features (such as heads)"). stacked: maps
    whose output features are several equal groups, each to be sharded, and the number of groups.
    among: the only maps to shard, and the number of features on the first device.
    """
    analysis = _separable(program, axis, size, uneven, stacked, among)
    return {value: cut for value, (cut, _) in analysis.cuts.items()}


def separable_maps(program: Program, axis: str, size: int) -> dict[AtenOp, Cut]:
    """Return the maps that `parallel_pairs` shards along outputs, with the outputs' shardings."""
    analysis = _separable(program, axis, size)
    return {op: analysis.labels[op.results[0]].cut for op in analysis.together}


def find_pairs(program: Program, axis: str, size: int) -> list[Pair]:
    """Group linear maps that must be sharded together (`parallel_pairs`), in program order."""
    analysis = _separable(program, axis, size)
    return [
        Pair(
            columns=tuple(op for op in analysis.together if op in maps),
            ends=tuple(op for op, sources in analysis.ends if sources <= maps),
            cuts={value: cut for value, (cut, sources) in analysis.cuts.items() if sources <= maps},
        )
        for maps in {id(maps): maps for maps in analysis.together.values()}.values()
    ]


def _separable(
    program: Program,
    axis: str,
    size: int,
    uneven: dict[AtenOp, str] | None = None,
    stacked: Mapping[AtenOp, int] | None = None,
    among: Mapping[LinearMap, int] | None = None,
) -> _Analysis:
    """Analyse all candidate maps; repeat without those that cannot be sharded until all can."""
    parameters = {slot.value for slot in program.arguments if slot.kind == "param"}
    forward = [op for op in program.ops if isinstance(op, AtenOp) and phase_of(op) == "forward"]
    activations = _input_dependent(program, forward)
    repeated = repeated_dims(forward)
    candidates = linear_maps(program) if among is None else among
    maps: dict[Operation, LinearMap] = {m.op: m for m in candidates}
    strides = {m.op: first for m, first in (among or {}).items()}
    assumed = _Assumptions(maps, strides)
    uneven = {} if uneven is None else uneven
    while True:
        analysis = _Analysis(
            assumed.maps,
            parameters,
            activations,
            repeated,
            axis,
            size,
            assumed.parts,
            assumed.strides,
            stacked or {},
            uneven,
        )
        for op in forward:
            analysis.visit(op)
        if assumed.hold_in(analysis, uneven):
            for op in analysis.ended:  # the parts of a fused projection are cut each for itself
                uneven.pop(op, None)
            return analysis


@dataclass
class _Assumptions:
    """Assumptions that an analysis begins with; they are corrected until it confirms them.

    maps: those that may be sharded. strides: by map, features of the first device. parts: by map,
    number of equal groups in which its outputs are read. Each correction adds a map to `parts`,
    moves it from there to `strides`, or removes it from `maps`: at most three per map.
    """

    maps: dict[Operation, LinearMap]
    strides: dict[AtenOp, int]
    parts: dict[AtenOp, int] = field(default_factory=dict[AtenOp, int])
    _groups: dict[AtenOp, int] = field(default_factory=dict[AtenOp, int])
    _stacks: set[AtenOp] = field(default_factory=set[AtenOp])

    def hold_in(self, analysis: _Analysis, uneven: Mapping[AtenOp, str]) -> bool:
        """True if the analysis confirms all assumptions. If not, corrects them: adopts groups that
        the analysis met or, if it met none, removes maps that failed."""
        met, failed = self._newly_met(analysis), self._failed(analysis)
        self.parts |= met
        self._groups |= analysis.met_strides
        self._stacks |= met.keys() & uneven.keys()
        if met or not failed:
            return not met
        # Maps wrongly taken for a stack of projections fail first, without the others: their
        # parts may be groups, of which the first devices take more than the last.
        failed = (failed & self._stacks) or (failed & self.strides.keys()) or failed
        grouped = failed & self._groups.keys() - self.strides.keys()
        if not grouped:
            self.maps = {op: m for op, m in self.maps.items() if op not in failed}
            return False
        self.strides |= {op: self._groups[op] for op in grouped}
        self.parts = {op: count for op, count in self.parts.items() if op not in grouped}
        self._stacks -= grouped
        return False

    def _newly_met(self, analysis: _Analysis) -> dict[AtenOp, int]:
        return {op: n for op, n in analysis.met_parts.items() if op not in self.parts}

    def _failed(self, analysis: _Analysis) -> set[AtenOp]:
        # Maps that nothing contracts would gain nothing.
        failed = set(analysis.together) - analysis.ended
        for op in analysis.dead - self._newly_met(analysis).keys():
            failed |= analysis.together[op]
        return failed


def _input_dependent(program: Program, forward: list[AtenOp]) -> set[SSAValue]:
    dependent = {slot.value for slot in program.arguments if slot.kind == "input"}
    for op in forward:
        if not dependent.isdisjoint(op.operands):
            dependent.update(op.results)
    return dependent


@dataclass(eq=False)
class _Analysis:
    """Finds what follows if linear maps are all sharded along their outputs.

    parts: by map, the assumed number of equal groups of its features, if several; met_parts: the
    numbers that the analysis meets. strides: by map, features of the first device, if it takes more
    groups than the last; met_strides: as met. stacked: as in `parallel_pairs`; parts are those of
    each group. cuts: by parameter, with the maps that its features come from. together: by map, the
    maps that must be sharded with it. dead: maps whose features reach an op that cannot keep them
    sharded. ended: maps whose features an op contracts; ends: these ops.
    """

    maps: Mapping[Operation, LinearMap]
    parameters: set[SSAValue]
    activations: set[SSAValue]
    repeated: Mapping[SSAValue, set[int]]
    axis: str
    size: int
    parts: Mapping[AtenOp, int]
    strides: Mapping[AtenOp, int]
    stacked: Mapping[AtenOp, int]
    uneven: dict[AtenOp, str]
    labels: dict[SSAValue, Label] = field(default_factory=dict[SSAValue, Label])
    met_parts: dict[AtenOp, int] = field(default_factory=dict[AtenOp, int])
    met_strides: dict[AtenOp, int] = field(default_factory=dict[AtenOp, int])
    cuts: dict[SSAValue, tuple[Cut, frozenset[AtenOp]]] = field(
        default_factory=dict[SSAValue, tuple[Cut, frozenset[AtenOp]]]
    )
    together: dict[AtenOp, set[AtenOp]] = field(default_factory=dict[AtenOp, set[AtenOp]])
    dead: set[AtenOp] = field(default_factory=set[AtenOp])
    ended: set[AtenOp] = field(default_factory=set[AtenOp])
    ends: list[tuple[AtenOp, frozenset[AtenOp]]] = field(
        default_factory=list[tuple[AtenOp, frozenset[AtenOp]]]
    )

    def visit(self, op: AtenOp) -> None:
        labels = {i: self.labels[v] for i, v in enumerate(op.operands) if v in self.labels}
        if labels:
            self._follow(op, labels)
        elif op in self.maps:
            self._start(op, self.maps[op].produced)

    def _start(self, op: AtenOp, factor: int) -> None:
        """Label the output of a linear map as sharded, unless its features do not divide."""
        rule = rule_of(op)
        extent = rule.factors[factor].size
        parts = self.parts.get(op, 1) * self.stacked.get(op, 1)
        stride = self.strides.get(op, 0) if parts == 1 else 0
        stride = stride or -(-extent // (self.size * parts))
        placement = Placement(self.axis, self.size, stride)
        if not rule.can_cut(factor, (placement,)) or (parts > 1 and extent % (self.size * parts)):
            each = f"{parts} parts of {extent // parts}" if parts > 1 else str(extent)
            self.uneven.setdefault(op, f"{each} output features")
            return
        cuts = rule.one_cut(factor, placement)
        sources = frozenset({op})
        self.together[op] = {op}
        self.labels[op.results[0]] = Label(rule.dims_of(rule.results[0], cuts), sources)
        self._adopt(op, rule, cuts, sources)

    def _follow(self, op: AtenOp, labels: Mapping[int, Label]) -> None:
        rule = rule_of(op)
        sources = frozenset[AtenOp]().union(*(label.sources for label in labels.values()))
        self._join(sources)
        seats = {self._seat(rule, index, label) for index, label in labels.items()}
        seat = next(iter(seats))
        if len(seats) != 1 or seat is None or self._meets_whole(op, rule, seat[0]):
            self.dead |= sources
            return
        factor, stride = seat
        cuts = rule.one_cut(factor, Placement(self.axis, self.size, stride))
        self._adopt(op, rule, cuts, sources)
        kept = False
        for result, dims in zip(op.results, rule.results, strict=True):
            if any(factor in names for names in dims):
                kept = True
                self.labels[result] = Label(rule.dims_of(dims, cuts), sources)
        if not kept:
            product = spec_of(op).product
            blocked = rule.factors[factor].reduction is None and not (product and product.plain)
            (self.dead if blocked else self.ended).update(sources)
            self.ends.append((op, sources))

    def _join(self, sources: frozenset[AtenOp]) -> None:
        """Record that these maps must all be sharded, or none of them."""
        merged = set[AtenOp]().union(*(self.together[op] for op in sources))
        if any(len(self.together[op]) < len(merged) for op in sources):
            self.together.update(dict.fromkeys(merged, merged))

    def _meets_whole(self, op: AtenOp, rule: Rule, factor: int) -> bool:
        """True if an op adds sharded features to replicated activations, as a residual does."""
        return spec_of(op).sign is not None and any(
            value in self.activations
            and value not in self.labels
            and any(
                factor in names and dim not in self.repeated.get(value, ())
                for dim, names in enumerate(dims)
            )
            for value, dims in zip(op.operands, rule.operands, strict=True)
        )

    def _seat(self, rule: Rule, index: int, label: Label) -> tuple[int, int] | None:
        """Factor that an operand's cut shards, and the stride; None if its groups do not divide."""
        names, placement = next(
            (names, placement)
            for names, placements in zip(rule.operands[index], label.cut, strict=True)
            for placement in placements
        )
        seat = rule.seat(names, placement)
        if seat is None:
            sizes = [rule.factors[factor].size for factor in names]
            wholes = [rule.factors[factor].size for factor in names if rule.factors[factor].whole]
            if wholes:
                self.met_parts |= dict.fromkeys(label.sources, wholes[0])
            elif len(sizes) > 1 and sizes[0] % self.size:
                what = f"{sizes[0]} groups of {prod(sizes[1:])} features (such as heads)"
                self.uneven |= dict.fromkeys(label.sources, what)
                self.met_parts |= dict.fromkeys(label.sources, sizes[0])
                if sizes[0] > self.size:  # of fewer, most devices would have none
                    stride = -(-sizes[0] // self.size) * prod(sizes[1:])
                    self.met_strides |= dict.fromkeys(label.sources, stride)
        return seat

    def _adopt(
        self, op: AtenOp, rule: Rule, cuts: list[DimSharding], sources: frozenset[AtenOp]
    ) -> None:
        """Record shardings of the parameters that an op reads; maps that conflict become dead."""
        for value, dims in zip(op.operands, rule.operands, strict=True):
            read = parameter_of(value, self.parameters)
            cut = rule.dims_of(dims, cuts)
            if read is None or not any(cut):
                continue
            parameter, views = read
            back = back_through(views, cut)
            if back is not None and self.cuts.setdefault(parameter, (back, sources))[0] != back:
                self.dead |= sources
