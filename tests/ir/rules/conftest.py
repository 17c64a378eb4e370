"""What the tests of the rules share: making an op from shapes, and writing its rule as text."""

from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from xdsl.ir import Block

from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.types import tensor_type
from shardweave.ir.sharding.rules import Rule, rule_of
from shardweave.ir.sharding.rules.base import Dims


def _type(given: Any) -> Any:
    is_typed = bool(given) and isinstance(given[-1], torch.dtype)
    shape, dtype = given if is_typed else (given, torch.float32)
    return tensor_type(shape, dtype)


@pytest.fixture
def make_op() -> Callable[..., AtenOp]:
    """An op from its operands and results: a shape, or a (shape, dtype), for each; None, lists."""

    def make(name: str, operands: Sequence[Any], results: Sequence[Any], **values: Any) -> AtenOp:
        block = Block()

        def argument(given: Any) -> Any:
            if isinstance(given, list):
                return [argument(item) for item in given]
            return None if given is None else block.insert_arg(_type(given), len(block.args))

        op = create(name, [argument(v) for v in operands], [_type(r) for r in results], values)
        op.verify_()
        return op

    return make


@pytest.fixture
def make_rule(make_op: Callable[..., AtenOp]) -> Callable[..., Rule]:
    """The rule of the op that `make_op` makes of the same arguments."""
    return lambda *args, **values: rule_of(make_op(*args, **values))


def text_of(rule: Rule) -> str:
    """A rule as an einsum whose letters are its factors in order: `a b, b c -> a c`."""
    operands, results = (", ".join(map(_text_of_dims, v)) for v in (rule.operands, rule.results))
    return f"{operands} -> {results}"


def _text_of_dims(dims: Dims) -> str:
    names = ["".join(ascii_lowercase[factor] for factor in factors) for factors in dims]
    return " ".join(f"({' '.join(name)})" if len(name) > 1 else name or "." for name in names)


@pytest.fixture
def einsum(make_rule: Callable[..., Rule]) -> Callable[..., str]:
    """The text of the rule of the op that `make_op` makes of the same arguments."""
    return lambda *args, **values: text_of(make_rule(*args, **values))
