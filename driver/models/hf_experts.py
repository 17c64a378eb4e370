"""Hugging Face's mixtures of experts, run in a form that can be captured and cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardweave.driver.models.mixture import DROPPED, Experts, every_expert, experts_with_capacity

OURS = "shardweave"
"""Name under which our implementations of experts are registered with transformers."""


def choose_experts(
    module: nn.Module, *, capacity: float | None = None, groups: int = 1
) -> list[str]:
    """Run a Hugging Face model's experts in a form that can be captured, and sharded over devices.

    Without a capacity every expert computes every token (`mixture.every_expert`). With one, each
    expert has slots for tokens of each of `groups` equal parts of the batch, such as its sequences
    (`mixture.experts_with_capacity`); a buffer `dropped_choices` of each module of experts counts
    the choices without a slot. Experts whose outputs are normalised one by one run as batched_mm.
    Returns a note on the choice; none for a model without such experts.

    Raises ValueError for a capacity if the model has no experts, or normalised ones.
    """
    parts = dict(_experts_of(module))
    is_normed = any(getattr(part, "has_post_expert_norm", False) for part in parts.values())
    if capacity is not None and (is_normed or not parts):
        why = "its experts' outputs are normalised" if parts else "the model has no such experts"
        raise ValueError(f"capacity={capacity:g} has no effect, since {why}; leave it out.")
    if not parts:
        return []
    form = next(iter(parts.values())).config._experts_implementation
    for part in parts.values():
        part.config._experts_implementation = "batched_mm" if is_normed else OURS
        if not is_normed:
            _prepare(part, capacity, groups)
    how = "as batched_mm" if is_normed else _form(capacity, groups)
    return [f"experts run {how}, in place of {form}, the default"]


def check_given_experts(module: nn.Module, capacity: float | None) -> None:
    """Check a user's choice of experts_implementation. Raises ValueError if it loops over each
    expert's tokens, which cannot be captured, or if a capacity is given, which only our own
    implementation has."""
    if capacity is not None:
        why = "experts_implementation is given"
        raise ValueError(
            f"capacity={capacity:g} has no effect, since {why}; leave one of the two out."
        )
    for name, part in _experts_of(module):
        if getattr(part.config, "_experts_implementation", None) == "eager":
            raise ValueError(
                f"module '{name}' ({type(part).__name__}) runs its experts in a Python loop that "
                "depends on the data and cannot be captured; leave experts_implementation out, "
                'or set experts_implementation="batched_mm".'
            )


def _experts_of(module: nn.Module) -> list[tuple[str, Any]]:
    # The two marks that transformers' `use_experts_implementation` leaves on a module.
    return [
        (name, part)
        for name, part in module.named_modules()
        if hasattr(part, "is_transposed") and hasattr(part, "_apply_gate")
    ]


def _form(capacity: float | None, groups: int) -> str:
    if capacity is None:
        return "in one product, every expert computing every token"
    return f"with capacity {capacity:g}, tokens in {groups} groups"


def _prepare(part: Any, capacity: float | None, groups: int) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(OURS, _forward)
    part.capacity, part.groups = capacity, groups
    if capacity is not None:
        part.register_buffer(DROPPED, torch.zeros(2, dtype=torch.int64), persistent=False)


def _forward(part: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Forward pass that transformers calls in place of the module's own."""
    experts = Experts(
        up=_laid_out(part, part.gate_up_proj if part.has_gate else part.up_proj),
        down=_laid_out(part, part.down_proj),
        activation=part._apply_gate if part.has_gate else part.act_fn,
        up_bias=_up_bias(part),
        down_bias=part.down_proj_bias if part.has_bias else None,
    )
    weights = weights.to(x.dtype)
    if part.capacity is None:
        return every_expert(x, chosen, weights, experts)
    out, dropped = experts_with_capacity(
        x, chosen, weights, experts, capacity=part.capacity, groups=part.groups
    )
    getattr(part, DROPPED).copy_(dropped)
    return out


def _laid_out(part: Any, weight: Tensor) -> Tensor:
    """Transpose a weight to experts x inputs x outputs, if it is not so already."""
    return weight if part.is_transposed else weight.transpose(1, 2)


def _up_bias(part: Any) -> Tensor | None:
    if not part.has_bias:
        return None
    return part.gate_up_proj_bias if part.has_gate else part.up_proj_bias
