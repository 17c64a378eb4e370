"""Index sums equal the numbers that they stand for."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shardweave.backends.triton.source.index import (
    Base,
    Index,
    of_base,
    quotient_and_remainder,
    raveled,
    unraveled,
)


def evaluate(index: Index, values: dict[str, int]) -> int:
    """The number that an index is when its variables have these values."""
    return int(eval(index.text(), {}, values))


class Names:
    """Names indices, and remembers what they stand for."""

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values

    def __call__(self, index: Index) -> Base:
        name = f"t{len(self.values)}"
        self.values[name] = evaluate(index, self.values)
        return Base(name, index.highest + 1, index.axes)


FACTORS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def merged(factors: list[int], cuts: list[bool]) -> list[int]:
    """A shape of the same size, with neighbouring dims joined where `cuts` says."""
    shape = [factors[0]]
    for factor, cut in zip(factors[1:], cuts, strict=False):
        if cut:
            shape.append(factor)
        else:
            shape[-1] *= factor
    return shape


@given(FACTORS, st.lists(st.booleans(), min_size=4, max_size=4), st.data())
def test_a_chain_of_views_leads_back_to_the_variable(
    factors: list[int], cuts: list[bool], data: st.DataObject
) -> None:
    size = math.prod(factors)
    base = of_base(Base("x", size, frozenset({"x"})))
    values = {"x": data.draw(st.integers(0, size - 1))}
    namer = Names(values)
    through = unraveled(base, factors, namer)
    other = unraveled(raveled(through, factors), merged(factors, cuts), namer)
    assert raveled(other, merged(factors, cuts)) == base


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 5),
    st.data(),
)
def test_any_division_is_exact(
    shape: list[int], other: list[int], offset: int, data: st.DataObject
) -> None:
    size = math.prod(shape)
    values = {"x": data.draw(st.integers(0, size - 1))}
    namer = Names(values)
    flat = of_base(Base("x", size, frozenset({"x"}))) + Index(constant=offset)
    number = values["x"] + offset
    quotient, remainder = quotient_and_remainder(flat, 7, namer)
    assert (evaluate(quotient, values), evaluate(remainder, values)) == divmod(number, 7)
    for index, size_ in zip(
        reversed(unraveled(flat, [size, *other], namer)), [*reversed(other)], strict=False
    ):
        assert evaluate(index, values) == number % size_ or size_ == 1
        number //= size_


def test_transposed_view_reads_in_strides() -> None:
    x = of_base(Base("x", 12, frozenset({"x"})))
    row, col = unraveled(x, (3, 4), Names({}))
    assert (row.text(), col.text()) == ("(x // 4)", "(x % 4)")
    assert raveled((col, row), (4, 3)).text() == "(x % 4) * 3 + (x // 4)"


def test_sizes_that_are_arguments_are_named() -> None:
    row = of_base(Base("row", 8, frozenset({"row"})))
    assert (row * 1000).text([(1000, "n_cols")]) == "row * n_cols"
    assert (row * 3000).text([(1000, "n_cols")]) == "row * n_cols * 3"
