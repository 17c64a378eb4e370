"""What random regions are compared with leaves free what eager leaves to chance, and nothing else."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from shardweave.tests.backends.random_regions import RandomRegion
from shardweave.tests.backends.region_results import problem


def told_of(region: RandomRegion, found: torch.Tensor) -> str | None:
    """What is said of a result of the region's last op."""
    (value,) = region.steps[-1].results
    others = [region.perturbed(seed)[value.name] for seed in range(4)]
    return problem(found, value, others)


def region_of(name: str, *tensors: torch.Tensor) -> RandomRegion:
    """A region of one op, of rows if it reduces."""
    region = RandomRegion(0)
    operands = [region.new_input(x.shape, x.dtype, x) for x in tensors]
    reduces = name in ("amax", "amin")
    arguments = ([1], True) if reduces else ()
    text = "dim = [1], keepdim = true" if reduces else ""
    assert region.call(name, operands, *arguments, attributes=text)
    return region


@pytest.mark.parametrize("name", ["maximum", "minimum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_either_zero_may_be_the_largest_of_both(name: str, dtype: torch.dtype) -> None:
    a = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0, float("nan")], dtype=dtype)
    b = torch.tensor([-0.0, 0.0, 0.0, -0.0, 0.0, 0.0], dtype=torch.float32)
    region = region_of(name, a, b)
    (value,) = region.steps[-1].results
    own = value.wide.to(value.own.dtype)
    for place in range(4):
        found = own.clone()
        found[place] = -found[place]
        assert (told_of(region, found) is None) == (place < 2), place
    assert told_of(region, own) is None


@pytest.mark.parametrize("name", ["amax", "amin"])
def test_either_zero_may_be_the_extreme_of_a_row_of_both(name: str) -> None:
    far = -1.0 if name == "amax" else 1.0
    x = torch.tensor([[0.0, -0.0, far], [0.0, 0.0, far], [far, -0.0, -0.0], [far, far, far]])
    region = region_of(name, x)
    (value,) = region.steps[-1].results
    for row in range(4):
        found = value.wide.clone()
        found[row] = -found[row]
        assert (told_of(region, found) is None) == (row == 0), row


def test_what_follows_from_the_sign_of_such_a_zero_is_free() -> None:
    region = region_of("maximum", torch.tensor([0.0, 0.0]), torch.tensor([-0.0, 0.0]))
    assert region.call("reciprocal", [region.values[-1]])
    inf = float("inf")
    assert told_of(region, torch.tensor([-inf, inf])) is None
    assert told_of(region, torch.tensor([inf, -inf])) is not None
