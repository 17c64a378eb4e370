"""Python values as properties: stored, printed, and read back as the same value."""

from __future__ import annotations

import math
from io import StringIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xdsl.dialects import builtin
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError

from shardweave.ir.dialects.literals import (
    Literal,
    parse_literal,
    print_literal,
    to_attribute,
    to_python,
)
from shardweave.ir.program.text import make_context
from shardweave.ir.strings import TextParser

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
)
LITERALS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


def text_of(value: Literal) -> str:
    stream = StringIO()
    print_literal(Printer(stream=stream), to_attribute(value))
    return stream.getvalue()


def read(text: str) -> Literal:
    return to_python(parse_literal(TextParser(make_context(), text)))


def is_same(a: Literal, b: Literal) -> bool:
    """Equal in value and type, with nan equal to nan and 0.0 not to -0.0."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.copysign(1, a) == math.copysign(1, b) if a == b else a != a and b != b
    return type(a) is type(b) and a == b


@given(LITERALS)
def test_value_reads_back_from_its_text_and_its_attribute(value: Literal) -> None:
    assert is_same(to_python(to_attribute(value)), value)
    assert is_same(read(text_of(value)), value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (-3, "-3"),
        (1.0, "1.0"),
        (1e-05, "1.0e-05"),
        (1e300, "1.0e+300"),
        (1.5e-07, "1.5e-07"),
        (float("-inf"), "-inf"),
        (True, "true"),
        (None, "none"),
        ("tanh", '"tanh"'),
        (torch.bfloat16, "bf16"),
        (torch.bool, "i1"),
        ([0, 1], "[0, 1]"),
        ([[True], []], "[[true], []]"),
    ],
)
def test_text_reads_as_in_python_and_mlir(value: Literal, text: str) -> None:
    assert text_of(value) == text


def test_one_and_true_and_one_point_zero_stay_apart() -> None:
    assert len({to_attribute(1), to_attribute(1.0), to_attribute(True)}) == 3


def test_tuples_are_stored_as_lists() -> None:
    assert to_python(to_attribute((1, 2))) == [1, 2]


def test_other_values_cannot_be_stored() -> None:
    with pytest.raises(ValueError, match="is a device; an op holds numbers, text, dtypes, lists"):
        to_attribute(torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="has no torch dtype"):
        to_python(builtin.UnitAttr())


@pytest.mark.parametrize(
    "text", ["", "-", "-true", "[1,", "index", "tensor<4xf32>", "%x", "1 2"[:0]]
)
def test_text_that_is_no_literal_is_a_parse_error(text: str) -> None:
    with pytest.raises(ParseError):
        read(text)


def test_zeros_of_both_signs_are_two_values() -> None:
    for value in (0.0, -0.0, 0.0):
        found = to_python(to_attribute(value))
        assert isinstance(found, float)
        assert math.copysign(1, found) == math.copysign(1, value)
