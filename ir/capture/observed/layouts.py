# pyright: basic
# torch's graphs are only partly typed.
"""Refuse tensors with a layout that is not dense: sparse, nested or blocked.

A program's values are dense. Torch differentiates sparse tensors in kernels that a trace does not
see, so that the traced gradient would be zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardweave.ir.capture.site import CaptureError, Site, site_of_node

NESTED_REMEDY = "pad it to a dense tensor, with a mask of what counts"
SPARSE_REMEDY = (
    "keep it dense: x in place of x.to_sparse(), a dense mask and x * mask in place of "
    "sparse_mask, A @ x in place of torch.sparse.mm, or index_add on rows for a matrix of edges"
)
_REMEDIES = {
    "jagged": NESTED_REMEDY,
    "mkldnn": "leave out to_mkldnn(); kernels choose their own layout",
}


def check_layouts(graph: torch.fx.Graph) -> None:
    """Raises CaptureError, with the line, if a graph reads or makes a tensor that is not dense."""
    for node in graph.nodes:
        layout = _layout(node.meta.get("example_value"))
        if layout is None or (node.op in ("placeholder", "get_attr") and not node.users):
            continue
        is_read = node.op in ("placeholder", "get_attr")
        site = site_of_node(next(iter(node.users)) if is_read else node)
        raise CaptureError(refusal(site, layout, "reads" if is_read else "makes"))


def refusal(site: Site, layout: torch.layout, does: str) -> str:
    """Make the error message for a tensor that is not dense. does: "reads" or "makes"."""
    name = str(layout).removeprefix("torch.").lstrip("_")
    return (
        f"{site}: this {does} a tensor of layout {name}, and a program's tensors are dense; "
        f"{_REMEDIES.get(name, SPARSE_REMEDY)}."
    )


def _layout(value: Any) -> torch.layout | None:
    """Return the first layout that is not dense in a tensor or sequence; None if all are."""
    if isinstance(value, torch.Tensor):
        return None if value.layout == torch.strided else value.layout
    if isinstance(value, Sequence) and not isinstance(value, str):
        return next(filter(None, map(_layout, value)), None)
    return None


def dense_gradients(graph: torch.fx.Graph) -> list[str]:
    """Set `sparse=False` in all lookups of a graph, so that their gradients are dense tensors of
    the same values; return a note for each."""
    changed = [node for node in graph.nodes if _asks_for_sparse(node)]
    for node in changed:
        if "sparse" in node.kwargs:
            node.update_kwarg("sparse", False)
        else:
            node.update_arg(_SPARSE[node.target], False)
    return [
        f"{site_of_node(node)}: the gradient of a table with sparse=True is dense in a step, with "
        "the same values; leave sparse=True out, and take torch.optim.Adam for SparseAdam"
        for node in changed
    ]


_SPARSE: dict[Any, int] = {
    torch.nn.functional.embedding: 6,
    torch.nn.functional.embedding_bag: 7,
    torch.embedding: 4,
    torch.embedding_bag: 5,
}
"""Position of the argument `sparse`, by lookup function."""


def _asks_for_sparse(node: torch.fx.Node) -> bool:
    position = _SPARSE.get(node.target) if node.op == "call_function" else None
    if position is None:
        return False
    positional = node.args[position] if len(node.args) > position else False
    return bool(node.kwargs.get("sparse", positional))
