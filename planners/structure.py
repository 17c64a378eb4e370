"""Finding column- and row-parallel pairs by the structure of a program.

A linear map may be cut along its output features if every path from them, through ops that
keep the feature apart (biases, activations, attention by head), ends in a linear map that
contracts it, or in a plain sum or maximum over it (a loss on vocabulary shards). The map that
contracts it is then cut along its input features. Features that are added to whole activations,
as at the end of a residual branch, cannot stay apart. No module name is looked at, so this finds
the pairs of transformers, of gated and plain MLPs and of convolutional blocks alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from xdsl.ir import SSAValue

from shardweave.ir.annotations import phase_of
from shardweave.ir.aten import AtenOp
from shardweave.ir.facts import facts_of, weight_of
from shardweave.ir.placement import DimSharding, Placement
from shardweave.ir.program import Program
from shardweave.ir.sharding.rules import Rule, rule_of

Cut = tuple[DimSharding, ...]
"""One placement somewhere on a value's dims."""


@dataclass(frozen=True)
class Label:
    """A value whose features are those of some linear maps, cut at one place."""

    cut: Cut
    sources: frozenset[AtenOp]


@dataclass
class Groups:
    """What follows from cutting a set of linear maps along their outputs together.

    cuts: per parameter its cut. dead: maps whose features end where they cannot stay apart.
    uneven: maps whose features do not divide, and which number does not.
    """

    cuts: dict[SSAValue, tuple[Cut, frozenset[AtenOp]]] = field(
        default_factory=dict[SSAValue, tuple[Cut, frozenset[AtenOp]]]
    )
    dead: set[AtenOp] = field(default_factory=set[AtenOp])
    ended: set[AtenOp] = field(default_factory=set[AtenOp])
    ends: list[tuple[AtenOp, frozenset[AtenOp]]] = field(
        default_factory=list[tuple[AtenOp, frozenset[AtenOp]]]
    )
    parts: dict[AtenOp, int] = field(default_factory=dict[AtenOp, int])
    uneven: dict[AtenOp, str] = field(default_factory=dict[AtenOp, str])
    joined: list[frozenset[AtenOp]] = field(default_factory=list[frozenset[AtenOp]])


@dataclass(frozen=True)
class Pair:
    """Linear maps cut along their outputs together, and what contracts these.

    columns, ends: in program order. cuts: of their parameters, and of those between.
    """

    columns: tuple[AtenOp, ...]
    ends: tuple[AtenOp, ...]
    cuts: dict[SSAValue, Cut]


def parallel_pairs(
    program: Program, axis: str, size: int, uneven: dict[AtenOp, str] | None = None
) -> dict[SSAValue, Cut]:
    """The cut of each parameter of column- and row-parallel maps over an axis of `size`.

    uneven: is filled with the maps that stay whole because their features do not divide by
    `size`, and what it is that does not ("4 groups of 6 features (such as heads)").
    """
    groups = _separable(program, axis, size, uneven)
    return {value: cut for value, (cut, _) in groups.cuts.items()}


def find_pairs(program: Program, axis: str, size: int) -> list[Pair]:
    """The maps of `parallel_pairs`, those together that are cut together, in program order."""
    groups = _separable(program, axis, size)
    leader = {op: op for group in groups.joined for op in group}

    def root(op: AtenOp) -> AtenOp:
        while leader[op] is not op:
            leader[op] = leader[leader[op]]
            op = leader[op]
        return op

    for group in groups.joined:
        first, *others = group
        for other in others:
            leader[root(other)] = root(first)
    found: dict[AtenOp, Pair] = {}
    for op in program.ops:
        if isinstance(op, AtenOp) and op in leader:
            pair = found.setdefault(root(op), Pair((), (), {}))
            found[root(op)] = Pair((*pair.columns, op), pair.ends, pair.cuts)
    for op, sources in groups.ends:
        pair = found[root(next(iter(sources)))]
        found[root(next(iter(sources)))] = Pair(pair.columns, (*pair.ends, op), pair.cuts)
    for value, (cut, sources) in groups.cuts.items():
        found[root(next(iter(sources)))].cuts[value] = cut
    return list(found.values())


