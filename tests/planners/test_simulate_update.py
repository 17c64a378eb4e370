"""The update of an optimizer in the simulator: bytes are counted, and equal those that ranks send."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.ir.program.program import Program
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import local_program

WIDTH = 16


class Matrices(nn.Module):
    """Four matrices and two biases."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(WIDTH, 2 * WIDTH, True), (2 * WIDTH, WIDTH, False)] * 2
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=bias) for i, o, bias in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@pytest.fixture(scope="module")
def program() -> Program:
    return sw.capture(Matrices(), (torch.randn(8, WIDTH),))


def local(program: Program, zero: int) -> Program:
    plan = sw.plan(program, sw.Mesh(data=2), "megatron")
    return local_program(program, replace(plan, zero=zero))


CLUSTER = "testbed:rate=250mbit"
MATRIX = 2 * WIDTH * WIDTH
NUM_PARAMETERS = 4 * MATRIX + 2 * 2 * WIDTH


def test_elementwise_update_sends_nothing_and_keeps_two_moments(program: Program) -> None:
    found = sw.simulate(local(program, 3), CLUSTER, update="AdamW")
    assert found.update is not None
    assert (found.update.sent_bytes, found.update.messages) == (0, 0)
    assert found.update.state_bytes == 2 * 4 * NUM_PARAMETERS // 2
    assert found.update.compute_s > 0
    assert isinstance(found, sw.Simulation)
    assert found.memory.parts["optimizer"] == found.update.state_bytes


def test_update_that_decides_by_values_joins_scalars_rows_and_columns(program: Program) -> None:
    update = sw.simulate(local(program, 3), CLUSTER, update="Adafactor").update
    assert update is not None
    # Of a matrix two norms, and those of its rows and of its columns; of a bias two norms.
    assert update.messages == 4 * 4 + 2 * 2
    assert update.sent_bytes == 4 * (4 * 4 * (2 + 3 * WIDTH) // 4) + 2 * 2 * 4
    assert update.state_bytes == 4 * (4 * 3 * WIDTH + 2 * 2 * WIDTH // 2)


def test_elementwise_updates_with_scalars_and_masks_send_nothing(program: Program) -> None:
    for name, num_states in (("ASGD", 1), ("Rprop", 2)):
        update = sw.simulate(local(program, 3), CLUSTER, update=name).update
        assert update is not None
        assert (update.sent_bytes, update.messages) == (0, 0)
        assert update.state_bytes == num_states * 4 * NUM_PARAMETERS // 2
        assert update.compute_s > 0


def test_muon_sends_half_of_each_matrix_there_and_back(program: Program) -> None:
    found = sw.simulate(local(program, 3), CLUSTER, update="Muon").update
    assert found is not None
    # Each of two ranks owns two matrices: half of the other two goes, half of its own goes back.
    assert found.sent_bytes == 2 * (2 * MATRIX // 2 * 2)
    assert found.messages == 2
    moments = 4 * (4 * MATRIX // 2 + 2 * (2 * 2 * WIDTH) // 2)
    assert found.state_bytes == moments
    assert 0 < found.communication_s < 1


def test_update_of_replicated_matrices_is_dealt_out_where_that_takes_less() -> None:
    wide = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wide

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square().mean()

    step = local(sw.capture(Loss(), (torch.randn(8, 1024),)), 0)
    slow, fast = (
        sw.simulate(step, f"testbed:rate={rate}", update="Muon").update
        for rate in ("1mbit", "10gbit")
    )
    assert slow is not None
    assert fast is not None
    assert (slow.messages, fast.messages) == (0, 1)
    assert slow.compute_s > 1.9 * fast.compute_s
    assert fast.sent_bytes == 1024 * 1024 * 2


def test_update_that_cannot_be_simulated_is_refused(program: Program) -> None:
    step = local(program, 3)
    with pytest.raises(ValueError, match=r"is not in torch.optim"):
        sw.simulate(step, CLUSTER, update="Adamm")
    for name in ("LBFGS", "SparseAdam"):
        with pytest.raises(ValueError, match=rf"{name} cannot be simulated: it calls a closure"):
            sw.simulate(step, CLUSTER, update=name)


def test_summary_and_record_say_what_the_update_takes(program: Program) -> None:
    found = sw.simulate(program, find_cluster(CLUSTER), update="SGD")
    assert found.update is not None
    assert found.record()["update"]["time_s"] == found.update.seconds
    assert found.summary().splitlines()[-1].startswith("update         ")
