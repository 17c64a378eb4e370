# pyright: basic
# torch's tracing API is private and only partly typed.
"""A call of a block while dynamo runs, and the outside state that the block's code can see."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir.torch_private import (
    AttributeMutationExisting,
    AttributeMutationNew,
    BaseListVariable,
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    RangeVariable,
    TensorVariable,
    TrackedDict,
    TupleVariable,
    ValueMutationExisting,
    ValueMutationNew,
    modified_variables,
    num_function_modes,
)


class Unfit(Exception):
    """Raised if a block's call cannot be recorded, or copied from a record; says why."""


@dataclass
class BlockCall:
    """A call of a block that is about to be traced. name: dynamo's name of the block, read before
    the call, since dynamo's variable loses it once the block is called under another name."""

    variable: Any
    name: str
    tx: Any
    leaves: list[Any]
    structure: Any
    state: tuple[Any, ...]
    writes: Writes

    @classmethod
    def of(cls, variable: Any, tx: Any, args: Any, kwargs: Any) -> BlockCall:
        if not tx.output.is_root_tracer():
            raise Unfit("the block is called within a higher-order operator")
        name = module_name_of(variable)
        if any(
            called == name or called.startswith((f"{name}.", f"{name}[")) for called in tx.num_calls
        ):
            raise Unfit("the block is called more than once")
        leaves: list[Any] = []
        structure = (
            tuple(structure_of(arg, leaves) for arg in args),
            tuple((key, structure_of(arg, leaves)) for key, arg in kwargs.items()),
        )
        return cls(variable, name, tx, leaves, structure, torch_state(tx), writes_of(tx))

    @property
    def nodes(self) -> list[fx.Node]:
        return [leaf.as_proxy().node for leaf in self.leaves]


def module_name_of(variable: Any) -> str:
    """Return the name that dynamo gives a module in the module stacks of graph nodes."""
    name = variable.get_nn_module_stack_source().name
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", name)


def structure_of(variable: Any, leaves: list[Any]) -> Any:
    """Return the structure of a call's argument; append its tensors to `leaves`. Raises Unfit."""
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    if isinstance(variable, TensorVariable):
        leaves.append(variable)
        return Tensor
    if isinstance(variable, ConstantVariable):
        return type(variable.value), repr(variable.value)
    if type(variable) is TupleVariable:
        return tuple(structure_of(item, leaves) for item in variable.items)
    raise Unfit(f"the block's argument is a {type(variable).__name__.removesuffix('Variable')}")


def torch_state(tx: Any) -> tuple[Any, ...]:
    """Return global state that a block's code can depend on: torch's modes and the call stack."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        torch.are_deterministic_algorithms_enabled(),
        num_function_modes(),
        len(tx.symbolic_torch_function_state.mode_stack),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        tuple(_frames(tx)),
    )


def _frames(tx: Any) -> Iterator[Any]:
    while tx is not None:
        position = tx.current_instruction.positions
        yield _Same(tx), position.lineno if position else None, tuple(map(_Same, tx.block_stack))
        yield tuple(tx.nn_module_stack.items())
        tx = tx.parent


@dataclass(frozen=True, eq=False)
class _Same:
    """Wraps an object, keeps it alive, and compares by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


Writes = dict[int, tuple[Any, Any]]
"""Variables that code wrote to, with their contents, by id of the variable."""


def writes_of(tx: Any) -> Writes:
    """Return the trace's writes so far, to objects that existed before it and to new objects."""
    effects = tx.output.side_effects
    if effects.tensor_hooks:
        raise Unfit("the block registers hooks on tensors")
    written = dict.fromkeys(effects.store_attr_mutations)
    for variable in modified_variables(effects):
        if isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
            written[variable] = None
    return {
        id(variable): (variable, _content(variable, effects))
        for variable in written
        if not isinstance(vars(variable).get("value"), TrackedDict)
    }


def _content(variable: Any, effects: Any) -> Any:
    attributes = effects.store_attr_mutations.get(variable, {})
    held = {name: _frozen(value) for name, value in attributes.items()}
    base = vars(variable).get("_base_vt")
    return held, _frozen(variable), None if base is None else _frozen(base)


def _frozen(variable: Any) -> Any:
    """Return a snapshot of a variable, equal to a later one unless its contents changed."""
    if isinstance(variable, ConstantVariable):
        return type(variable.value), repr(variable.value)
    if isinstance(variable, ConstDictVariable):
        return tuple((_frozen(k.vt), _frozen(v)) for k, v in variable.items.items())
    if isinstance(variable, BaseListVariable) and not isinstance(variable, RangeVariable):
        return type(variable), tuple(map(_frozen, variable.items))
    if "Iterator" in type(variable).__name__ or "Generator" in type(variable).__name__:
        raise Unfit("the block's Python state holds an iterator")
    return _Same(variable)


def check_unwritten(before: Writes, now: Writes) -> None:
    """Raises Unfit if code has written, since `before`, to an object that existed then."""
    for key, (variable, content) in now.items():
        is_new = isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew))
        if before[key][1] != content if key in before else not is_new:
            raise Unfit("the block changes Python objects that existed before its call")
