"""The runtime on real processes, against the virtual mesh."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardweave.backends.distributed import in_flight
from shardweave.backends.distributed.in_flight import all_reduce_in_place
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.reference.reference import run_reference
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.program.program import Program
from shardweave.tests.backends.programs import one_op_program
from shardweave.tests.compiled import OfX, step_of_copy
from shardweave.tests.spawn import RankError, run_ranks

MESH = "a=2,b=2"

# Per case: op, given sharding, wanted sharding, local shape of the result.
CASES = {
    "all_reduce": (
        'dist.all_reduce(%x, axes = ["a"])',
        '[{}, {}], unreduced = ["a"]',
        "[{}, {}]",
        "8x12",
    ),
    "all_reduce over two axes": (
        'dist.all_reduce(%x, axes = ["b", "a"])',
        '[{}, {}], unreduced = ["a", "b"]',
        "[{}, {}]",
        "8x12",
    ),
    "maximum": ('dist.all_reduce(%x, axes = ["a"], op = "max")', '[{"a"}, {}]', "[{}, {}]", "4x12"),
    "all_gather of rows": (
        'dist.all_gather(%x, axes = ["a"], dim = 0, block = 4)',
        '[{"a"}, {}]',
        "[{}, {}]",
        "8x12",
    ),
    "all_gather of strided columns": (
        'dist.all_gather(%x, axes = ["b"], dim = 1, block = 2)',
        '[{}, {"b":2}]',
        "[{}, {}]",
        "8x12",
    ),
    "all_gather over both axes": (
        'dist.all_gather(%x, axes = ["a", "b"], dim = 0, block = 2)',
        '[{"a", "b"}, {}]',
        "[{}, {}]",
        "8x12",
    ),
    "all_gather over axes against mesh order": (
        'dist.all_gather(%x, axes = ["b", "a"], dim = 0, block = 2)',
        '[{"b", "a"}, {}]',
        "[{}, {}]",
        "8x12",
    ),
    "reduce_scatter of rows": (
        'dist.reduce_scatter(%x, axes = ["a"], dim = 0, block = 4)',
        '[{}, {}], unreduced = ["a"]',
        '[{"a"}, {}]',
        "4x12",
    ),
    "reduce_scatter into strided columns": (
        'dist.reduce_scatter(%x, axes = ["b"], dim = 1, block = 2)',
        '[{}, {}], unreduced = ["b"]',
        '[{}, {"b":2}]',
        "8x6",
    ),
    "reduce_scatter over axes against mesh order": (
        'dist.reduce_scatter(%x, axes = ["b", "a"], dim = 0, block = 2)',
        '[{}, {}], unreduced = ["a", "b"]',
        '[{"b", "a"}, {}]',
        "2x12",
    ),
    "all_to_all": (
        'dist.all_to_all(%x, axes = ["a"], dim = 1, block = 6, from_dim = 0, from_block = 4)',
        '[{"a"}, {}]',
        '[{}, {"a"}]',
        "8x6",
    ),
    "all_to_all between strided shards": (
        'dist.all_to_all(%x, axes = ["b"], dim = 0, block = 1, from_dim = 1, from_block = 2)',
        '[{}, {"b":2}]',
        '[{"b":1}, {}]',
        "4x12",
    ),
    "all_to_all over axes against mesh order": (
        'dist.all_to_all(%x, axes = ["b", "a"], dim = 1, block = 3, from_dim = 0, from_block = 2)',
        '[{"b", "a"}, {}]',
        '[{}, {"b", "a"}]',
        "8x3",
    ),
    "slice": (
        'dist.slice(%x, axes = ["b"], dim = 1, block = 2)',
        "[{}, {}]",
        '[{}, {"b":2}]',
        "8x6",
    ),
}


def program_of(case: str) -> Program:
    op, given, wanted, local = CASES[case]
    type_ = f"tensor<{local}xf64>"
    return one_op_program(MESH, f"{op} : {type_}", (8, 12), given, wanted, type_)


def run_cases(x: Tensor) -> dict[str, Tensor]:
    """Every case on one rank; a strided operand, which collectives must not read as dense."""
    strided = x.T.contiguous().T
    steps = {case: step_of_copy(program_of(case), OfX()) for case in CASES}
    return {case: step(x=strided).full_tensor() for case, step in steps.items()}


def test_collectives_equal_those_of_the_virtual_mesh() -> None:
    x = torch.arange(96.0, dtype=torch.float64).reshape(8, 12)
    by_rank = run_ranks(run_cases, 4, x)
    for case in CASES:
        wanted = run_reference(program_of(case), {("input", "x"): x})["output", "0"]
        for found in by_rank:
            torch.testing.assert_close(found[case], wanted, msg=lambda m, c=case: f"{c}: {m}")


def reduce_every_dtype() -> dict[torch.dtype, list[Tensor]]:
    """Collectives of two ranks on 0, 1 and 1, 1; then the operand, which stays as it was."""
    runtime = Runtime(Mesh(**{"tensor.0": 2}))
    axes = ("tensor.0",)
    found: dict[torch.dtype, list[Tensor]] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool):
        x = torch.tensor([dist.get_rank(), 1]).to(dtype)
        view = torch.stack([x, x], dim=1)[:, 0]
        found[dtype] = [
            runtime.all_reduce(view, axes),
            runtime.all_reduce(view, axes, "max"),
            runtime.all_reduce_coalesced([view, x[:1], x.sum()], axes)[0],
            runtime.all_gather(view, axes, 0, 1),
            runtime.reduce_scatter(view, axes, 0, 1),
            view,
        ]
    mixed = [torch.ones(2), torch.ones((), dtype=torch.int64), torch.full((1, 2), 2.0)]
    found[torch.float64] = runtime.all_reduce_coalesced(mixed, axes)
    return found


def test_collectives_work_in_every_dtype_and_keep_their_operand() -> None:
    zero, one = run_ranks(reduce_every_dtype, 2)
    mixed = [tensor.tolist() for tensor in zero.pop(torch.float64)]
    assert mixed == [[2.0, 2.0], 2, [[4.0, 4.0]]]
    for dtype, (total, largest, coalesced, gathered, scattered, kept) in zero.items():
        assert total.dtype == dtype
        two = 1 if dtype == torch.bool else 2
        assert total.tolist() == coalesced.tolist() == [1, two]
        assert largest.tolist() == [1, 1]
        assert gathered.tolist() == [0, 1, 1, 1]
        assert (scattered.tolist(), one[dtype][4].tolist()) == ([1], [two])
        assert (kept.tolist(), one[dtype][5].tolist()) == ([0, 1], [1, 1])


def scatter_and_reduce() -> tuple[Tensor, Tensor, Tensor, bool]:
    """This rank's third of a sum over three, along either dim, and a sum where its term was."""
    runtime = Runtime(Mesh(data=3))
    x = torch.arange(36.0).view(6, 6) * (runtime.rank + 1)
    rows = runtime.reduce_scatter(x, ("data",), dim=0, block=2)
    columns = runtime.reduce_scatter(x, ("data",), dim=1, block=2)
    total = runtime.all_reduce(x, ("data",), in_place=True)
    return rows, columns, total, total.data_ptr() == x.data_ptr()


