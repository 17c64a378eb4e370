"""How ops are called: torch's own functions are the overloads that programs name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardweave.backends.emit.calls import TRANSPOSE
from shardweave.ir.dialects.aten import overload_named
from shardweave.ir.ops.registry import spec_named, specs

X, Y, W = (torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
COLUMN = torch.tensor([[0], [1], [3], [2]])
BATCHES = X.view(1, 4, 4)
LINE = torch.ones(4)

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "aten.mm": (X, Y),
    "aten.bmm": (BATCHES, BATCHES),
    "aten.addmm": (W, X, Y),
    "aten.baddbmm": (BATCHES, BATCHES, BATCHES),
    "aten.permute": (X, [1, 0]),
    "aten.sum.dim_IntList": (X, [0], True),
    "aten.amax": (X, [1], False),
    "aten.where.self": (X > 0, X, Y),
    "aten.gather": (X, 1, COLUMN),
    "aten.scatter_add": (X, 1, COLUMN, Y),
    "aten.cat": ([X, Y], 1),
    "aten.stack": ([X, Y], 1),
    "aten.select.int": (X, 1, 2),
    "aten.native_layer_norm": (X, [4], LINE, LINE, 1e-5),
    "aten.native_group_norm": (X, LINE, LINE, 4, 4, 1, 2, 1e-5),
    "aten.embedding": (X, COLUMN, -1, False, False),
    "aten._softmax": (X, 1, False),
    "aten._log_softmax": (X, 1, False),
    "aten.pow.Tensor_Scalar": (X, 3.0),
    "aten.logsumexp": (X, [1], True),
    "aten.view": (X, [2, 8]),
}
TWO = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")


class Seen(TorchDispatchMode):
    """The overloads that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def run(function: Any, arguments: tuple[Any, ...]) -> tuple[list[str], Any]:
    with Seen() as seen:
        found = function(*arguments)
    return seen.names, found


@pytest.mark.parametrize("name", [spec.name for spec in specs() if spec.is_direct])
def test_function_of_torch_calls_the_overload_of_the_op(name: str) -> None:
    arguments = ARGUMENTS.get(name, (X, Y) if name in TWO else (X,))
    spec = spec_named(name)
    by_overload = run(overload_named(spec.runs_as or name), arguments)
    direct = run(getattr(torch, spec.torch_function.removeprefix("torch.")), arguments)
    assert direct[0] == by_overload[0]
    torch.testing.assert_close(direct[1], by_overload[1], rtol=0, atol=0, equal_nan=True)


def test_a_matrix_is_transposed_as_by_the_overload() -> None:
    by_overload = run(torch.ops.aten.permute.default, (X, [1, 0]))[1]
    direct = run(getattr(torch, TRANSPOSE.removeprefix("torch.")), (X,))[1]
    assert direct.stride() == by_overload.stride()
    assert torch.equal(direct, by_overload)
