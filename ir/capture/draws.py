"""Recipes that make torch's random ops from uniform, normal and whole random numbers.

A program and eager PyTorch under `sw.seeded` use the same recipes, so that they get the same random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardweave.ir.library.philox import Distribution


class Maker(Protocol):
    """Protocol for running a recipe's ops: `ImportBuilder` for programs, or eager tensors."""

    def call(self, name: str, *operands: Any, **values: Any) -> Any:
        """Call an ATen op; return its first result."""
        ...

    def calls(self, name: str, *operands: Any, **values: Any) -> Sequence[Any]:
        """Call an ATen op; return all its results."""
        ...

    def cast(self, value: Any, dtype: torch.dtype) -> Any: ...

    def draw(self, shape: Sequence[int], distribution: Distribution, dtype: torch.dtype) -> Any:
        """Draw a tensor of new random numbers."""
        ...

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype) -> Any: ...


@dataclass(frozen=True)
class Draw:
    """A call of a random op: its arguments by schema name, and its result's shape and dtype."""

    make: Maker
    arguments: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def uniform(self) -> Any:
        return self.make.draw(self.shape, "uniform", self.dtype)

    def normal(self) -> Any:
        return self.make.draw(self.shape, "normal", self.dtype)

    def kept(self, probability: Any) -> Any:
        """Draw a bool tensor that is True with `probability`, a number or a tensor. The random
        numbers are float32 in every dtype, so that masks are equal in all dtypes."""
        uniform = self.make.draw(self.shape, "uniform", torch.float32)
        if isinstance(probability, (int, float)):
            return self.make.call("aten.lt.Scalar", uniform, other=float(probability))
        return self.make.call("aten.lt.Tensor", uniform, probability)

    def scaled(self, numbers: Any, factor: float, offset: float) -> Any:
        if factor != 1:
            numbers = self.make.call("aten.mul.Scalar", numbers, other=factor)
        return self.make.call("aten.add.Scalar", numbers, other=offset) if offset else numbers


Recipe = Callable[[Draw], Any]
RECIPES: dict[str, Recipe] = {}
"""Recipes by the name of an overload, functional or in place."""


def is_in_place(name: str) -> bool:
    """True if an overload is in place: it writes the random numbers into its operand `self`."""
    return name.split(".")[1].endswith("_")


def _recipe(*names: str) -> Callable[[Recipe], Recipe]:
    def register(function: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(names, function))
        return function

    return register


@_recipe("aten.native_dropout")
def _dropout(draw: Draw) -> Any:
    """Return the kept elements of the input, scaled by 1 / (1 - p), and the mask."""
    make, source, p = draw.make, draw["input"], float(draw["p"])
    if draw["train"] is False:
        return [source, make.full(draw.shape, True, torch.bool)]
    if p == 1:  # eager PyTorch draws nothing either
        nothing = make.call("aten.mul.Scalar", source, other=0.0)
        return [nothing, make.full(draw.shape, False, torch.bool)]
    mask = draw.kept(1 - p)
    kept = make.call("aten.mul.Tensor", source, make.cast(mask, draw.dtype))
    return [make.call("aten.mul.Scalar", kept, other=1 / (1 - p)), mask]


@_recipe("aten.bernoulli", "aten.bernoulli.p", "aten.bernoulli.Tensor")
@_recipe("aten.bernoulli_.float", "aten.bernoulli_.Tensor")
def _bernoulli(draw: Draw) -> Any:
    probability = draw.arguments.get("p", draw["self"])
    return draw.make.cast(draw.kept(probability), draw.dtype)


@_recipe("aten.rand", "aten.rand_like")
def _rand(draw: Draw) -> Any:
    return draw.uniform()


@_recipe("aten.uniform", "aten.uniform_")
def _uniform(draw: Draw) -> Any:
    low, high = draw["from"], draw["to"]
    return draw.scaled(draw.uniform(), high - low, low)


@_recipe("aten.randn", "aten.randn_like")
def _randn(draw: Draw) -> Any:
    return draw.normal()


@_recipe("aten.normal_functional", "aten.normal_", "aten.normal.float_float")
def _normal(draw: Draw) -> Any:
    return draw.scaled(draw.normal(), draw["std"], draw["mean"])


@_recipe("aten.normal.Tensor_float", "aten.normal.float_Tensor", "aten.normal.Tensor_Tensor")
def _normal_of_tensors(draw: Draw) -> Any:
    """Draw normal numbers where the mean, the standard deviation or both are tensors."""
    make, mean, deviation = draw.make, draw["mean"], draw["std"]
    if isinstance(deviation, float):
        spread = make.call("aten.mul.Scalar", draw.normal(), other=deviation)
    else:
        spread = make.call("aten.mul.Tensor", draw.normal(), deviation)
    if isinstance(mean, float):
        return make.call("aten.add.Scalar", spread, other=mean)
    return make.call("aten.add.Tensor", spread, mean)


@_recipe("aten.exponential", "aten.exponential_")
def _exponential(draw: Draw) -> Any:
    """Draw exponential numbers: -log(1 - u) / lambda, for uniform u."""
    below = draw.make.call("aten.log1p", draw.make.call("aten.neg", draw.uniform()))
    return draw.make.call("aten.mul.Scalar", below, other=-1 / draw["lambd"])


@_recipe("aten.randint", "aten.randint.low", "aten.randint_like", "aten.randint_like.low_dtype")
def _randint(draw: Draw) -> Any:
    low = draw.arguments.get("low", 0)
    bits = draw.make.draw(draw.shape, "bits", torch.int64)
    numbers = draw.make.call("aten.remainder.Scalar", bits, other=draw["high"] - low)
    return draw.make.cast(draw.scaled(numbers, 1, low), draw.dtype)


@_recipe("aten.randperm")
def _randperm(draw: Draw) -> Any:
    """Draw a permutation: the order that sorts random 63-bit integers."""
    bits = draw.make.draw(draw.shape, "bits", torch.int64)
    order = draw.make.calls("aten.sort.stable", bits, stable=True)[1]
    return draw.make.cast(order, draw.dtype)
