"""Whether a kernel's results are those of its region, as near as the region's rounding allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardweave.tests.backends.random_regions import Value


def problem(found: Tensor, value: Value, others: Sequence[Tensor]) -> str | None:
    """What is wrong with a result; None if it is as near as it can be.

    others: the value as `RandomRegion.perturbed` gives it.
    """
    if found.dtype != value.own.dtype or found.shape != value.own.shape:
        return f"{value.name} is {found.dtype} {tuple(found.shape)}, expected {value.type}"
    stack = torch.stack([value.wide, *others])
    if not value.is_float:
        wrong = (found != value.wide.to(found.dtype)) & (stack == stack[0]).all(0)
        return _first(value, found, wrong)
    stored = value.wide.to(found.dtype)
    kinds = torch.stack([_kind(t.to(found.dtype)) for t in stack])
    is_sure = (kinds == kinds[0]).all(0)
    wrong = is_sure & (_kind(found) != _kind(stored))
    spread = (stack.double() - stack[0].double()).abs().amax(0)
    unit = torch.finfo(found.dtype).eps if found.dtype != value.wide.dtype else 0.0
    least = 2 * torch.finfo(found.dtype).smallest_normal
    allowed = 8 * spread + unit * value.wide.double().abs() + least
    distance = (found.double() - value.wide.double()).abs()
    wrong |= is_sure & stored.isfinite() & (distance > allowed)
    is_zero = (stack == 0).all(0) & (stack.signbit() == stack[0].signbit()).all(0)
    wrong |= is_zero & (found == 0) & (found.signbit() != value.wide.signbit())
    return _first(value, found, wrong)


def _kind(tensor: Tensor) -> Tensor:
    """0 of finite numbers, 1 and 2 of infinities, 3 of NaN."""
    return tensor.isposinf() + 2 * tensor.isneginf() + 3 * tensor.isnan()


def _first(value: Value, found: Tensor, wrong: Tensor) -> str | None:
    if not bool(wrong.any()):
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{value.name}{list(place)} is {found[place].item()!r}, expected "
        f"{value.wide[place].item()!r} ({int(wrong.sum())} of {wrong.numel()} are wrong)"
    )
