"""Rules of matrix products."""

from collections.abc import Callable

import pytest

from shardweave.ir.sharding.rules import Rule


def test_contracted_dims_reduce(einsum: Callable[..., str], make_rule: Callable[..., Rule]) -> None:
    assert einsum("aten.mm", [(4, 6), (6, 8)], [(4, 8)]) == "a b, b c -> a c"
    assert einsum("aten.bmm", [(2, 4, 6), (2, 6, 8)], [(2, 4, 8)]) == "a b c, a c d -> a b d"
    assert einsum("aten.mv", [(4, 6), (6,)], [(4,)]) == "a b, b -> a"
    assert einsum("aten.dot", [(6,), (6,)], [()]) == "a, a -> "
    assert make_rule("aten.mm", [(4, 6), (6, 8)], [(4, 8)]).factors[1].reduction == "sum"


@pytest.mark.parametrize(
    ("bias", "dims"), [((8,), "a"), ((4, 8), "a b"), ((1, 8), ". a"), ((4, 1), "a ."), ((), "")]
)
def test_added_operand_is_broadcast_and_forbids_to_cut_the_contracted_dim(
    einsum: Callable[..., str],
    make_rule: Callable[..., Rule],
    bias: tuple[int, ...],
    dims: str,
) -> None:
    args = "aten.addmm", [bias, (4, 6), (6, 8)], [(4, 8)]
    assert einsum(*args).split(",")[0] == dims
    (contracted,) = (f for f in make_rule(*args).factors if f.size == 6)
    assert contracted.reduction is None


def test_batched_product_with_an_added_operand(einsum: Callable[..., str]) -> None:
    text = einsum("aten.baddbmm", [(1, 4, 8), (2, 4, 6), (2, 6, 8)], [(2, 4, 8)])
    assert text == ". a b, c a d, c d b -> c a b"
