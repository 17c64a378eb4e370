"""Registry of canonical forms, and `Call`, their argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from xdsl.ir import SSAValue

from shardweave.ir.capture.builder import ImportBuilder
from shardweave.ir.dialects.aten import overload_named, signature_of
from shardweave.ir.dialects.syntax import Operands
from shardweave.ir.dialects.types import AnyTensor, dtype_of_type, shape_of_type


class CanonicalError(ValueError):
    """Raised if a program cannot hold a traced call exactly; the message says what to change."""


@dataclass
class Call:
    """A traced call of an ATen overload: its name, its arguments by schema name, and its results.

    Tensor arguments are SSA values. types: the result types; None for a result that the call's
    output mask leaves out.
    """

    name: str
    arguments: dict[str, Any]
    types: list[AnyTensor | None]
    builder: ImportBuilder

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of_type(self._first)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of_type(self._first)

    def add(
        self, name: str, operands: Operands, values: Mapping[str, Any] | None = None
    ) -> SSAValue:
        return self.builder.add(name, operands, [self._first], values).results[0]

    @property
    def _first(self) -> AnyTensor:
        return next(t for t in self.types if t is not None)


Result = SSAValue | list[SSAValue | None]
Form = Callable[[Call], Result]
FORMS: dict[str, Form] = {}

DRAWS = "draws"
"""Key of the form for all overloads that draw random numbers and have no form of their own."""


def form(*names: str) -> Callable[[Form], Form]:
    """Return a decorator that registers a function as the canonical form of the named overloads."""

    def register(function: Form) -> Form:
        for name in names:
            assert name not in FORMS, f"two canonical forms of {name}"
            FORMS[name] = function
        return function

    return register


@cache
def _load() -> None:
    families = "layout creation arithmetic losses strided grouped"
    for module in families.split():
        import_module(f"shardweave.ir.capture.canonical.{module}")


@cache
def lookup(name: str) -> Form | None:
    """Return the canonical form of an overload; None if the op enters programs unchanged."""
    _load()
    form = FORMS.get(name)
    return FORMS[DRAWS] if form is None and _draws(name) else form


def _draws(name: str) -> bool:
    """True if an overload draws random numbers; attention (with `dropout_p`) does not count."""
    is_random = torch.Tag.nondeterministic_seeded in overload_named(name).tags
    return is_random and signature_of(name).parameter("dropout_p") is None


def normalized(dim: int, rank: int) -> int:
    """Return `dim` counted from the front."""
    return dim % rank if rank else 0
