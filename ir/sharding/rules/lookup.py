"""Finding the rule of an op."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

from shardweave.ir.annotations import layer_of
from shardweave.ir.aten import AtenOp, OpKey, key_of_op
from shardweave.ir.sharding.rules.base import RULES, Rule, RuleFunction, replicated_rule
from shardweave.ir.types import shape_of

logger = logging.getLogger(__name__)

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

_warned: set[str] = set()


def has_rule(name: str) -> bool:
    _load_families()
    return name in RULES


def rule_of(op: AtenOp) -> Rule:
    """The op's rule, computed once per distinct name, types and arguments.

    An op without a rule is replicated, with one warning that names it.
    """
    _load_families()
    function = RULES.get(op.name)
    if function is None:
        _warn(op)
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


def _warn(op: AtenOp) -> None:
    if op.name not in _warned:
        _warned.add(op.name)
        logger.warning(
            "%s (in %s) has no factor rule: results are exact, but every device computes it "
            "whole, on operands gathered for it. Write it with other ops, or add a rule "
            "(docs/rules.md).",
            op.name,
            f"layer '{layer_of(op)}'" if layer_of(op) else "the model",
        )
