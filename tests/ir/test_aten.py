"""aten ops made from torch's schemas: arguments stored once, defaults and shapes left out."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects import test as xdsl_test
from xdsl.ir import SSAValue
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.dialects.aten import (
    aten_class,
    aten_dialect,
    create,
    op_name,
    overload_named,
    signature_of,
)
from shardweave.ir.dialects.types import tensor_type
from shardweave.ir.ops.aten_args import arguments
from shardweave.ir.ops.registry import spec_named, specs


def value(*shape: int, dtype: torch.dtype = torch.float32) -> SSAValue:
    return xdsl_test.TestOp(result_types=[tensor_type(shape, dtype)]).results[0]


def result(*shape: int, dtype: torch.dtype = torch.float32) -> list:  # type: ignore[type-arg]
    return [tensor_type(shape, dtype)]


@pytest.mark.parametrize(
    "name", ["aten.mm", "aten.add.Tensor", "aten._to_copy", "aten.sum.dim_IntList"]
)
def test_name_of_an_overload_and_overload_of_a_name_are_inverse(name: str) -> None:
    assert op_name(overload_named(name)) == name


def test_schema_says_which_arguments_are_tensors_and_which_have_defaults() -> None:
    signature = signature_of("aten.addmm")
    assert [p.name for p in signature.tensors] == ["self", "mat1", "mat2"]
    beta = signature.parameter("beta")
    assert beta is not None
    assert (beta.keyword_only, beta.has_default, beta.default) == (True, True, 1)
    assert signature.parameter("gamma") is None


def test_argument_at_its_default_is_not_stored() -> None:
    x = value(3)
    assert create(
        "aten.add.Scalar", [x], result(3), {"other": 2, "alpha": 1}
    ).properties.keys() == {"other"}
    op = create("aten.add.Scalar", [x], result(3), {"other": 2, "alpha": 3})
    assert (op.value("alpha"), op.value("other")) == (3, 2)
    assert create("aten.add.Scalar", [x], result(3), {"other": 2}).value("alpha") == 1


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^aten\.neg has no argument 'alpha'\.$"):
        create("aten.neg", [value(3)], result(3), {"alpha": 1})


def test_absent_and_listed_operands_keep_their_places() -> None:
    x, i = value(4, 4), value(2, dtype=torch.int64)
    op = create("aten.index.Tensor", [x, [None, i]], result(4, 2))
    assert op.tensor("self") is x
    assert op.tensor("indices") == [None, i]
    assert list(op.operands) == [x, i]
    norm = create("aten.native_layer_norm", [x, None, i], result(4, 4) * 3, {"eps": 1e-5})
    assert (norm.tensor("weight"), norm.tensor("bias")) == (None, i)
    with pytest.raises(KeyError, match="has no tensor argument 'mean'"):
        norm.tensor("mean")


def test_call_is_rebuilt_from_the_types() -> None:
    x = value(4, 6)
    view = create("aten.view", [x], result(8, 3))
    assert arguments(view, lambda v: "x") == (["x", [8, 3]], {})
    ones = create("aten.full", [], result(2, 5), {"fill_value": 1.0})
    assert arguments(ones, lambda v: v) == ([[2, 5], 1.0], {"dtype": torch.float32})
    part = create("aten.slice.Tensor", [x], result(4, 2), {"dim": 1, "start": 1, "step": 2})
    assert arguments(part, lambda v: "x")[0] == ["x", 1, 1, 4, 2]


def test_call_of_a_retyped_op_has_the_new_sizes() -> None:
    norm = create("aten.native_group_norm", [value(8, 6, 2, 2), None, None], result(8, 6, 2, 2) * 3,
                  {"group": 3, "eps": 1e-5})  # fmt: skip
    half = create("aten.native_group_norm", [value(4, 6, 2, 2), None, None], result(4, 6, 2, 2) * 3,
                  {"group": 3, "eps": 1e-5})  # fmt: skip
    assert norm.properties == half.properties
    assert arguments(norm, lambda v: "x")[0] == ["x", None, None, 8, 6, 4, 3, 1e-5]
    assert arguments(half, lambda v: "x")[0] == ["x", None, None, 4, 6, 4, 3, 1e-5]


@pytest.mark.parametrize("name", [spec.name for spec in specs() if spec.derived])
def test_derived_arguments_are_arguments_of_the_schema(name: str) -> None:
    signature = signature_of(name)
    for argument in spec_named(name).derived:
        parameter = signature.parameter(argument)
        assert parameter is not None
        assert not parameter.is_tensor


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            lambda: create("aten.mm", [value(3, 3)], result(3, 3)),
            "is missing its tensor argument 'mat2'",
        ),
        (lambda: create("aten.neg", [[value(3)]], result(3)), "expects one tensor for 'self'"),
        (lambda: create("aten.cat", [value(3)], result(3)), r"expects a list \[..\] for 'tensors'"),
        (lambda: create("aten.neg", [value(3)], []), "has no result; give its type after ':'"),
    ],
)
def test_op_against_its_schema_does_not_verify(op, message: str) -> None:  # noqa: ANN001
    with pytest.raises(VerifyException, match=message):
        op().verify()


def test_dialect_has_functional_overloads_only() -> None:
    names = {op.name for op in aten_dialect().operations}
    assert {"aten.mm", "aten.add.Tensor", "aten.native_layer_norm_backward"} <= names
    assert not names & {"aten.add_.Tensor", "aten.add.out", "aten.relu_"}
    assert aten_class("aten.mm") in set(aten_dialect().operations)
