"""What the steps of optimizers read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.ir.capture.update.reads import Reads, Sizes, reads_of
from shardweave.tests import own_optimizers as own

SIZES = [Sizes((8, 6), (4, 6), (4, 6)), Sizes((5, 8), (3, 8), (2, 8))]


def reads(make: Any) -> Reads:
    parameters: list[Tensor] = [nn.Parameter(torch.randn(size.full)) for size in SIZES]
    return reads_of(make(parameters), parameters, SIZES, [True, True])


@pytest.mark.parametrize(
    "make",
    [
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
        *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
        *(torch.optim.Adagrad, torch.optim.Adadelta, own.Lion, own.Joint),
    ],
)
def test_elementwise_update_needs_no_full_values(make: Any) -> None:
    assert not reads(make).full


@pytest.mark.parametrize("make", [torch.optim.Muon, own.Soap, own.Shampoo, own.BySize])
def test_update_of_one_matrix_needs_its_full_value_alone(make: Any) -> None:
    told = reads(make)
    assert (told.full, told.joint, told.may_draw) == ({0, 1}, set(), False)


def test_update_that_reads_all_gradients_is_joint() -> None:
    assert reads(own.AcrossParameters).joint == {0, 1}


def test_update_by_values_or_random_numbers_may_read_everything() -> None:
    assert reads(own.Lamb).may_draw
    assert reads(own.Noisy).full == {0, 1}


def test_optimizer_stays_as_it_was() -> None:
    parameter = nn.Parameter(torch.randn(8, 6))
    optimizer = own.AcrossParameters([parameter])
    reads_of(optimizer, [parameter], SIZES[:1], [True])
    assert optimizer.param_groups[0]["k"] == 0
    assert not optimizer.norms
    assert not optimizer.state


def test_fused_update_of_scaled_gradients_needs_no_full_values() -> None:
    def scaled(parameters: list[Tensor]) -> Any:
        optimizer: Any = torch.optim.Adam(parameters, fused=True)
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
        return optimizer

    assert not reads(scaled).full
