"""The records of ops against what torch says about the same ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

import shardweave as sw
from shardweave.ir.dialects.aten import AtenOp, aten_class, overload_named
from shardweave.ir.ops import registry
from shardweave.ir.ops.registry import is_random, spec_named, spec_of, specs, weight_of
from shardweave.ir.sharding.rules import rule_of
from shardweave.ir.sharding.rules.lookup import rule_function
from shardweave.tests.ir_text import step


def rules() -> list[str]:
    return sorted(s.name for s in specs() if s.has_rule and s.name.startswith("aten."))


def shares_in_torch(name: str) -> bool:
    """Whether the schema of what runs says that a result is its first operand's memory."""
    schema = overload_named(spec_named(name).runs_as or name)._schema
    return any(given.alias_info is not None for given in schema.returns)


def test_views_are_the_ops_with_a_rule_that_torch_lets_share_memory() -> None:
    views = [name for name in rules() if spec_named(name).may_share]
    assert views == [name for name in rules() if shares_in_torch(name)]
    assert len(views) == 8


def test_random_ops_are_known_by_torch() -> None:
    names = ("aten.rand_like", "aten.native_dropout", "aten.relu")
    assert [is_random(aten_class(name).create()) for name in names] == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "result"), [("reshape", (6, 4)), ("permute", (6, 4)), ("expand", (5, 4, 6))]
)
def test_layout_has_all_elements_and_a_rearrangement_each_once(
    kind: str, result: tuple[int, ...]
) -> None:
    text = {
        "reshape": "aten.view(%x)",
        "permute": "aten.permute(%x, dims = [1, 0])",
        "expand": "aten.expand(%x)",
    }[kind]
    sizes = "x".join(map(str, result))
    (op,) = step(f"input %x : tensor<4x6xf32>\n%y = {text} : tensor<{sizes}xf32>\noutput %y").ops
    spec = spec_of(op)
    assert spec.view == kind
    assert spec.is_layout
    assert spec.is_rearrangement == (result != (5, 4, 6))


@pytest.mark.parametrize(
    ("name", "weight", "operands"),
    [("mm", 1, "%x, %w"), ("addmm", 2, "%b, %x, %w"), ("bmm", 1, "%p, %q")],
)
def test_product_says_where_its_factors_and_its_weight_are(
    name: str, weight: int | None, operands: str
) -> None:
    shape = "2x3x5" if name == "bmm" else "3x5"
    (op,) = step(
        f"""
        param %w : tensor<4x5xf32>
        param %b : tensor<5xf32>
        input %x : tensor<3x4xf32>
        input %p : tensor<2x3x4xf32>
        input %q : tensor<2x4x5xf32>
        %y = aten.{name}({operands}) : tensor<{shape}xf32>
        output %y
        """
    ).ops
    product = spec_of(op).product
    assert product is not None
    assert weight_of(op) == weight
    names = [op.operands[index].name_hint for index in product.factors]
    assert names == (["p", "q"] if name == "bmm" else ["x", "w"])
    assert (product.addend is None) == (name != "addmm")
    assert product.plain == ("aten.mm" if name == "addmm" else "")


MATRIX = "aten.matrix_exp"


@pytest.fixture
def records() -> Iterator[None]:
    """The records of ops, as they were, after the test."""
    with patch.dict(registry._RECORDS):
        yield


@pytest.mark.usefixtures("records")
def test_registered_record_shards_an_op_and_lets_unreduced_sums_pass() -> None:
    text = """
        input %x : tensor<2x4x4xf64>
        %y = aten.matrix_exp(%x) : tensor<2x4x4xf64>
        output %y
    """
    spec = sw.register_op(sw.OpSpec(MATRIX, notation="b . . -> b . .", linear=(0,)))
    (op,) = step(text).ops
    assert isinstance(op, AtenOp)
    assert spec_of(op) is spec
    rule = rule_of(op)
    assert [factor.size for factor in rule.factors] == [2]
    assert rule.linear == {0}


@pytest.mark.usefixtures("records")
def test_op_has_one_record_unless_it_is_replaced() -> None:
    first = sw.register_op(sw.OpSpec(MATRIX, notation="b . . -> b . ."))
    with pytest.raises(ValueError, match=r"aten\.matrix_exp has a record already"):
        sw.register_op(sw.OpSpec(MATRIX))
    assert sw.register_op(replace(first, zero="all"), replace=True).notation == first.notation
    assert spec_named(MATRIX).zero == "all"


def test_record_with_a_rule_that_does_not_exist_is_refused_where_it_is_used() -> None:
    with pytest.raises(ValueError, match="names the rule 'rows', which does not exist"):
        rule_function(sw.OpSpec(MATRIX, rule="rows"))
