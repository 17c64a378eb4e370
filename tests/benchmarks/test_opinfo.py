"""The tables of OpInfo's ops and of Hugging Face's types are those of their results."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from shardweave.benchmarks import opinfo
from shardweave.benchmarks.opinfo_measure import Measured
from shardweave.benchmarks.opinfo_models import Builder, Op

ROOT = Path(opinfo.__file__).resolve().parents[1]


def test_page_of_ops_has_the_table_of_its_results() -> None:
    result = json.loads(opinfo.RESULTS.read_text())
    assert opinfo.page(result) in (ROOT / "docs" / "ops.md").read_text()
    assert result["ops"]["wrong"] == result["ops"]["crash"] == 0


class _Sample:
    """A sample as OpInfo has them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.input, *self.args = (tensor.requires_grad_() for tensor in tensors)
        self.kwargs: dict[str, object] = {}

    @staticmethod
    def output_process_fn_grad(output: object) -> object:
        return output


def test_op_that_differs_from_eager_is_wrong() -> None:
    builder = Builder(grad=True)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    builder.add(Op(torch.mul), _Sample(x, y))
    measured = Measured("mul", Op(torch.mul), grad=True)
    assert measured.problems_of(builder, 0) == []
    # A model that eager computes otherwise: what its first call counts.
    calls: list[int] = []

    def counted(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return first * second * len(calls)

    builder = Builder(grad=True)
    builder.add(Op(counted), _Sample(x, y))
    assert [p.result for p in measured.problems_of(builder, 0)] != []
