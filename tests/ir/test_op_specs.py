"""The records of ops against what torch says about the same ops."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.aten import aten_class, overload_named
from shardweave.ir.ops.registry import is_random, spec_named, spec_of, specs, weight_of
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
    assert len(views) == 7


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
