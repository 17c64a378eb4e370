"""Checks of values in forward, which only raise, are not in the program; what they decide is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardweave as sw
from shardweave.tests.checked import Checked, asserted, caught, decided, in_contexts, raised, said
from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import NUM_STEPS, assert_three_steps_equal_eager
from shardweave.tests.torch_versions import new_torch


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
        compile_copy(Checked(look), batch(), mesh="data=2", backend="reference")


@new_torch("print and warnings cannot be left out of a trace")
@pytest.mark.filterwarnings("ignore:of torch")
def test_model_that_says_something_equals_eager(capfd: pytest.CaptureFixture[str]) -> None:
    assert_three_steps_equal_eager(Checked(said).double(), batch)
    assert capfd.readouterr().out.count("of torch") == NUM_STEPS  # eager's


def misused(x: Tensor, ids: Tensor) -> Tensor:
    return x.argsort(1, stable=True) * x  # pyright: ignore[reportCallIssue]


def test_method_with_wrong_arguments_is_refused_in_the_words_of_eager() -> None:
    with pytest.raises(sw.CaptureError, match=r"raises TypeError: argsort\(\) received an invalid"):
        compile_copy(Checked(misused), batch(), mesh="data=2", backend="reference")
