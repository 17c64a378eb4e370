# pyright: basic
"""The arguments of a call taken apart: its tensors by name, and the form that held them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardweave.ir.capture.site import CaptureError
from shardweave.ir.torch_private import pytree

CONSTANTS = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Form:
    """The structure of a call of forward without its tensors: arguments, lists, dicts and
    constants.

    names: the tensors' names in order: `arg0`, `mask`, and `batch.ids` for an entry of a dict.
    constants: leaves that are not tensors, by name. num_args: the number of positional arguments.
    tree: torch's pytree spec of the call; None if every argument is a tensor. structure: `tree` and
    the constants as text, which distinguishes 1, 1.0 and True.
    """

    num_args: int
    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    structure: str = ""
    order: tuple[str, ...] = ()
    """The names of all leaves, in the order of the tree."""
    tree: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return ", ".join([*self.names, *(f"{name}={value!r}" for name, value in self.constants)])

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild the call's (args, kwargs) from `tensors`, which are in the order of `names`."""
        if self.tree is None:
            positional = tuple(tensors[: self.num_args])
            return positional, dict(
                zip(self.names[self.num_args :], tensors[self.num_args :], strict=True)
            )
        leaves = {**dict(zip(self.names, tensors, strict=True)), **dict(self.constants)}
        args, kwargs = pytree.tree_unflatten([leaves[name] for name in self.order], self.tree)
        return args, kwargs


def named_arguments(
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_whole: bool = True,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a call's arguments by keyword, where the signature of forward allows it. Returns (args,
    kwargs), unchanged if arguments go to `*args`. Raises TypeError for arguments that forward does
    not take, and for missing arguments unless `is_whole` is False."""
    bind = signature.bind if is_whole else signature.bind_partial
    given = bind(*args, **kwargs).arguments
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if name not in given:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple(args), dict(kwargs)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            keywords |= {key: given[name][key] for key in sorted(given[name])}
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(given[name])
        else:
            keywords[name] = given[name]
    return tuple(positional), keywords


def taken_apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Form, dict[str, Tensor]]:
    """Split a call into its `Form` and its tensors by name. CaptureError for unsupported
    objects."""
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


def check_example(model: Any, args: Any, kwargs: Any) -> None:
    """Raises TypeError for a model that is no module, and for an example batch that is not a
    sequence of positional arguments and a mapping of named ones."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"the model is {what}, not an instance of nn.Module; give a module whose forward "
            "computes the loss or the outputs."
        )
    if isinstance(args, Tensor):
        raise TypeError("the example's args are a tensor; give a tuple of arguments, as in (x,).")
    if isinstance(args, Mapping):
        raise TypeError(
            "the example's args are a dict; give arguments by name as kwargs=, or as (batch,) if "
            "forward takes the dict itself."
        )
    if isinstance(args, str) or not isinstance(args, Iterable):
        raise TypeError(
            f"the example's args are {args!r:.50}; give a tuple of arguments, as in (x,)."
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(
            f"the example's kwargs are {kwargs!r:.50}; give a dict of arguments by name."
        )


def check_loss(choice: Any) -> None:
    """Raises TypeError for a function `loss=` that does not take one argument."""
    function = choice.forward if isinstance(choice, nn.Module) else choice
    if not callable(function):
        return
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise TypeError(
            "loss= is called with what the model returns, and nothing else. A criterion that takes "
            "labels too belongs in the model: write a module whose forward takes inputs and "
            "labels, calls both, and returns the loss."
        ) from None
    except ValueError:  # a builtin, whose arguments are not known
        return


def _name(path: Sequence[Any]) -> str:
    """Name a leaf, such as `arg0.ids`, by its path in (args, kwargs)."""
    kind, first, *rest = map(entry, path)
    head = f"arg{first}" if kind == "0" else first
    return ".".join([head, *rest])


def entry(key: Any) -> str:
    """Return one key of a pytree path as text."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def children_of(spec: Any) -> list[Any]:
    """Return the children of a pytree spec."""
    # torch 2.13 deprecates the older name, which is all that 2.11 has.
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)
