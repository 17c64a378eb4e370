# pyright: basic
# torch's tracing API is private and only partly typed.
"""Replace attention calls whose kernels exist on GPUs only by ops that run everywhere.

`flex_attention` with its score and mask functions, and `varlen_attn` by cumulative lengths, are
single calls in the graph that torch traces. They are replaced by products, a mask and a softmax
before the graph is differentiated; the functions of scores and masks become ops of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardweave.ir.capture.site import CaptureError, site_of_node

Function = Callable[..., Tensor]
"""A function of a score (or none), four indices (sample, head, query, key), and buffers."""

FLEX = "flex_attention"
VARLEN = "torch_attn._varlen_attn"


def replace_attention(exported: torch.fx.GraphModule) -> None:
    """Replace each `flex_attention` and `varlen_attn` call of a graph by dense attention."""
    changed = False
    for node in exported.graph.nodes:
        if node.op != "call_function":
            continue
        if getattr(node.target, "__name__", "") == FLEX and len(node.args) > 8:
            _replace_flex(exported, node)
            changed = True
        elif str(node.target).startswith(VARLEN):
            _check_varlen(node)
            node.target = varlen
            changed = True
    if changed:
        exported.recompile()


def _replace_flex(exported: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    arguments: Any = node.args
    query, key, value, score, blocks, scale, _, score_buffers, mask_buffers = arguments[:9]
    score_mod, mask_mod = (exported.get_submodule(part.target) for part in (score, blocks[-1]))
    needs_scores = not _is_identity(score_mod) or _reads_more_than_output(node)
    attend: Any = flex if needs_scores else flex_without_scores
    node.target = _named(partial(attend, score_mod, mask_mod, scale))
    node.args = (query, key, value, tuple(score_buffers), tuple(mask_buffers))
    node.kwargs = {}


def _named(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a function under the name `dense_attention`, since graphs name their targets."""

    def dense_attention(*args: object) -> object:
        return function(*args)

    return dense_attention


def _is_identity(score_mod: Any) -> bool:
    first = next(iter(score_mod.graph.nodes))
    return score_mod.graph.output_node().args[0] is first


def _reads_more_than_output(node: torch.fx.Node) -> bool:
    """True if the graph reads the call's other results: log-sums or maxima of scores."""
    return any(user.args[1] != 0 and user.users for user in node.users)


def flex(
    score_mod: Function,
    mask_mod: Function,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_buffers: Sequence[Tensor],
    mask_buffers: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute flex_attention: the output, log2 of the sum of exponentials of scores, and the
    largest score.

    Shapes: query B x H x L x E, key and value B x K x S x E, where K divides H. The output is zero
    for a query that sees no key.
    """
    key, value = (_one_each(part, query) for part in (key, value))
    indices = _indices(query, key)
    scores = query @ key.transpose(-1, -2) * scale
    scores = _over_all(score_mod, (0,))(scores, *indices, *score_buffers)
    mask = _over_all(mask_mod, ())(*indices, *mask_buffers)
    scores = torch.where(mask, scores, -math.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    finite = torch.where(largest == -math.inf, 0.0, largest)
    weights = (scores - finite).exp()
    total = weights.sum(-1, keepdim=True)
    output = (weights / torch.where(total == 0, 1.0, total)) @ value
    log2_sum = (total.log() + finite).squeeze(-1) / math.log(2)
    return output, log2_sum, largest.squeeze(-1)


def flex_without_scores(
    score_mod: Function,
    mask_mod: Function,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_buffers: Sequence[Tensor],
    mask_buffers: Sequence[Tensor],
) -> tuple[Tensor]:
    """Compute flex_attention's output alone, with an identity score_mod: masked attention."""
    mask = _over_all(mask_mod, ())(*_indices(query, key), *mask_buffers)
    mask = mask.expand(query.shape[0], -1, -1, -1) if mask.dim() == 4 else mask
    is_grouped = key.shape[1] != query.shape[1]
    return (
        F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        ),
    )


def _one_each(part: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of keys or values to the number of query heads."""
    shared = query.shape[1] // part.shape[1]
    return part if shared == 1 else part.repeat_interleave(shared, dim=1)


def _indices(query: Tensor, key: Tensor) -> list[Tensor]:
    sizes = (*query.shape[:3], key.shape[2])
    return [torch.arange(size, device=query.device) for size in sizes]


def _over_all(function: Function, score: tuple[int, ...]) -> Function:
    """Lift a function of one score and its indices to all scores: torch.vmap over each index.
    score: (0,) if the function takes a score, else ()."""

    def mapped(*args: Tensor) -> Tensor:
        num_buffers = len(args) - len(score) - 4
        rest, batched = (None,) * num_buffers, function
        for dim in (3, 2, 1, 0):
            of_index = tuple(0 if index == dim else None for index in range(4))
            batched = torch.vmap(batched, in_dims=(*score, *of_index, *rest))
        return batched(*args)

    return mapped


def _check_varlen(node: torch.fx.Node) -> None:
    names = ("seqused_k", "block_table")
    given = [n for n, arg in zip(names, node.args[11:13], strict=False) if arg is not None]
    given += [name for name in names if node.kwargs.get(name) is not None]
    if given:
        raise CaptureError(
            f"{site_of_node(node)}: varlen_attn has the argument {given[0]}, which is for "
            "inference and cannot be trained; remove the argument."
        )


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor]:
    """Compute varlen_attn: attend within each of several concatenated sequences. Returns the
    output, and a placeholder for the log-sum-exp.

    Shapes: query T x H x E, key and value S x K x E; cu_seq: 0, then the end of each sequence.
    Windows and causality count from the ends of sequences, as in torch's kernels.
    """
    of_query, end_q = _sequences(cu_seq_q, query)
    of_key, end_k = _sequences(cu_seq_q if cu_seq_k is None else cu_seq_k, key)
    ahead = end_q[:, None] - end_k[None]
    left, right = (-1, 0) if is_causal else tuple(window_size or (-1, -1))
    mask = of_query[:, None] == of_key[None]
    if right >= 0:
        mask = mask & (ahead <= right)
    if left >= 0:
        mask = mask & (ahead >= -left)
    heads = (part.transpose(0, 1)[None] for part in (query, key, value))
    output = F.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    output = output[0].transpose(0, 1)
    return output, output.detach()


def _sequences(ends: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence index of each position, and its distance from the sequence's end."""
    positions = torch.arange(part.shape[0], device=part.device)
    sequence = (positions[:, None] >= ends[None, 1:]).sum(-1)
    return sequence, ends[(sequence + 1).clamp(max=ends.shape[0] - 1)] - positions
