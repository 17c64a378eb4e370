"""A collective from outside the package: one class, known to all that reads or runs programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from xdsl.irdl import irdl_op_definition, operand_def, result_def

import shardweave as sw
from shardweave.backends.distributed.in_flight import Group, InFlight
from shardweave.backends.emit.emit import emit
from shardweave.backends.reference.reference import run_reference
from shardweave.ir.dialects import dist
from shardweave.ir.dialects.types import TENSOR
from shardweave.ir.mesh.effect import Effect
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.tests.compiled import OfX, step_of_copy
from shardweave.tests.ir_text import assert_same_values, collectives, random_values, step
from shardweave.tests.spawn import run_ranks


@irdl_op_definition
class OrderedSumOp(dist.CollectiveOp):
    """Sum over `axes` in the order of the ranks, so that all backends round alike."""

    name = "dist.ordered_sum"
    term = operand_def(TENSOR)
    total = result_def(TENSOR)

    @property
    def effect(self) -> Effect:
        return Effect(reduces="sum")

    @staticmethod
    def sent(elements: int, ranks: int) -> float:
        return float(elements * (ranks - 1))

    def on_shards(self, members: Sequence[Tensor]) -> list[Tensor]:
        return [reduce(torch.add, members)] * len(members)

    @staticmethod
    def on_group(x: Tensor, group: Group) -> InFlight:
        terms = [torch.empty_like(x) for _ in range(group.size)]
        work = torch_dist.all_gather(terms, x, group.process_group, async_op=True)
        return InFlight(work, lambda: reduce(torch.add, [terms[rank] for rank in group.order]))


@irdl_op_definition
class ExchangeOp(dist.CollectiveOp):
    """Move the shards of a value from the first axis to the second one, of the same size."""

    name = "dist.exchange"
    shard = operand_def(TENSOR)
    moved = result_def(TENSOR)

    def after(self, sharding: Sharding, mesh: Mesh) -> Sharding:
        seat = sharding.seat_of(self.axes[0])
        if seat is None:
            raise ValueError(f"its operand is not sharded over '{self.axes[0]}'")
        dim, placement = seat
        new = type(placement)(self.axes[1], placement.size, placement.stride)
        return sharding.with_dim(dim, [new if p == placement else p for p in sharding.dims[dim]])

    @staticmethod
    def sent(elements: int, ranks: int) -> float:
        return float(elements)

    def on_shards(self, members: Sequence[Tensor]) -> list[Tensor]:
        size = round(len(members) ** 0.5)
        return [members[other * size + own] for own in range(size) for other in range(size)]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for op in (OrderedSumOp, ExchangeOp):
        dist.register_collective(op)
    yield
    for op in (OrderedSumOp, ExchangeOp):
        del dist.KINDS[op.kind()], dist.STARTS[op]


MODEL = """
    input %x : tensor<4x8xf64>
    param %w : tensor<8x4xf64>
    %y = aten.mm(%x, %w) : tensor<4x4xf64>
    %z = aten.relu(%y) : tensor<4x4xf64>
    output %z
