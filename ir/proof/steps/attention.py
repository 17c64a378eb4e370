"""Attention over a part of its keys, and how parts merge to that over all.

Of out_p and lse_p, the output of a part of the keys and the logarithm of its sum of exponentials,
those of two parts together are lse = log(exp(lse_1) + exp(lse_2)) and out = out_1 + share * (out_2
- out_1), where share = exp(lse_2 - lse) = sigmoid(lse_2 - lse_1). So a part is known by its keys;
two that have none in common make one of both, and the one of all keys is the model's. Backward, a
part of the keys gives its part of the gradients of keys and values, and a term of the queries'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.literals import to_python
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Placement, Sharding
from shardweave.ir.ops.registry import first_of_attention, global_name
from shardweave.ir.proof.model.expressions import Expressions
from shardweave.ir.proof.model.local_forms import FormsOf, OpForm
from shardweave.ir.proof.relations.held import (
    SUB_BATCH,
    AttentionPart,
    Local,
    RankNumber,
    Relation,
    Value,
    stands_for,
)
from shardweave.ir.proof.steps.masks import first_of_range
from shardweave.ir.sharding.rules.attention import POSITIONS


@dataclass(frozen=True)
class ShareStep:
    """An op of those that give the share of a part, and the arguments that it may have."""

    name: str
    arguments: Mapping[str, float]


SHARE = (
    ShareStep("aten.view", {}),
    ShareStep("aten.sigmoid", {}),
    ShareStep("aten.nan_to_num", {"nan": 0.0}),
    ShareStep("aten.sub.Tensor", {"alpha": 1}),
)
"""The steps to the share of a part, the last first."""


@dataclass(frozen=True)
class KeyCut:
    """An attention on one of several blocks of keys. parts: its operands as those of all keys."""

    form: OpForm
    parts: tuple[Relation, ...]
    placement: Placement
    coordinate: int


def on_part_of_keys(
    op: AtenOp, operands: Sequence[Value], forms: FormsOf, table: Expressions
) -> Iterator[KeyCut]:
    """The attentions of the global program that an op may compute for a block of keys."""
    first = first_of_attention(op)
    has_mask = isinstance(op.tensor("attn_mask"), SSAValue)
    count = (6 if first else 3) + has_mask
    parts = [part for part in operands[:count] if isinstance(part, Relation)]
    if len(parts) < count or any(part.held.layout is not None for part in parts):
        return
    cuts = parts[first + 1].held.sharding.dims[POSITIONS]
    if len(cuts) != 1 or not cuts[0].axis.startswith(SUB_BATCH):
        return
    (cut,) = cuts
    size = parts[first + 1].held.shape[POSITIONS]
    coordinates = dict(parts[first + 1].at)[cut.axis]
    if len(coordinates) != 1 or cut.stride * cut.size != size:
        return
    (coordinate,) = coordinates
    dims = dict.fromkeys((first + 1, first + 2), POSITIONS)
    if has_mask and parts[-1].held.shape[-1] > 1:
        dims[count - 1] = len(parts[-1].held.shape) - 1
    whole = [
        _of_all(part, dims[index], cut, coordinate) if index in dims else part
        for index, part in enumerate(parts)
    ]
    related = tuple([part for part in whole if part is not None])
    if len(related) < count or any(cut.axis in part.held.sharding.axes for part in related):
        return
    numbers = tuple([part.held.number for part in related])
    for form in forms(global_name(op), numbers):
        places = operands[count:]
        if form.op.value("scale") == op.value("scale") and _are_positions(
            form.op, places, related[first], coordinate * cut.stride, table
        ):
            yield KeyCut(form, related, cut, coordinate)


def _of_all(part: Relation, dim: int, cut: Placement, coordinate: int) -> Relation | None:
    """What a part of one block of a dim is a part of; None if it is of another."""
    sharding, at = part.held.sharding, dict(part.at).get(cut.axis)
    is_own = cut in sharding.dims[dim]
    if not stands_for(sharding.dims[dim], (cut,)) or (is_own and at != frozenset({coordinate})):
        return None
    held = replace(part.held, sharding=sharding.with_dim(dim, ()))
    return Relation(held, tuple([item for item in part.at if item[0] != cut.axis]))


def _are_positions(
    form: AtenOp, places: Sequence[Value], query: Relation, start: int, table: Expressions
) -> bool:
    """Whether the positions of queries are given, and of keys from a start, where they count."""
    if not form.value("is_causal"):
        return not places
    rows, columns = places
    if not isinstance(rows, Relation) or rows.held.layout is not None:
        return False
    whole = Relation(replace(rows.held, sharding=Sharding.replicated(1)))
    is_from_0 = first_of_range(whole, table) == RankNumber(())
    dims, times = query.held.sharding.dims, {axis for axis, _ in rows.at}
    return (
        is_from_0
        and rows.held.shape == query.held.shape[POSITIONS : POSITIONS + 1]
        and rows.held.sharding.dims == dims[POSITIONS : POSITIONS + 1]
        and rows.at == tuple([item for item in query.at if item[0] in times])
        and first_of_range(columns, table) == RankNumber((), start)
    )


def of_part(
    cut: KeyCut, wholes: Sequence[Value], op: AtenOp, terms: int
) -> tuple[Value, ...] | None:
    """The results of an attention on a block of keys. wholes: those of one on all keys; terms: the
    number of the split into terms, one for each block."""
    related = [whole for whole in wholes if isinstance(whole, Relation)]
    if first_of_attention(op):
        if related[0].held.sharding.unreduced:
            return None
        return tuple([_gradient(cut, part, index, terms) for index, part in enumerate(related)])
    shapes = [part.held.local_shape for part in related]
    if shapes != [shape_of(result) for result in op.results]:
        return None
    axis, of = (cut.placement.axis, cut.placement.size), frozenset({cut.coordinate})
    numbers = cut.form.results
    return tuple([AttentionPart(p, numbers, index, axis, of) for index, p in enumerate(related)])


def _gradient(cut: KeyCut, whole: Relation, index: int, terms: int) -> Relation:
    """A gradient on a block of keys: of the queries a term, of keys and values a block."""
    axis, sharding = cut.placement.axis, whole.held.sharding
    if index == 0:
        sharding = replace(sharding, unreduced=(axis,), reduction="sum")
    else:
        sharding, terms = sharding.with_dim(POSITIONS, (cut.placement,)), whole.held.terms
    at = tuple(sorted((*whole.at, (axis, frozenset({cut.coordinate})))))
    return Relation(replace(whole.held, sharding=sharding, terms=terms), at)


def merged_parts(op: AtenOp, operands: Sequence[Value]) -> Value | None:
    """What two parts give together, where an op merges outputs or log-sum-exps."""
    if op.name not in ("aten.lerp.Tensor", "aten.logaddexp"):
        return None
    old, new, *share = operands
    if not isinstance(old, AttentionPart) or not isinstance(new, AttentionPart):
        return None
    is_fitting = old.index == new.index == (0 if share else 1) and not old.of & new.of
    if not is_fitting or replace(old, of=new.of) != new:
        return None
    if share and not _is_share(share[0], old, new, shape_of(op.operands[2])):
        return None
    both = replace(old, of=old.of | new.of)
    return both.whole if len(both.of) == old.axis[1] else both


def _is_share(value: Value, old: AttentionPart, new: AttentionPart, shape: tuple[int, ...]) -> bool:
    """Whether a value, of some shape, is the sigmoid of how far one part's log-sum-exp is ahead."""
    rows, length = compared(value, SHARE)
    wanted = [replace(part, index=1, whole=old.whole) for part in (new, old)]
    found = [replace(p, whole=old.whole) for p in rows if isinstance(p, AttentionPart)]
    # The same rows of each sub-batch: a log-sum-exp has the output's dims but the last.
    held, rest = old.whole.held, old.whole.held.sharding.dims[:-1]
    is_of_rows = held.layout is None and all(
        p.whole.at == old.whole.at
        and p.whole.held.layout is None
        and p.whole.held.sharding.dims == rest
        for p in rows
        if isinstance(p, AttentionPart)
    )
    return is_of_rows and found == wanted and shape == (*length, 1)


def compared(value: Value, steps: Sequence[ShareStep]) -> tuple[tuple[Value, ...], tuple[int, ...]]:
    """The values that a share, or a step of one, compares, and their shape. steps: that
    gave it, the last first. Nothing if other ops did."""
    rows, length = (value,), ()
    for step in steps:
        (value, *_) = rows
        if not isinstance(value, Local) or value.name != step.name:
            return (), ()
        given = {key: to_python(attribute) for key, attribute in value.arguments}
        own = {key: argument for key, argument in given.items() if argument is not None}
        if {**step.arguments, **own} != step.arguments:
            return (), ()
        rows, length = value.operands, value.types[0][0]
    return rows, length