def _separable(
    program: Program, axis: str, size: int, uneven: dict[AtenOp, str] | None = None
) -> Groups:
    """The groups of maps that can be cut; `uneven` as for `parallel_pairs`.

    Repeats the analysis without the maps that turned out not to be separable, until none is
    left: a handful of walks over the forward ops.
    """
    parameters = {slot.value for slot in program.arguments if slot.kind == "param"}
    forward = [op for op in program.ops if isinstance(op, AtenOp) and phase_of(op) == "forward"]
    activations = _input_dependent(program, forward)
    banned: set[AtenOp] = set()
    parts: dict[AtenOp, int] = {}
    stacks: set[AtenOp] = set()
    while True:
        analysis = _Analysis(parameters, activations, axis, size, banned, parts)
        for op in forward:
            analysis.visit(op)
        groups = analysis.groups
        if uneven is not None:
            uneven |= groups.uneven
        retry = {op: n for op, n in groups.parts.items() if op not in parts}
        failed = _spread(groups.joined, groups.dead - set(retry)) | analysis.unended()
        if not retry and not failed:
            for op in groups.ended:  # the parts of a fused projection are cut each for itself
                (uneven or {}).pop(op, None)
            return groups
        parts |= retry
        stacks |= retry.keys() & groups.uneven.keys()
        if not retry:
            # What was taken for a stack of projections, and is none, fails without the others.
            banned |= (failed & stacks) or failed


def _input_dependent(program: Program, forward: list[AtenOp]) -> set[SSAValue]:
    """The inputs, and all values computed from them."""
    found = {slot.value for slot in program.arguments if slot.kind == "input"}
    for op in forward:
        if not found.isdisjoint(op.operands):
            found.update(op.results)
    return found


def _spread(joined: list[frozenset[AtenOp]], dead: set[AtenOp]) -> set[AtenOp]:
    """All maps that stand or fall with a dead one."""
    failed = set(dead)
    changed = True
    while changed:
        changed = False
        for group in joined:
            if group & failed and not group <= failed:
                failed |= group
                changed = True
    return failed


def parameter_of(
    value: SSAValue, parameters: set[SSAValue]
) -> tuple[SSAValue, list[AtenOp]] | None:
    """The parameter that a value is a view of, and the views, outermost first."""
    views: list[AtenOp] = []
    while isinstance(value.owner, AtenOp) and facts_of(value.owner).keeps_weight:
        views.append(value.owner)
        value = value.owner.operands[0]
    return (value, views) if value in parameters else None