def test_ranks_in_the_middle_get_their_part_of_a_sum_and_sums_may_be_in_place() -> None:
    whole = torch.arange(36.0).view(6, 6) * 6
    for rank, (rows, columns, total, is_same) in enumerate(run_ranks(scatter_and_reduce, 3)):
        part = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(rows, whole[part])
        assert torch.equal(columns, whole[:, part])
        assert torch.equal(total, whole)
        assert is_same


def test_axes_of_size_one_need_no_process_group() -> None:
    runtime = Runtime(Mesh(data=1, tensor=1))
    x = torch.randn(4, 6)
    assert runtime.device_mesh is None
    assert runtime.all_reduce(x, ("tensor",)) is x
    assert runtime.all_reduce_coalesced([x], ("data", "tensor"))[0] is x
    assert runtime.all_gather(x, ("tensor",), 0, 4) is x
    assert runtime.reduce_scatter(x, ("tensor",), 0, 4) is x
    assert runtime.all_to_all(x, ("tensor",), 0, 4, 1, 6) is x
    assert torch.equal(runtime.slice(x, ("tensor",), 0, 4), x)
    assert runtime.shard_index(("tensor",)).item() == 0


def test_a_lone_process_is_told_how_to_start_the_others() -> None:
    with pytest.raises(ValueError, match=r"mesh data=2 has 2 devices.*torchrun --nproc-per-node 2"):
        Runtime(Mesh(data=2))


def make_small_mesh() -> None:
    Runtime(Mesh(data=3))


def test_a_world_of_another_size_is_named() -> None:
    with pytest.raises(RankError, match="3 devices, but 2 processes run"):
        run_ranks(make_small_mesh, 2)


def agreed_worker() -> list[int]:
    """What ranks of two stages agree on, and which were asked."""
    runtime = Runtime(Mesh([Axis("stage", 2, "stage"), Axis("data", 2)]))
    asked: list[int] = []

    def choose() -> int:
        asked.append(runtime.rank)
        return runtime.rank

    return [runtime.agreed_on_stage(choose), *asked]


def test_ranks_of_a_stage_agree_on_what_its_first_chooses() -> None:
    assert run_ranks(agreed_worker, 4) == [[0, 0], [0], [2, 2], [2]]


def maxima() -> tuple[list[Tensor], list[Tensor]]:
    """This rank's numbers in several dtypes, and the largest of both ranks' in three ways each."""
    runtime = Runtime(Mesh(a=2))
    numbers = [[nan, 1, -1, -inf, -0.5, -inf, 0.0], [2, nan, -2, -3, inf, -inf, -1e-30]]
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    given = [torch.tensor(numbers[dist.get_rank()], dtype=dtype) for dtype in floats]
    given.append(torch.tensor([dist.get_rank(), -5]))
    found = [runtime.all_reduce(torch.stack([x, x], 1)[:, 0], ["a"], "max") for x in given]
    found += runtime.all_reduce_coalesced(given, ["a"], "max")
    in_place = [x.clone() for x in given] + [given[1][0].repeat(2**16)]
    group = runtime.group(["a"])
    assert group is not None
    all_reduce_in_place(in_place, group, "max")
    assert in_place.pop().isnan().all()
    return given, found + in_place


def test_maximum_over_ranks_keeps_nan_of_each() -> None:
    (zero, found), (one, other) = run_ranks(maxima, 2)
    expected = list(map(torch.maximum, zero, one)) * 3
    for tensors in (found, other):
        for tensor, wanted in zip(tensors, expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, equal_nan=True)


def test_sums_of_large_tensors_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    work = SimpleNamespace(wait=lambda: waits.append("large"))
    monkeypatch.setattr(in_flight.dist, "all_reduce", lambda *args, **options: work)
    group: Any = SimpleNamespace(process_group=None)
    all_reduce_in_place([torch.zeros(in_flight.SMALL_BYTES)], group)
    assert waits == ["large"]
