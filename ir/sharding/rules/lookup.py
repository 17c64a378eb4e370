"""Finding the rule of an op."""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.dialects.aten import AtenOp, OpKey, key_of_op
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.ops.spec import OpSpec
from shardweave.ir.sharding.rules import (
    attention,
    convolution,
    factories,
    indexing,
    matmul,
    reductions,
    views,
    windows,
)
from shardweave.ir.sharding.rules.base import RULES, Notation, Rule, RuleFunction, replicated_rule

_FAMILIES = (
    attention, convolution, factories, indexing, matmul, reductions, views, windows,
)  # fmt: skip
"""Imported so that their functions are registered."""

_known: dict[tuple[OpSpec, OpKey], Rule] = {}
"""Rules computed so far. Keys include the record: registering a rule later takes effect."""


def rule_of(op: AtenOp) -> Rule:
    """The op's rule, cached by name, types and arguments; `replicated_rule` if it has none."""
    spec = spec_of(op)
    key = spec, key_of_op(op)
    rule = _known.get(key)
    if rule is None:
        rule = rule_function(spec)(op)
        problem = rule.problem(
            [shape_of(v) for v in op.operands], [shape_of(v) for v in op.results]
        )
        assert problem is None, f"rule of {op.name} is wrong: {problem}"
        _known[key] = rule
    return rule


def rule_function(spec: OpSpec) -> RuleFunction:
    """The rule function of a record. Raises ValueError if it names an unknown function."""
    if callable(spec.rule):
        return spec.rule
    if not spec.rule:
        return _by_notation if spec.notation else replicated_rule
    if spec.rule not in RULES:
        raise ValueError(
            f"the record of {spec.name} names the rule '{spec.rule}', which does not exist; pass "
            f"the function itself, or one of {', '.join(sorted(RULES))}."
        )
    return RULES[spec.rule]


def _by_notation(op: AtenOp) -> Rule:
    """Build the rule from the notation in the op's record."""
    spec = spec_of(op)
    return Notation(op, spec.notation).rule(linear=spec.linear_in(op))


def notes_on_rules(ops: Iterable[Operation]) -> list[str]:
    """Return a note, with the layers, for each kind of op that has operands but no rule."""
    layers: dict[str, dict[str, None]] = {}
    for op in ops:
        if isinstance(op, AtenOp) and op.operands and not spec_of(op).has_rule:
            layers.setdefault(op.name, {})[layer_of(op)] = None
    return [
        f"{name} (in {_layers_text([layer for layer in paths if layer])}) has no factor rule: "
        "results are exact, but every device computes it whole, on operands gathered for it; "
        "write it with other ops, or add a rule (docs/rules.md)"
        for name, paths in layers.items()
    ]


def _layers_text(layers: list[str]) -> str:
    """`the model`, `layer 'a'`, or `layer 'a' and 2 more`."""
    if not layers:
        return "the model"
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return f"layer '{layers[0]}'{more}"
