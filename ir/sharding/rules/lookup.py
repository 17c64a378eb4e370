"""Finding the rule of an op."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.dialects.aten import AtenOp, OpKey, key_of_op
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.sharding.rules.base import RULES, Rule, RuleFunction, replicated_rule

FAMILIES = (
    "attention",
    "convolution",
    "factories",
    "indexing",
    "matmul",
    "normalization",
    "pointwise",
    "reductions",
    "views",
)


@cache
def _load_families() -> None:
    for family in FAMILIES:
        import_module(f"shardweave.ir.sharding.rules.{family}")


_known: dict[tuple[RuleFunction, OpKey], Rule] = {}
"""By function too, so that a rule registered later takes the place of replication."""


def has_rule(name: str) -> bool:
    """Whether ops of a name have a rule; others are replicated."""
    _load_families()
    return name in RULES


def rule_of(op: AtenOp) -> Rule:
    """The op's rule, computed once per distinct name, types and arguments.

    An op without a rule is replicated; `notes_on_rules` says which those of a program are.
    """
    _load_families()
    function = RULES.get(op.name)
    if function is None:
        function = replicated_rule
    key = function, key_of_op(op)
    found = _known.get(key)
    if found is None:
        found = function(op)
        problem = found.problem(
            [shape_of(v) for v in op.operands], [shape_of(v) for v in op.results]
        )
        assert problem is None, f"rule of {op.name} is wrong: {problem}"
        _known[key] = found
    return found


def notes_on_rules(ops: Iterable[Operation]) -> list[str]:
    """A note for each kind of op that has no rule, with the layers that have it."""
    _load_families()
    layers: dict[str, dict[str, None]] = {}
    for op in ops:
        if isinstance(op, AtenOp) and op.name not in RULES:
            layers.setdefault(op.name, {})[layer_of(op)] = None
    return [
        f"{name} (in {_layers_text([layer for layer in found if layer])}) has no factor rule: "
        "results are exact, but every device computes it whole, on operands gathered for it; "
        "write it with other ops, or add a rule (docs/rules.md)"
        for name, found in layers.items()
    ]


def _layers_text(layers: list[str]) -> str:
    """`the model`, `layer 'a'`, or `layer 'a' and 2 more`."""
    if not layers:
        return "the model"
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return f"layer '{layers[0]}'{more}"
