"""Random numbers: of `dist.random`, by the recipes that eager PyTorch follows under `sw.random`."""

from __future__ import annotations

from functools import cache

import torch

from shardweave.ir.aten import overload_named
from shardweave.ir.capture.canonical.base import Call, CanonicalError, Result, form
from shardweave.ir.capture.draws import RECIPES, Draw
from shardweave.ir.pure_ops import pure_ops

NO_RECIPE = (
    "draws random numbers in a way that has no form in a program; draw by torch.rand, randn, "
    "bernoulli, randint, randperm or nn.Dropout, or outside the model and pass them as an input"
)


@form(*RECIPES)
def random(call: Call) -> Result:
    if call.arguments.get("generator") is not None:
        raise CanonicalError(
            f"{call.name} draws from a generator of its own, whose state a program does not have; "
            "leave generator= out, and give sw.compile a seed."
        )
    return RECIPES[call.name](Draw(call.builder, call.arguments, call.shape, call.dtype))


@cache
def _others() -> list[str]:
    """Those that draw and have no recipe; fused attention draws nothing without dropout."""
    return [
        name
        for name in pure_ops()
        if torch.Tag.nondeterministic_seeded in overload_named(name).tags
        and name not in RECIPES
        and "attention" not in name
    ]


@form(*_others(), "aten.rrelu_with_noise")
def refused(call: Call) -> Result:
    raise CanonicalError(f"{call.name} {NO_RECIPE}.")