"""

LOCAL = """
    input %x : tensor<4x4xf64> [{}, {"tensor"}]
    param %w : tensor<4x4xf64> [{"tensor"}, {}]
    %y = aten.mm(%x, %w) {sharding = [#dist.sharding<[{}, {}], unreduced = ["tensor"]>]} : tensor<4x4xf64>
    %s = dist.ordered_sum(%y, axes = ["tensor"]) {layer = "fc", sharding = [#dist.sharding<[{}, {}]>]} : tensor<4x4xf64>
    %z = aten.relu(%s) {sharding = [#dist.sharding<[{}, {}]>]} : tensor<4x4xf64>
    output %z
"""
MESH = "data=2,tensor=2"


def local(text: str = LOCAL) -> sw.Program:
    return step(text, MESH, local=True)


def test_it_is_read_verified_printed_and_compared() -> None:
    program = local()
    assert sw.verify(program) == []
    assert sw.Program.parse(str(program)) == program
    shape = local(LOCAL.replace("]>]} : tensor<4x4xf64>\n    %z", "]>]} : tensor<2x4xf64>\n    %z"))
    assert "result shapes are [(2, 4)], expected [(4, 4)]" in sw.verify(shape)[0]
    other = local(LOCAL.replace('axes = ["tensor"]', 'axes = ["data"]'))
    (problem, *_) = sw.verify(other)
    assert problem.startswith(
        "dist.ordered_sum (%s) in layer 'fc': the operand is not an unreduced sum"
    )
    plain = local(LOCAL.replace("dist.ordered_sum", "dist.all_reduce"))
    assert "dist.ordered_sum" in str(sw.diff(plain, program))


def test_it_is_started_and_waited_for() -> None:
    program = sw.run_passes(local(), "start-collectives")
    assert collectives(program) == [
        '%started = dist.start_ordered_sum(%y, axes = ["tensor"]) : tensor<4x4xf64>',
        "%s = dist.wait(%started) : tensor<4x4xf64>",
    ]
    assert sw.verify(program) == []
    assert sw.Program.parse(str(program)) == program
    assert_same_values(local(), program)


def test_it_computes_the_model_and_is_proved_to() -> None:
    whole, program = step(MODEL), sw.run_passes(local(), "start-collectives")
    values = random_values(whole)
    expected = run_reference(whole, values)["output", "0"]
    torch.testing.assert_close(run_reference(program, values)["output", "0"], expected)
    sw.prove(program, against=whole)
    wrong = local(LOCAL.replace('["tensor"]) {layer', '["data"]) {layer'))
    with pytest.raises(sw.ProofError, match="ordered_sum"):
        sw.prove(wrong, against=whole)


def test_its_part_over_sub_batches_becomes_local() -> None:
    before = step(
        """
        input %x : tensor<2x3xf64> [{"tensor", "batch"}, {}]
        %y = aten.sum.dim_IntList(%x, dim = [0]) : tensor<3xf64>
        %s = dist.ordered_sum(%y, axes = ["tensor", "batch"]) : tensor<3xf64>
        output %s
        """,
        "tensor=2,batch=2",
        local=True,
    )
    before.set_mesh(Mesh([Axis("tensor", 2), Axis("batch", 2, "time")]))
    after = sw.run_passes(before, "unroll-time-axes")
    assert [line.split(" = ", 1)[1] for line in collectives(after)] == [
        'dist.ordered_sum(%total, axes = ["tensor"]) : tensor<3xf64>'
    ]
    assert_same_values(before, after)


def test_its_bytes_and_seconds_are_those_of_its_traffic() -> None:
    (stats,) = local().stats().collectives
    assert (stats.kind, stats.axes, stats.sent_bytes) == ("ordered_sum", ("tensor",), 4 * 4 * 8)
    program = sw.run_passes(local(), "start-collectives")
    (event,) = (e for e in sw.simulate(program, "perlmutter").events if "ordered_sum" in e.name)
    assert event.end_s > event.start_s


def run_on_ranks(text: str, x: Tensor, w: Tensor) -> tuple[Tensor, list[str]]:
    dist.register_collective(OrderedSumOp)
    program = sw.Program.parse(text)
    model = OfX()
    model.register_parameter("w", nn.Parameter(w))
    made = step_of_copy(program, model)
    result = made(x=x)
    return result.full_tensor(), [line for line in emit(program).splitlines() if "ordered" in line]


def test_processes_run_it_and_round_as_the_virtual_mesh_does() -> None:
    program = sw.run_passes(step(LOCAL, "tensor=2", local=True), "start-collectives")
    values = random_values(program)
    expected = run_reference(program, values)["output", "0"]
    given: list[Any] = [values["input", "x"], values["param", "w"]]
    for result, statements in run_ranks(run_on_ranks, 2, str(program), *given):
        assert torch.equal(result, expected)
        assert [line.split("  #")[0].strip() for line in statements] == [
            'started = rt.start_collective("ordered_sum", y, axes=("tensor",))'
        ]


def test_one_that_neither_reduces_gathers_nor_shards_says_what_it_leaves() -> None:
    text = """
        input %x : tensor<2x8xf64> [{"data"}, {}]
        %y = dist.exchange(%x, axes = ["data", "tensor"]) {sharding = [#dist.sharding<[{"tensor"}, {}]>]} : tensor<2x8xf64>
        output %y [{"tensor"}, {}]
    """
    program = local(text)
    assert sw.verify(program) == []
    x = random_values(program)["input", "x"]
    assert torch.equal(run_reference(program, {("input", "x"): x})["output", "0"], x)
    (problem, *_) = sw.verify(local(text.replace('sharding<[{"tensor"}, {}]', "sharding<[{}, {}]")))
    assert 'its result is in #dist.sharding<[{"tensor"}, {}]>, but its sharding says' in problem
    program.set_mesh(Mesh([Axis("data", 2, "time"), Axis("tensor", 2)]))
    with pytest.raises(ValueError, match=r"its class does not define `effect`"):
        sw.run_passes(program, "unroll-time-axes")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("acme.sum", "a collective's name is 'dist.<kind>', found 'acme.sum'"),
        ("dist.start_sum", "a collective's name is 'dist.<kind>', found 'dist.start_sum'"),
        ("dist.wait", "there is an op 'dist.wait' already"),
        ("dist.ordered_sum", "there is an op 'dist.ordered_sum' already"),
    ],
)
def test_a_name_that_cannot_be_its_own_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        dist.register_collective(type("OtherOp", (OrderedSumOp,), {"name": name}))
