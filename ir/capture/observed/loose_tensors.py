# pyright: basic
"""Tensors that a model reads but does not own: plain attributes, lists, globals. All are refused.

A step holds the parameters and buffers of a model, by name. A tensor of another kind has no name
to be stored, sharded, updated or saved under.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.ir.capture.site import CaptureError, Site, site_of_node

_DEPTH = 3
"""How deep lists, dicts and plain objects are searched for a tensor."""


def check_all_registered(model: nn.Module, exported: torch.fx.GraphModule) -> None:
    """Raises CaptureError for a tensor in the graph that is no parameter or buffer of `model`."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, tensor in (*exported.named_parameters(), *exported.named_buffers()):
        nodes = exported.graph.find_nodes(op="get_attr", target=name)
        is_read = any(node.users for node in nodes)
        if id(tensor) not in own and is_read:
            raise CaptureError(_refusal(model, tensor, _site(exported, name)))


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
    """Where the modules of a model hold a tensor, as Python writes it."""
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
