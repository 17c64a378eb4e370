"""What a proof knows of values: sums are flat, and only padding has a fill."""

from __future__ import annotations

from xdsl.dialects import test

from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.proof.model.expressions import Expressions
from shardweave.ir.proof.relations.held import Fill, Held

MAKER = test.TestOp.create()


def test_sum_of_a_sum_has_the_products_of_both_coefficients() -> None:
    expressions = Expressions()
    first, second = expressions.number("x", [(2,), (2,)], "test")
    inner = expressions.sum_of([(first, 2.0), (second, 1.0)], (2,), MAKER)
    outer = expressions.sum_of([(inner, 3.0), (second, 1.0)], (2,), MAKER)
    assert outer == expressions.sum_of([(first, 6.0), (second, 4.0)], (2,), MAKER)


def test_fill_is_kept_for_padded_dims_alone() -> None:
    mesh = Mesh(tensor=2)
    sharding = ShardingAttr.parse_text('[{"tensor"}, {}]').on((4, 3), mesh)
    assert Held(0, (4, 3), sharding).filled(Fill(0, frozenset({0, 1}))).fill is None
    uneven = ShardingAttr.parse_text('[{"tensor"}, {}]').on((5, 3), mesh)
    assert Held(0, (5, 3), uneven).filled(Fill(0, frozenset({0, 1}))).fill == Fill(
        0, frozenset({0})
    )
