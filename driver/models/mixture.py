"""Mixtures of experts in static shapes, as sums and products that factor rules can shard.

A router assigns each token k of E experts, with weights. The number of tokens of an expert depends
on the data, which no program of fixed shapes expresses. These two forms have fixed shapes.

`every_expert`: each expert computes every token; experts that a token did not choose get weight 0.
No token is dropped. The experts form one wide MLP; sharded by expert, its last product is summed
over the devices. It costs E / k times what the chosen experts alone would.

`experts_with_capacity` (GShard, Lepikhin et al. 2020; Switch Transformers, Fedus et al. 2021): each
expert has a fixed number of slots for the tokens of a group; tokens without a slot are dropped and
counted. Resharding from groups to experts is an all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

DROPPED = "dropped_choices"
"""Name of the buffer for counts of `experts_with_capacity`: dropped and all choices (int64)."""


@dataclass(frozen=True)
class Experts:
    """Weights of E experts of two linear layers each, and the activation between the layers.

    up: E x hidden x wide. down: E x inner x hidden. activation: .. x wide -> .. x inner, alike for
    all experts. up_bias, down_bias: E x wide, E x hidden.
    """

    up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def every_expert(x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Compute the weighted sum of each token's chosen experts; every expert computes every token.

    Shapes: x tokens x hidden, chosen (int64 in [0, E)) and weights tokens x k -> tokens x hidden.
    """
    count, hidden, wide = experts.up.shape
    given = weights.new_zeros(x.shape[0], count).scatter_add(1, chosen, weights)
    up = x @ experts.up.transpose(0, 1).reshape(hidden, count * wide)
    if experts.up_bias is not None:
        up = up + experts.up_bias.flatten()
    inner = experts.activation(up.view(-1, count, wide)) * given.unsqueeze(-1)
    out = inner.flatten(1) @ experts.down.flatten(0, 1)
    return out if experts.down_bias is None else out + given @ experts.down_bias


def slots_of(tokens: int, choices: int, count: int, capacity: float) -> int:
    """Slots of each of `count` experts for a group of `tokens`, which each choose `choices`
    experts.

    capacity: factor relative to balanced routing. There are at most as many slots as tokens, since
    a token chooses an expert at most once; so a capacity of `count / choices` drops none.
    """
    return min(tokens, math.ceil(capacity * tokens * choices / count))


def experts_with_capacity(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts, *, capacity: float, groups: int
) -> tuple[Tensor, Tensor]:
    """Compute the weighted sum of each token's chosen experts that have a slot for it. Also returns
    the number of dropped choices and of all choices (two int64).

    Tokens form `groups` groups of equal length; within a group, earlier tokens get slots first.
    Shapes as in `every_expert`. Raises ValueError if groups do not divide tokens.
    """
    (tokens, hidden), choices, count = x.shape, chosen.shape[1], experts.up.shape[0]
    if tokens % groups:
        raise ValueError(
            f"{tokens} tokens do not divide into {groups} groups of equal size; use another "
            "number of groups, such as the number of sequences."
        )
    size = tokens // groups
    slots = slots_of(size, choices, count, capacity)
    places = _assign(chosen.reshape(groups, size * choices), count, slots)
    # An empty slot computes the first token, with weight 0.
    given = weights.reshape(groups, size * choices).gather(1, places.pair) * places.is_filled
    token = (places.pair // choices).unsqueeze(-1).expand(-1, -1, hidden)
    rows = x.view(groups, size, hidden).gather(1, token)
    shares = _by_expert(given.unsqueeze(-1), count)
    out = _products(_by_expert(rows, count), shares, experts)
    out = out.view(count, groups, slots, hidden).transpose(0, 1)
    slot = places.slot.unsqueeze(-1).expand(-1, -1, hidden)
    parts = out.reshape(groups, count * slots, hidden).gather(1, slot)
    parts = parts.masked_fill(~places.is_kept.unsqueeze(-1), 0)
    dropped = (~places.is_kept).sum()
    counts = torch.stack([dropped, torch.full_like(dropped, tokens * choices)])
    return parts.view(tokens, choices, hidden).sum(1), counts


def dropped_choices(module: nn.Module) -> tuple[int, int] | None:
    """Count the choices of experts that a model dropped in its last step, and all its choices. None
    for a model without experts that have a capacity. Collective on a mesh."""
    counts = [
        (buffer.full_tensor() if isinstance(buffer, DTensor) else buffer).tolist()
        for name, buffer in module.named_buffers()
        if name.split(".")[-1] == DROPPED
    ]
    return (sum(c[0] for c in counts), sum(c[1] for c in counts)) if counts else None


def _by_expert(slots: Tensor, count: int) -> Tensor:
    """Regroup slots by expert: groups x (E * slots) x n -> E x (groups * slots) x n."""
    groups, _, size = slots.shape
    return slots.view(groups, count, -1, size).transpose(0, 1).flatten(1, 2)


def _products(rows: Tensor, given: Tensor, experts: Experts) -> Tensor:
    """Each expert's weighted outputs.

    Shapes: E x rows x hidden, E x rows x 1 -> E x rows x hidden.
    """
    up = torch.bmm(rows, experts.up)
    if experts.up_bias is not None:
        up = up + experts.up_bias.unsqueeze(1)
    inner = experts.activation(up)
    if experts.down_bias is not None:
        return (torch.bmm(inner, experts.down) + experts.down_bias.unsqueeze(1)) * given
    # Weighted before the product, so that the result can stay a partial sum.
    return torch.bmm(inner * given, experts.down)


@dataclass(frozen=True)
class _Places:
    """Assignment of the pairs (token, choice) of a group to slots.

    Shapes: slot (0 if dropped) and is_kept groups x pairs; pair (0 in an empty slot) and is_filled
    groups x (E * slots).
    """

    slot: Tensor
    is_kept: Tensor
    pair: Tensor
    is_filled: Tensor


def _assign(pairs: Tensor, count: int, slots: int) -> _Places:
    """Assign pairs to slots. pairs: the expert of each pair, of shape groups x pairs."""
    number = pairs.shape[1]
    is_of = (pairs.unsqueeze(-1) == torch.arange(count, device=pairs.device)).long()
    place = (is_of.cumsum(1) * is_of).sum(-1) - 1
    is_kept = place < slots
    slot = pairs * slots + place
    # Pairs without a slot go into an extra slot, which is removed again.
    order = torch.arange(number, device=pairs.device).expand_as(slot)
    empty = torch.full((pairs.shape[0], count * slots + 1), number, device=pairs.device)
    held = empty.scatter(1, torch.where(is_kept, slot, count * slots), order)[:, :-1]
    is_filled = held < number
    return _Places(
        torch.where(is_kept, slot, 0), is_kept, torch.where(is_filled, held, 0), is_filled
    )
