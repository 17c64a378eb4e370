# pyright: basic
"""Tensors that a model reads but does not own: plain attributes, lists, numpy arrays, globals.

A step holds the parameters and buffers of a model, by name. Any other constant becomes a
non-persistent buffer. A tensor that requires gradients and is no parameter is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardweave.ir.capture.observed.constant_numbers import is_read_as_number
from shardweave.ir.capture.site import CaptureError, Site, site_of_node
from shardweave.ir.torch_private import FakeTensor, assign_attribute

_DEPTH = 3
"""Depth to which lists, dicts and plain objects are searched for a tensor."""


CONSTANT = "constant_"
"""Prefix of the names of buffers for constants that are not attributes of modules."""


def check_all_registered(model: nn.Module, exported: torch.fx.GraphModule) -> None:
    """Raises CaptureError if the graph reads a tensor that is no parameter or buffer of `model`."""
    for name, tensor in _loose(model, exported):
        raise CaptureError(_refusal(model, tensor, _site(exported, name)))


def keep_constants(
    model: nn.Module, exported: torch.fx.GraphModule, arrays: Mapping[int, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Register the constant tensors that a graph reads as non-persistent buffers of the model.

    Returns the new buffers by name, and notes. An attribute of a module keeps its name; other
    constants become buffers of `model` itself. arrays: tensors that share a numpy array's memory,
    by id of the graph's fake tensor. Raises CaptureError for a parameter, for a tensor that
    requires gradients, and for one without data.
    """
    kept: dict[str, Tensor] = {}
    notes: list[str] = []
    # Of an earlier trace, perhaps in another process; their changes are not seen, so that equal
    # ones are one.
    earlier = [c for c_name, c in constants_of(model).items() if c_name.startswith(CONSTANT)]
    for name, tensor in _loose(model, exported):
        site = _site(exported, name)
        if id(tensor) in arrays:
            tensor = arrays[id(tensor)]
        if tensor.requires_grad or tensor.is_meta or isinstance(tensor, nn.Parameter | FakeTensor):
            raise CaptureError(_refusal(model, tensor, site))
        if is_read_as_number(tensor):
            raise CaptureError(
                f"{site}: forward uses this tensor both as a tensor and as a Python number "
                "(item()), so that a later change of it would reach only one of the two; store "
                "the number as a separate attribute."
            )
        known = next((b for b in model.buffers() if _is_same_memory(b, tensor)), None)
        place = next(_places(model, tensor), "")
        own = place if _is_attribute(model, place, tensor) else _free_name(model)
        if known is None and own != place:
            known = equal_constant(earlier, tensor)
        if known is not None:  # each trace makes a tensor of a numpy array
            assign_attribute(known, exported, name)
            continue
        register_constants(model, {own: tensor})
        kept[own] = tensor
        where = f"tensor `{place}`" if place else "a constant tensor from outside the model"
        change = "write into it to change it" if own == place else "changes of it are not seen"
        notes.append(
            f"{site}: {where}, of shape {tuple(tensor.shape)}, is kept as the non-persistent "
            f"buffer '{own}'; {change}: write self.register_buffer(.., persistent=False)"
        )
    return kept, notes


def register_constants(model: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Register constants as non-persistent buffers, in place of attributes of the same names."""
    for qualified, tensor in constants.items():
        path, _, name = qualified.rpartition(".")
        module = model.get_submodule(path)
        if name not in module._buffers:
            own = vars(module).pop(name, tensor)
            module.register_buffer(name, own, persistent=False)
            _KEPT.setdefault(module, {})[name] = own


def kept_constants(module: nn.Module) -> Mapping[str, Tensor]:
    """Constants in a module's code that capture registered as buffers, by buffer name."""
    return _KEPT.get(module, {})


def equal_constant(constants: Iterable[Tensor], tensor: Tensor) -> Tensor | None:
    """The tensor in `constants` with the dtype and values of `tensor`; None if there is none."""
    if tensor.requires_grad:
        return None
    alike = (constant for constant in constants if constant.dtype == tensor.dtype)
    return next((c for c in alike if torch.equal(c.cpu(), tensor.cpu())), None)


def constants_of(model: nn.Module) -> dict[str, Tensor]:
    """Constants in a model's code that capture registered as buffers, by qualified name."""
    return {
        f"{path}.{name}" if path else name: constant
        for path, module in model.named_modules()
        for name, constant in kept_constants(module).items()
    }


_KEPT: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


def _loose(model: nn.Module, exported: torch.fx.GraphModule) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the graph, tensor) for each tensor read that `model` does not own."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, tensor in list((*exported.named_parameters(), *exported.named_buffers())):
        nodes = exported.graph.find_nodes(op="get_attr", target=name)
        if id(tensor) not in own and any(node.users for node in nodes):
            yield name, tensor


def _is_same_memory(buffer: Tensor, tensor: Tensor) -> bool:
    if isinstance(buffer, FakeTensor) or not buffer.numel() or buffer.layout != torch.strided:
        return False
    form = buffer.data_ptr(), buffer.dtype, buffer.shape, buffer.stride()
    return form == (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _is_attribute(model: nn.Module, place: str, tensor: Tensor) -> bool:
    """True if `place`, a path from the model, is a plain attribute that holds `tensor`."""
    path, _, name = place.rpartition(".")
    modules = dict(model.named_modules())
    return path in modules and vars(modules[path]).get(name) is tensor


def _free_name(model: nn.Module) -> str:
    return next(name for n in count() if not hasattr(model, name := f"{CONSTANT}{n}"))


def _refusal(model: nn.Module, tensor: Tensor, site: Site) -> str:
    place = next(_places(model, tensor), None)
    if isinstance(tensor, nn.Parameter):
        where = f"`{place}`" if place else "that is outside the model"
        return (
            f"{site}: this reads parameter {where}, which model.parameters() does not have; make "
            "it an attribute of the module, or put it in an nn.ParameterList or nn.ParameterDict."
        )
    where = f"tensor `{place}`" if place else "a tensor from outside the model"
    name = place.rpartition(".")[2] if place else "name"
    return (
        f"{site}: this reads {where}, of shape {tuple(tensor.shape)}, which is no parameter, "
        "buffer or input; if it is of the batch, pass it to forward as an argument; if it is "
        f'constant, write self.register_buffer("{name}", .., persistent=False) in __init__.'
    )


def _site(exported: torch.fx.GraphModule, name: str) -> Site:
    nodes = exported.graph.find_nodes(op="get_attr", target=name)
    users = [user for node in nodes for user in node.users]
    return site_of_node(users[0]) if users else Site()


def _places(model: nn.Module, tensor: Tensor) -> Iterator[str]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") and name in nn.Module().__dict__:
                continue
            for rest in _within(value, tensor, _DEPTH):
                yield f"{path}.{name}{rest}".lstrip(".")


def _within(value: Any, tensor: Tensor, depth: int) -> Iterator[str]:
    if value is tensor:
        yield ""
    elif depth:
        for step, item in _items(value):
            for rest in _within(item, tensor, depth - 1):
                yield step + rest


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, Tensor | nn.Module | type) and hasattr(value, "__dict__"):
        yield from ((f".{name}", item) for name, item in vars(value).items())
