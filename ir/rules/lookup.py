"""Finding the rule of an op."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

from xdsl.ir import Attribute

from shardweave.ir.aten import AtenOp
from shardweave.ir.rules.base import RULES, Rule, RuleFunction, replicated_rule
from shardweave.ir.syntax import ANNOTATIONS
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
        import_module(f"shardweave.ir.rules.{family}")


Signature = tuple[str, tuple[Attribute, ...], tuple[Attribute, ...], tuple[object, ...]]
_known: dict[tuple[RuleFunction, Signature], Rule] = {}
"""By function too, so that a rule registered later takes the place of replication."""

_warned: set[str] = set()


def signature_of_op(op: AtenOp) -> Signature:
    """Equal for ops whose rules (and types) are equal, whatever their layer."""
    values = tuple(item for item in op.properties.items() if item[0] not in ANNOTATIONS)
    operand_types = tuple(operand.type for operand in op.operands)
    return op.name, operand_types, tuple(r.type for r in op.results), values


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
        _warn(op.name)
        function = replicated_rule
    key = function, signature_of_op(op)
    found = _known.get(key)
    if found is None:
        found = function(op)
        problem = found.problem(
            [shape_of(v) for v in op.operands], [shape_of(v) for v in op.results]
        )
        assert problem is None, f"rule of {op.name} is wrong: {problem}"
        _known[key] = found
    return found


def _warn(name: str) -> None:
    if name not in _warned:
        _warned.add(name)
        logger.warning(
            "%s has no factor rule: it runs replicated on every device. "
            "Add a rule in ir/rules (docs/rules.md).",
            name,
        )
