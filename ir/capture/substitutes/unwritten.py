"""Uninitialized tensors (`torch.empty`): a program has zeros there, and no op may read them.

Autograd and composites make such tensors and overwrite all elements; functional graphs do so by ops
that return the written tensor. Any other op would read undefined values, and is refused.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from shardweave.ir.capture.site import CaptureError, site_of_node
from shardweave.ir.library.pure_ops import UNWRITTEN
from shardweave.ir.ops.registry import spec_named
from shardweave.ir.torch_private import OpOverload, schema_of


class Unwritten:
    """Tracks graph nodes with uninitialized elements, such as results of torch.empty."""

    def __init__(self) -> None:
        self._nodes: set[torch.fx.Node] = set()

    def visit(self, node: torch.fx.Node) -> None:
        """Note a node. Raises CaptureError if it reads an uninitialized tensor."""
        target: Any = node.target
        name = str(target).removesuffix(".default")
        if name.removeprefix("aten.") in UNWRITTEN:
            self._nodes.add(node)
            return
        read = [operand for operand in node.all_input_nodes if operand in self._nodes]
        if not read or self._is_write(name, node):
            return
        if _shows(target, name):
            self._nodes.add(node)
            return
        raise CaptureError(
            f"{site_of_node(read[0])}: {read[0].target} makes an uninitialized tensor, which "
            f"{node.target} reads, so that the result of the step is undefined; use torch.zeros "
            "in the model."
        )

    def _is_write(self, name: str, node: torch.fx.Node) -> bool:
        into, *others = node.all_input_nodes
        is_into = into in self._nodes and self._nodes.isdisjoint(others)
        return is_into and spec_named(name).overwrites


def _shows(target: Any, name: str) -> bool:
    """True if a call only passes its operand on: a view, a copy, or one item of a tuple."""
    if not isinstance(target, OpOverload):
        return name == "<built-in function getitem>"
    overload = cast("OpOverload[..., Any]", target)
    is_view = any(result.alias_info is not None for result in schema_of(overload).returns)
    return is_view or name in ("aten.clone", "aten._unsafe_view")
