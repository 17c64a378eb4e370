"""Random regions over all ops that a kernel may hold, and what they should give.

A region is drawn op by op: sizes with 1 and primes, broadcasts, strides, all dtypes, NaN, infinities
and -0.0. Kernels compute halves in float32 and round once, so the reference is eager PyTorch with
halves widened. How far a right result may be from it is found by Monte Carlo arithmetic (Parker,
1997): the reference is run again with every input, and every result of every op, moved by a few
units in its last place, and what this moves is not compared more closely. Of 0.0 and -0.0 either may
be the largest: torch takes the one or the other by the order of the operands and the width of its
vectors. So these runs take now the one, now the other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardweave.backends.triton.source.formulas import computed_in
from shardweave.ir.dialects.aten import overload_named

SIZES = (1, 2, 3, 4, 5, 7, 8, 11, 16, 17)
FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.bool, torch.int8, torch.uint8)
NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.uint8: "ui8",
    torch.bool: "i1",
}  # fmt: skip
EXTREMES = frozenset({"aten.maximum", "aten.minimum", "aten.amax", "aten.amin"})
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-4, 60.0)

Run = Callable[..., Any]


@dataclass(frozen=True)
class Value:
    """A value of a region. own: in its dtype, for the type alone; wide: as kernels compute it."""

    name: str
    own: Tensor
    wide: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.own.shape)

    @property
    def type(self) -> str:
        return "tensor<" + "x".join([*map(str, self.shape), NAMES[self.own.dtype]]) + ">"

    @property
    def is_float(self) -> bool:
        return self.own.dtype.is_floating_point


@dataclass(frozen=True)
class Step:
    """An op: its text, what it reads and makes, and how it is run on wide tensors.

    terms: the size of what cancels in it, so that its result is right to that much rounded.
    """

    name: str
    text: str
    operands: tuple[str, ...]
    results: tuple[Value, ...]
    run: Run
    terms: Run | None = None


@dataclass
class RandomRegion:
    """A region while it is drawn."""

    seed: int
    values: list[Value] = field(default_factory=lambda: list[Value]())
    inputs: list[Value] = field(default_factory=lambda: list[Value]())
    steps: list[Step] = field(default_factory=lambda: list[Step]())

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        rank = self.random.choice((1, 2, 2, 2, 3))
        self.shape = tuple(self.random.choice(SIZES) for _ in range(rank))
        self.dtype = self.random.choice(FLOATS)

    # Inputs

    def new_input(
        self, shape: Sequence[int], dtype: torch.dtype, values: Tensor | None = None
    ) -> Value:
        own = self._tensor(shape, dtype) if values is None else values
        value = Value("x" + "abcdefghijklmnopqrst"[len(self.inputs)], own, widened(own))
        self.inputs.append(value)
        self.values.append(value)
        return value

    def _tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Random elements, some of them special, in random strides."""
        drawn = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)
        if dtype.is_floating_point and self.random.random() < 0.4:
            for _ in range(self.random.randint(1, 3)):
                drawn.view(-1)[self.random.randrange(drawn.numel())] = self.random.choice(SPECIAL)
        if not dtype.is_floating_point:
            drawn = (drawn * 5).round() if dtype != torch.uint8 else (drawn * 5).round().abs()
        tensor = (drawn > 0) if dtype == torch.bool else drawn.to(dtype)
        kind = self.random.random()
        if kind < 0.15 and tensor.ndim > 1:  # another order of dims in memory
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if kind < 0.3 and tensor.ndim:  # gaps
            room = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), dtype=dtype)
            room[..., 1::2] = tensor
            return room[..., 1::2]
        if kind < 0.4 and tensor.ndim:  # repeated
            return tensor[:1].expand(tensor.shape)
        return tensor

    def broadcastable(self) -> tuple[int, ...]:
        """The shape of the region, or one that is broadcast to it."""
        if self.random.random() < 0.55:
            return self.shape
        dims = [n if self.random.random() < 0.5 else 1 for n in self.shape]
        return tuple(dims[self.random.randrange(len(dims)) :])

    # Ops

    def apply(
        self,
        name: str,
        operands: Sequence[Value],
        run: Run,
        attributes: str = "",
        terms: Run | None = None,
    ) -> bool:
        """Add an op if torch takes the operands; whether it did."""
        try:
            own = _listed(run([v.own for v in operands], own=True))
            wide = _listed(run([v.wide for v in operands], own=False))
        except (RuntimeError, TypeError, IndexError, ValueError):
            return False
        if any(t.is_complex() or t.dtype not in NAMES or not t.numel() for t in own):
            return False
        made = tuple(
            Value(f"v{'abcdefghijklmnopqrstuvwxyz'[len(self.steps)]}{'xyz'[n]}", t, w)
            for n, (t, w) in enumerate(zip(own, wide, strict=True))
        )
        given = ", ".join([f"%{v.name}" for v in operands] + ([attributes] if attributes else []))
        if name == "aten.cat":
            given = f"[{', '.join(f'%{v.name}' for v in operands)}], {attributes}"
        left = ", ".join(f"%{v.name}" for v in made)
        text = f"{left} = {name}({given}) : {', '.join(v.type for v in made)}"
        self.steps.append(Step(name, text, tuple(v.name for v in operands), made, run, terms))
        self.values += made
        return True

    def call(self, name: str, operands: Sequence[Value], *args: Any, attributes: str = "") -> bool:
        overload = overload_named(f"aten.{name}")
        return self.apply(f"aten.{name}", operands, lambda t, own: overload(*t, *args), attributes)

    def pick(self, *, floats: bool | None = None) -> Value:
        """A value, of those made last more often."""
        fitting = [v for v in self.values if floats is None or v.is_float == floats]
        if not fitting or (self.random.random() < 0.15 and len(self.inputs) < 8):
            dtype = self.dtype if floats is not False else self.random.choice(INTEGERS)
            if self.random.random() < 0.15 and floats is not False:
                dtype = self.random.choice(FLOATS)
            return self.new_input(self.broadcastable(), dtype)
        return fitting[-1] if self.random.random() < 0.6 else self.random.choice(fitting)

    # What is compared

    @cached_property
    def outputs(self) -> list[Value]:
        """What no op reads, and some of what ops read."""
        read = {name for step in self.steps for name in step.operands}
        made = [v for step in self.steps for v in step.results]
        return [v for v in made if v.name not in read or self.random.random() < 0.15]

    @property
    def text(self) -> str:
        lines = [f"input %{v.name} : {v.type}" for v in self.inputs]
        lines += [step.text for step in self.steps]
        lines += [
            f"output %{v.name}" if n == 0 else f"grad g{n} = %{v.name}"
            for n, v in enumerate(self.outputs)
        ]
        return "\n".join(lines)

    def perturbed(self, seed: int) -> dict[str, Tensor]:
        """All values, with every input and result moved by some units in its last place."""
        generator = torch.Generator().manual_seed(seed)
        found = {v.name: _moved(v.wide, generator) for v in self.inputs}
        for step in self.steps:
            given = [found[name] for name in step.operands]
            made = _listed(step.run(given, own=False))
            if step.name in EXTREMES and made[0].is_floating_point():
                made = [_with_zeros(made[0], step.run, given, (-1.0) ** seed)]
            if step.terms is not None:
                made = [made[0] + _moved(step.terms(*given), generator) - step.terms(*given)]
            for value, tensor in zip(step.results, made, strict=True):
                found[value.name] = _moved(tensor, generator)
        return found


def _with_zeros(extreme: Tensor, run: Run, given: list[Tensor], sign: float) -> Tensor:
    """Extremes of elements; those that are of 0.0 and -0.0 both are zeros of that sign.

    For who compares, zeros become the least numbers, once of their own sign and once of the other.
    """
    least = torch.finfo(extreme.dtype).smallest_normal

    def marked(x: Tensor, factor: float) -> Tensor:
        x = x.to(extreme.dtype)
        return torch.where(x == 0, factor * torch.full_like(x, least).copysign(x), x)

    own, other = (run([marked(x, factor) for x in given], own=False) for factor in (1.0, -1.0))
    is_of_both = (extreme == 0) & (own.signbit() == other.signbit())
    return torch.where(is_of_both, math.copysign(0.0, sign), extreme)


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    # Of different sizes, so that those of an op and of its operand do not cancel.
    units = signs * (2 + 4 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
    return tensor * (1 + units * torch.finfo(tensor.dtype).eps).to(tensor.dtype)


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(computed_in(tensor.dtype))


def _listed(returned: Any) -> list[Tensor]:
    parts = returned if isinstance(returned, tuple | list) else [returned]
    return [part for part in parts if part is not None]
