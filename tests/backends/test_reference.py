"""The reference backend: programs for all ranks of a virtual mesh, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardweave.backends.reference.reference import ReplicaMismatchError, run_reference, values_of
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.program.program import Program
from shardweave.tests.backends.programs import MLPModel, mlp_program, one_op_program


def run_one_op(mesh: str, body: str, x: Tensor, given: str, wanted: str, type_: str) -> Tensor:
    """The global `%y` of a program that applies one op to `x`, sharded as `given`."""
    program = one_op_program(mesh, body, tuple(x.shape), given, wanted, type_)
    return run_reference(program, {("input", "x"): x})["output", "0"]


def test_captured_program_equals_eager() -> None:
    example = build_example(
        "gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=2", dtype=torch.float64
    )
    program = capture(example.module, kwargs=example.kwargs)
    results = run_reference(program, values_of(program, example.module, example.kwargs))
    loss = example.module(**example.kwargs)
    loss.backward()
    torch.testing.assert_close(results["output", "0"], loss.detach())
    for name, parameter in example.module.named_parameters():
        torch.testing.assert_close(results["grad", name], parameter.grad)


def test_partitioned_mlp_on_four_ranks_equals_eager() -> None:
    model, x = MLPModel(), torch.randn(6, 4, dtype=torch.float64)
    program = mlp_program()
    results = run_reference(program, values_of(program, model, {"x": x}))
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(results["output", "0"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results["grad", name], parameter.grad)


def test_given_tangent_scales_the_gradients() -> None:
    model, x = MLPModel(), torch.randn(6, 4, dtype=torch.float64)
    values = values_of(mlp_program(), model, {"x": x})
    one = run_reference(mlp_program(), values)
    half = torch.tensor(0.5, dtype=torch.float64)
    halved = run_reference(mlp_program(), {**values, ("tangent", "loss"): half})
    torch.testing.assert_close(halved["grad", "up.bias"], one["grad", "up.bias"] / 2)


@pytest.mark.parametrize("given", ['[{"a"}, {}]', '[{"a":2}, {}]', '[{"a", "b"}, {}]'])
def test_shards_of_any_stride_come_back_as_the_global_tensor(given: str) -> None:
    x = torch.arange(24.0, dtype=torch.float64).reshape(12, 2)
    local = {'[{"a"}, {}]': 6, '[{"a":2}, {}]': 6, '[{"a", "b"}, {}]': 2}[given]
    type_ = f"tensor<{local}x2xf64>"
    y = run_one_op("a=2,b=3", f"aten.neg(%x) : {type_}", x, given, given, type_)
    torch.testing.assert_close(y, -x)


def test_all_gather_puts_blocks_dealt_round_robin_in_order() -> None:
    x = torch.arange(12.0, dtype=torch.float64)
    op = 'dist.all_gather(%x, axes = ["a"], dim = 0, block = 2) : tensor<12xf64>'
    y = run_one_op("a=2,b=3", op, x, '[{"a":2}]', "[{}]", "tensor<12xf64>")
    torch.testing.assert_close(y, x)


def test_all_gather_over_two_axes_takes_the_first_as_major() -> None:
    x = torch.arange(12.0, dtype=torch.float64)
    op = 'dist.all_gather(%x, axes = ["b", "a"], dim = 0, block = 2) : tensor<12xf64>'
    y = run_one_op("a=2,b=3", op, x, '[{"b", "a"}]', "[{}]", "tensor<12xf64>")
    torch.testing.assert_close(y, x)


def test_reduce_scatter_leaves_strided_shards_of_the_sum() -> None:
    x = torch.randn(12, dtype=torch.float64)
    op = 'dist.reduce_scatter(%x, axes = ["a"], dim = 0, block = 3) : tensor<6xf64>'
    y = run_one_op("a=2,b=3", op, x, "[{}]", '[{"a":3}]', "tensor<6xf64>")
    torch.testing.assert_close(y, 2 * x)


def test_slice_keeps_the_blocks_of_each_rank() -> None:
    x = torch.randn(12, dtype=torch.float64)
    op = 'dist.slice(%x, axes = ["a"], dim = 0, block = 3) : tensor<6xf64>'
    y = run_one_op("a=2,b=3", op, x, "[{}]", '[{"a":3}]', "tensor<6xf64>")
    torch.testing.assert_close(y, x)


def test_all_to_all_moves_a_shard_to_another_dim() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    op = (
        'dist.all_to_all(%x, axes = ["a"], dim = 1, block = 3, from_dim = 0, from_block = 2)'
        " : tensor<4x3xf64>"
    )
    y = run_one_op("a=2", op, x, '[{"a"}, {}]', '[{}, {"a"}]', "tensor<4x3xf64>")
    torch.testing.assert_close(y, x)


def test_max_reduction_and_unreduced_results_are_told_apart() -> None:
    x = torch.randn(4, dtype=torch.float64)
    op = 'dist.all_reduce(%x, axes = ["a"], op = "max") : tensor<2xf64>'
    y = run_one_op("a=2", op, x, '[{"a"}]', "[{}]", "tensor<2xf64>")
    torch.testing.assert_close(y, torch.maximum(x[:2], x[2:]))
    negated = "aten.neg(%x) : tensor<4xf64>"
    y = run_one_op("a=2", negated, x, "[{}]", '[{}], unreduced = ["a"]', "tensor<4xf64>")
    torch.testing.assert_close(y, -2 * x)
    y = run_one_op("a=2", negated, x, "[{}]", '[{}], max_unreduced = ["a"]', "tensor<4xf64>")
    torch.testing.assert_close(y, -x)


def test_shard_index_counts_positions_first_axis_slowest() -> None:
    program = one_op_program(
        "a=2,b=3", 'dist.shard_index(axes = ["b", "a"]) : tensor<i64>', (1,), "[{}]",
        '[], unreduced = ["a"]', "tensor<i64>",
    )  # fmt: skip
    values = {("input", "x"): torch.zeros(1, dtype=torch.float64)}
    with pytest.raises(ReplicaMismatchError, match="'0': ranks 0 and 1"):
        run_reference(program, values)
    summed = str(program).replace('unreduced = ["a"]', 'unreduced = ["a", "b"]')
    assert run_reference(Program.parse(summed), values)["output", "0"] == sum(range(6))


def test_missing_all_reduce_is_reported_with_the_result_and_ranks() -> None:
    text = str(mlp_program()).replace(
        'dist.all_reduce(%dw_part, %db_part, %dv_part, axes = ["data"])',
        'dist.all_reduce(%dw_part, %db_part, %dv_part, axes = ["tensor"])',
    )
    model, x = MLPModel(), torch.randn(6, 4, dtype=torch.float64)
    program = Program.parse(text)
    with pytest.raises(ReplicaMismatchError, match=r"grad 'up.weight': ranks 0 and 2.*collective"):
        run_reference(program, values_of(program, model, {"x": x}))


def test_replicas_that_are_nan_together_agree() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), 2.0], dtype=torch.float64)
    y = run_one_op("a=2", "aten.neg(%x) : tensor<4xf64>", x, "[{}]", "[{}]", "tensor<4xf64>")
    torch.testing.assert_close(y, -x, equal_nan=True)


def test_missing_and_misshapen_tensors_are_named() -> None:
    model, x = MLPModel(), torch.randn(6, 4, dtype=torch.float64)
    values = values_of(mlp_program(), model, {"x": x})
    with pytest.raises(ValueError, match=r"no tensor was given for param 'up.bias'.*\(8,\)"):
        run_reference(mlp_program(), {k: v for k, v in values.items() if k[1] != "up.bias"})
    with pytest.raises(ValueError, match=r"input 'x' has shape \(3, 4\).*expected.*\(6, 4\)"):
        run_reference(mlp_program(), {**values, ("input", "x"): x[:3]})
    with pytest.raises(ValueError, match="float32, expected"):
        run_reference(mlp_program(), {**values, ("input", "x"): x.float()})
    with pytest.raises(ValueError, match="reads input 'x', which was not given"):
        values_of(mlp_program(), model, {"y": x})


def test_op_whose_type_is_not_what_torch_computes_is_named() -> None:
    op = "aten.neg(%x) : tensor<3xf64>"
    with pytest.raises(ValueError, match=r"aten.neg computed .* shape \(4,\).*type says \(3,\)"):
        run_one_op("a=2", op, torch.zeros(4).double(), "[{}]", "[{}]", "tensor<3xf64>")


def test_sixty_four_ranks_share_what_they_hold_in_common() -> None:
    x = torch.randn(8, 2, dtype=torch.float64)
    op = 'dist.all_gather(%x, axes = ["a"], dim = 0, block = 1) : tensor<8x2xf64>'
    y = run_one_op("a=8,b=8", op, x, '[{"a"}, {}]', "[{}, {}]", "tensor<8x2xf64>")
    torch.testing.assert_close(y, x)
