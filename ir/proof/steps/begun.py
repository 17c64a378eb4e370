"""Steps of a longer computation that may be right as far as they go, though they relate to nothing.

They count for messages alone: what is wrong then stands behind them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import dropwhile

from xdsl.ir import Attribute

from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.proof.model.local_forms import FormsOf
from shardweave.ir.proof.relations.held import AttentionPart, Local, Relation, Value
from shardweave.ir.proof.steps.attention import SHARE, compared


def is_begun(value: Value, forms: FormsOf) -> bool:
    """Whether a value may be such a step. forms: the ops of the global program."""
    return compared_parts(value) is not None or is_of_sum(value, forms)


def compared_parts(value: Value) -> tuple[AttentionPart, AttentionPart] | None:
    """The log-sum-exps of which a value is a step towards the share of the first, if they may have
    one: of blocks behind those of the other."""
    if not isinstance(value, Local):
        return None
    steps = list(dropwhile(lambda step: step.name != value.name, SHARE))
    rows, _ = compared(value, steps)
    new, old = rows if len(rows) == 2 else (None, None)
    if not isinstance(new, AttentionPart) or not isinstance(old, AttentionPart):
        return None
    is_fitting = new.index == 1 and replace(new, of=old.of) == old
    return (new, old) if is_fitting and max(old.of) < min(new.of) else None


def is_of_sum(value: Value, forms: FormsOf) -> bool:
    """Whether a value may be a step of a sum of exponentials by a shard's own maximum. forms: the
    ops of the global program."""
    match value:
        case Local("aten.sub.Tensor", given, (Relation() as first, Relation() as second)):
            is_near = second.held.number in _maxima(first, forms)
            own = second if is_near else first
            is_away = first.held.number == second.held.number and not second.held.sharding.unreduced
            return not given and (is_near or is_away) and own.held.sharding.reduction == "max"
        case Local("aten.exp", _, (Local("aten.sub.Tensor") as distance,)):
            return is_of_sum(distance, forms)
        case Local("aten.sum.dim_IntList", along, (Local("aten.exp") as power,)):
            alike = [x for x in power.leaves if along in _maxima(x, forms).values()]
            return bool(alike) and is_of_sum(power, forms)
        case Local("aten.eq.Scalar", given, (Relation() as own,)):
            is_lowest = dict(given) == {"other": to_attribute(-math.inf)}
            return is_lowest and own.held.sharding.reduction == "max"
        case Local("aten.masked_fill.Scalar", given, (Local() as total, Local() as mask)):
            is_one = dict(given) == {"value": to_attribute(1.0)}
            return is_one and is_of_sum(total, forms) and is_of_sum(mask, forms)
        case _:
            return False


def _maxima(x: Relation, forms: FormsOf) -> dict[int, frozenset[tuple[str, Attribute]]]:
    """The maxima of a value in the global program, and along which dims each is."""
    found = forms("aten.amax", (x.held.number,))
    return {form.results[0]: form.arguments for form in found}
