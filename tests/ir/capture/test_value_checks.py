"""Checks of values in forward, which only raise, are not in the program; what they decide is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardweave as sw
from shardweave.tests.checked import Checked, asserted, caught, decided, in_contexts, raised
from shardweave.tests.eager import assert_three_steps_equal_eager


def batch() -> tuple[Tensor]:
    return (torch.randint(0, 8, (4, 3)),)


@pytest.mark.parametrize("look", [asserted, raised, in_contexts])
def test_model_with_checks_of_values_equals_eager(look: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_three_steps_equal_eager(Checked(look).double(), batch)


@pytest.mark.parametrize("look", [caught, decided])
def test_check_that_decides_what_is_computed_is_refused(
    look: Callable[[Tensor, Tensor], Tensor],
) -> None:
    with pytest.raises(sw.CaptureError, match=r"depend on the data|Data-dependent branching"):
        sw.compile(Checked(look), batch(), mesh="data=2", backend="reference")
