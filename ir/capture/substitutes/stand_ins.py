# pyright: basic
"""Replace some torch calls by equivalent calls before the graph is differentiated.

- `sgn` of real numbers becomes `sign`, which is the same, and has a gradient that can be traced.
  The gradient of `sgn` is a special zero tensor that torch makes outside of the trace.
- `multilabel_margin_loss` is written out. What torch traces in its place is wrong where a row of
  targets ends early: it also compares class 0 with the others, once for each target after the end.
- A determinant takes a contiguous matrix. Torch factors a matrix as it lies in memory, and traces
  the gradient by the factors. For a weight with other strides, such as the `Q` of
  `torch.linalg.qr`, this would be the gradient of its transpose: a program's values are dense.
- The result of `einsum` is copied if code changes it in place: it is a permuted view, and torch
  cannot propagate the change to the view's base.
- `embedding_bag` of bags of one length becomes a lookup and a sum, which can be sharded by samples,
  and by rows and columns of the table.
- `index_fill` with a tensor value becomes `where`: torch's gradient counts each index once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardweave.ir.capture.substitutes.boolean_rows import is_written
from shardweave.ir.torch_private import pytree

_SIGNS: dict[Any, Any] = {torch.sgn: torch.sign, "sgn": "sign"}


def replace_calls(exported: torch.fx.GraphModule) -> None:
    """Replace each call in a graph for which this file has an equivalent function."""
    for node in exported.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        target = _of_method(node) if node.op == "call_method" else node.target
        if target in _DETERMINANTS:
            node.op, node.target = "call_function", _of_dense(target)
        elif node.target in _SIGNS and not node.meta["example_value"].is_complex():
            node.target = _SIGNS[node.target]
        elif node.target is torch.einsum and is_written(node):
            node.target = einsum
        elif node.target in _WRITTEN_OUT:
            node.op, node.target = "call_function", _WRITTEN_OUT[node.target]
    exported.recompile()


def einsum(*args: Any) -> Tensor:
    return torch.einsum(*args).clone()


_DETERMINANTS: set[Any] = {
    torch.det, torch.slogdet, torch.logdet, torch.linalg.det, torch.linalg.slogdet,
}  # fmt: skip


def _of_method(node: torch.fx.Node) -> Any:
    return getattr(torch, str(node.target), None)


def _of_dense(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def of_dense(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
        return function(*args, **kwargs)

    return of_dense


def wide_under_autocast(input: Tensor) -> Tensor:
    """Widen a loss's input to float32 under torch.autocast, if it is float16 or bfloat16."""
    is_cast = torch.is_autocast_enabled(input.device.type)
    return input.float() if is_cast and input.dtype in (torch.bfloat16, torch.float16) else input


def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute torch's `multilabel_margin_loss`: the sum over target classes y and other classes c
    of max(0, 1 - x[y] + x[c]) / C.

    Shapes: input and target N x C, or C; the targets of a row end at its first -1.
    """
    input = wide_under_autocast(input)
    if input.dim() == 0:
        input, target = input[None], target.reshape(1)
    counts = (target < 0).cumsum(-1) == 0
    index = torch.where(counts, target, 0)
    is_target = torch.zeros_like(input).scatter_add(-1, index, counts.to(input.dtype)) > 0
    distance = 1 - input.gather(-1, index)[..., :, None] + input[..., None, :]
    compared = counts[..., :, None] & ~is_target[..., None, :]
    rows = torch.where(compared, distance.clamp_min(0), 0).sum((-1, -2)) / input.shape[-1]
    if size_average is not None or reduce is not None:
        is_mean = size_average is None or size_average
        reduction = "none" if reduce is False else "mean" if is_mean else "sum"
    return rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Compute torch's `embedding_bag`; for bags of one length, by a lookup and a sum.

    Shapes: input B x L, weight V x E, per_sample_weights B x L  ->  B x E.
    """
    is_lookup = input.dim() == 2 and offsets is None and not input.is_floating_point()
    if not is_lookup or mode == "max" or max_norm is not None or scale_grad_by_freq or sparse:
        options = max_norm, norm_type, scale_grad_by_freq, mode, sparse
        rest = per_sample_weights, include_last_offset, padding_idx
        return F.embedding_bag(input, weight, offsets, *options, *rest)
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    if padding_idx is None:
        return rows.mean(1) if mode == "mean" and input.shape[1] else rows.sum(1)
    counts = input != padding_idx % weight.shape[0]
    total = torch.where(counts[..., None], rows, 0).sum(1)
    return total / counts.sum(1, keepdim=True).clamp_min(1) if mode == "mean" else total


def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """Compute `torch.index_fill`."""
    if not isinstance(value, Tensor):
        return torch.index_fill(input, dim, index, value)
    size, rest = (input.shape[dim], input.dim() - 1 - dim % input.dim()) if input.dim() else (1, 0)
    named = torch.zeros(size, dtype=torch.bool, device=input.device).index_fill(0, index, True)
    named = named.reshape(size, *[1] * rest) if input.dim() else named.reshape(())
    return torch.where(named, value.to(input.dtype), input)


def _index_fill_in_place(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    return input.copy_(index_fill(input, dim, index, value))


_WRITTEN_OUT: dict[Any, Any] = {
    torch.index_fill: index_fill,
    "index_fill": index_fill,
    "index_fill_": _index_fill_in_place,
    F.multilabel_margin_loss: multilabel_margin_loss,
    F.embedding_bag: embedding_bag,
}
