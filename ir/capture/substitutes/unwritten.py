"""Tensors made without values: a program has zeros there, and nothing may read them.

Autograd and composites make such tensors and write all of them; functional graphs say that with
ops that give the written tensor. What else takes one reads what is not defined.
"""

from __future__ import annotations

import torch

from shardweave.ir.capture.site import CaptureError, site_of_node
from shardweave.ir.library.pure_ops import UNWRITTEN

_WRITERS = (
    "copy",
    "fill",
    "zero",
    "index_put",
    "index_copy",
    "_unsafe_index_put",
    "masked_scatter",
    "bernoulli.p",
    "bernoulli.Tensor",
    "uniform",
    "normal_functional",
    "exponential",
)
_VIEWS = frozenset(
    "slice select view reshape alias detach permute t transpose expand unsqueeze squeeze diagonal "
    "as_strided unbind split split_with_sizes _unsafe_view clone".split()
)


class Unwritten:
    """The nodes of a graph that have no values yet."""

    def __init__(self) -> None:
        self._nodes: set[torch.fx.Node] = set()

    def visit(self, node: torch.fx.Node) -> None:
        """Note a node. Raises CaptureError if it reads what was not written."""
        target = str(node.target).removeprefix("aten.")
        if target.removesuffix(".default") in UNWRITTEN:
            self._nodes.add(node)
            return
        read = [operand for operand in node.all_input_nodes if operand in self._nodes]
        name = target.partition(".")[0]
        if not read or self._is_write(target, name, node):
            return
        if name in _VIEWS or target == "<built-in function getitem>":
            self._nodes.add(node)
            return
        raise CaptureError(
            f"{site_of_node(read[0])}: {read[0].target} makes a tensor without values, which "
            f"{node.target} reads, so the step has no defined result; use zeros in the model."
        )

    def _is_write(self, target: str, name: str, node: torch.fx.Node) -> bool:
        into, *others = node.all_input_nodes
        is_writer = name in _WRITERS or target in _WRITERS or "scatter" in name
        return is_writer and into in self._nodes and self._nodes.isdisjoint(others)
