# pyright: basic
"""The arguments of a call taken apart: its tensors by name, and the form that held them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from shardweave.ir.capture.site import CaptureError

CONSTANTS = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Form:
    """How a call holds its tensors: in which arguments, lists and dicts, beside which constants.

    names: of the tensors, in order: `arg0`, `mask`, and `batch.ids` for an entry of a dict.
    constants: the other leaves by name. num_args: how many arguments are positional. structure:
    the text of constants and of `tree`, which is None where every argument is a tensor. It tells 1
    from 1.0 and True, which are equal.
    """

    num_args: int
    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    structure: str = ""
    order: tuple[str, ...] = ()
    """All leaves by name, in the order of the tree."""
    tree: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return ", ".join([*self.names, *(f"{name}={value!r}" for name, value in self.constants)])

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keyword arguments that hold these tensors."""
        if self.tree is None:
            positional = tuple(tensors[: self.num_args])
            return positional, dict(
                zip(self.names[self.num_args :], tensors[self.num_args :], strict=True)
            )
        leaves = {**dict(zip(self.names, tensors, strict=True)), **dict(self.constants)}
        args, kwargs = pytree.tree_unflatten([leaves[name] for name in self.order], self.tree)
        return args, kwargs


def taken_apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Form, dict[str, Tensor]]:
    """The form of a call, and its tensors by name. Raises CaptureError for other objects."""
    values = [*args, *kwargs.values()]
    if all(isinstance(value, Tensor) for value in values):
        names = (*(f"arg{index}" for index in range(len(args))), *kwargs)
        return Form(len(args), names), dict(zip(names, values, strict=True))
    paths, tree = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    leaves = {_name(path): leaf for path, leaf in paths}
    for name, leaf in leaves.items():
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            raise CaptureError(
                f"argument '{name}' is a {type(leaf).__name__}; pass tensors, numbers, strings and "
                "None, in lists, tuples and dicts of them."
            )
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    constants = tuple((name, leaf) for name, leaf in leaves.items() if name not in tensors)
    structure = f"{tree} {constants!r}"
    form = Form(len(args), tuple(tensors), constants, structure, tuple(leaves), tree)
    return form, tensors


def _name(path: Sequence[Any]) -> str:
    """`arg0.ids`, from the path of a leaf in (args, kwargs)."""
    kind, first, *rest = map(entry, path)
    head = f"arg{first}" if kind == "0" else first
    return ".".join([head, *rest])


def entry(key: Any) -> str:
    """One step of a path, as a word."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def children_of(spec: Any) -> list[Any]:
    """The parts of a tree of torch's."""
    # torch 2.13 deprecates the older name, which is all that 2.11 has.
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)