class _Analysis:
    def __init__(
        self,
        parameters: set[SSAValue],
        activations: set[SSAValue],
        axis: str,
        size: int,
        banned: set[AtenOp],
        parts: dict[AtenOp, int],
    ) -> None:
        self.parameters = parameters
        self.activations = activations
        self.axis = axis
        self.size = size
        self.banned = banned
        self.parts = parts
        self.labels: dict[SSAValue, Label] = {}
        self.groups = Groups()
        self.started: set[AtenOp] = set()

    def unended(self) -> set[AtenOp]:
        """Maps that nothing contracts: cutting them would gain nothing."""
        return {op for op in self.started if op not in self.groups.ended}

    def visit(self, op: AtenOp) -> None:
        labels = [(i, self.labels[v]) for i, v in enumerate(op.operands) if v in self.labels]
        if labels:
            self._follow(op, labels)
        elif weight_of(op) is not None and op not in self.banned:
            self._start(op)

    def _start(self, op: AtenOp) -> None:
        """Label the output features of a linear map with a weight of its own."""
        weight = weight_of(op)
        assert weight is not None
        rule = rule_of(op)
        found = parameter_of(op.operands[weight], self.parameters)
        factor = _only_in(rule, weight, present=True)
        if found is None or factor is None:
            return
        extent = rule.factors[factor].size
        parts = self.parts.get(op, 1)
        if extent % (self.size * parts):
            each = f"{parts} parts of {extent // parts}" if parts > 1 else str(extent)
            self.groups.uneven[op] = f"{each} output features"
            return
        placement = Placement(self.axis, self.size, extent // (self.size * parts))
        cuts = rule.one_cut(factor, placement)
        sources = frozenset({op})
        self.started.add(op)
        self.groups.joined.append(sources)
        self.labels[op.results[0]] = Label(rule.dims_of(rule.results[0], cuts), sources)
        self._adopt(op, rule, cuts, sources)

    def _follow(self, op: AtenOp, labels: list[tuple[int, Label]]) -> None:
        rule = rule_of(op)
        sources = frozenset[AtenOp]().union(*(label.sources for _, label in labels))
        self.groups.joined.append(sources)
        seats = {self._seat(op, rule, index, label) for index, label in labels}
        seat = next(iter(seats))
        if len(seats) != 1 or seat is None:
            self.groups.dead |= sources
            return
        factor, stride = seat
        if self._meets_whole(op, rule, factor):
            self.groups.dead |= sources
            return
        cuts = rule.one_cut(factor, Placement(self.axis, self.size, stride))
        self._adopt(op, rule, cuts, sources)
        kept = False
        for result, dims in zip(op.results, rule.results, strict=True):
            if any(factor in names for names in dims):
                kept = True
                self.labels[result] = Label(rule.dims_of(dims, cuts), sources)
        if not kept:
            product = facts_of(op).product
            blocked = rule.factors[factor].reduction is None and not (product and product.plain)
            (self.groups.dead if blocked else self.groups.ended).update(sources)
            self.groups.ends.append((op, sources))

    def _meets_whole(self, op: AtenOp, rule: Rule, factor: int) -> bool:
        """Whether the features are added to whole activations of the same features.

        That is where a residual branch ends; the stream it returns to stays whole.
        """
        return facts_of(op).is_addition and any(
            value in self.activations
            and value not in self.labels
            and any(factor in names for names in dims)
            for value, dims in zip(op.operands, rule.operands, strict=True)
        )

    def _seat(self, op: AtenOp, rule: Rule, index: int, label: Label) -> tuple[int, int] | None:
        """The factor of `op` that a labelled operand's cut falls on."""
        for names, placements in zip(rule.operands[index], label.cut, strict=True):
            for placement in placements:
                seat = rule.seat(names, placement)
                if seat is None:
                    self._note_uneven(rule, names, label)
                    parts = _parts(rule, names, self.size)
                    for source in label.sources if parts else ():
                        self.groups.parts[source] = parts
                return seat
        return None

    def _note_uneven(self, rule: Rule, names: Sequence[int], label: Label) -> None:
        """Where features are viewed as groups, such as heads, it is these that must divide."""
        sizes = [rule.factors[factor].size for factor in names]
        is_whole = any(rule.factors[factor].whole for factor in names)
        if len(sizes) > 1 and sizes[0] % self.size and not is_whole:
            what = f"{sizes[0]} groups of {prod(sizes[1:])} features (such as heads)"
            self.groups.uneven |= dict.fromkeys(label.sources, what)

    def _adopt(
        self, op: AtenOp, rule: Rule, cuts: list[DimSharding], sources: frozenset[AtenOp]
    ) -> None:
        """Cut the parameters that an op reads along the cut factor."""
        for value, dims in zip(op.operands, rule.operands, strict=True):
            found = parameter_of(value, self.parameters)
            cut = rule.dims_of(dims, cuts)
            if found is None or not any(cut):
                continue
            parameter, views = found
            back = back_through(views, cut)
            if back is None:
                continue
            known = self.groups.cuts.get(parameter)
            if known is not None and known[0] != back:
                self.groups.dead |= sources
            elif known is None:
                self.groups.cuts[parameter] = (back, sources)


def _parts(rule: Rule, names: Sequence[int], size: int) -> int:
    """In how many parts the features come that a dim of these factors has, each to be cut.

    Of a factor that must be whole its size; else that of the first, which may stack projections
    (the queries, keys and values of `nn.MultiheadAttention`). 0 if it is no stack.
    """
    factors = [rule.factors[factor] for factor in names]
    wholes = [factor.size for factor in factors if factor.whole]
    stacked = len(factors) > 1 and factors[0].size % size != 0
    return (wholes or ([factors[0].size] if stacked else [0]))[0]


def _only_in(rule: Rule, weight: int, *, present: bool) -> int | None:
    """The weight's factor that no activation has: output features (present in the result)."""
    others = {
        factor
        for index, dims in enumerate(rule.operands)
        if index != weight and len(dims) > 1
        for names in dims
        for factor in names
    }
    in_result = {factor for names in rule.results[0] for factor in names}
    for names in rule.operands[weight]:
        for factor in names:
            if factor not in others and (factor in in_result) == present:
                return factor
    return None


def back_through(views: list[AtenOp], cut: Cut) -> Cut | None:
    """The cut of a parameter, given that of a view of it; None if the view loses it."""
    for view in views:
        rule = rule_of(view)
        carried = rule.carry(rule.results[0], rule.operands[0], cut)
        if carried is None or not any(carried):
            return None
        cut = carried
    return cut


def input_embeddings(program: Program) -> Iterator[tuple[AtenOp, SSAValue]]:
    """Forward lookups in a parameter by the program's inputs, with the parameter."""
    inputs = {slot.value for slot in program.arguments if slot.kind == "input"}
    parameters = {slot.value for slot in program.arguments if slot.kind == "param"}
    for op in program.ops:
        if isinstance(op, AtenOp) and op.name == "aten.embedding" and phase_of(op) == "forward":
            found = parameter_of(op.operands[0], parameters)
            if found is not None and _comes_from(op.operands[1], inputs):
                yield op, found[0]


def _comes_from(value: SSAValue, inputs: set[SSAValue]) -> bool:
    """Whether a value of indices is computed from an input (through ops on small integers)."""
    seen: set[SSAValue] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        if current in inputs:
            return True
        if current not in seen and isinstance(current.owner, AtenOp):
            seen.add(current)
            stack.extend(current.owner.operands)
    return False
