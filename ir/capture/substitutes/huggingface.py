# pyright: basic
"""Hugging Face models traced as they run in eager mode: causal attention stays causal.

When they are traced, these models write out an S x S mask, and repeat keys and values for it, that
eager mode, having looked at the data, leaves to the attention kernel. What they note of inner
modules (hidden states, attentions, router logits) they note by hooks, which they install under a
lock when they are first asked for it: code that torch cannot trace. Their CTC loss joins the labels
of all samples in one row, of a length that depends on them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@contextlib.contextmanager
def eager_masks(inputs: Collection[str]) -> Iterator[None]:
    """Without a mask for packed sequences, unless positions are given that may be packed.

    Positions that a model makes itself count from 0, and eager mode finds that they are of one
    sequence. inputs: the names of the model's inputs.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or "position_ids" in inputs:
        yield
        return
    with mock.patch.object(masks, "find_packed_sequence_indices", _one_sequence):
        yield


def _one_sequence(*args: object, **kwargs: object) -> None:
    return None


@contextlib.contextmanager
def masks_as_in_eager() -> Iterator[None]:
    """With the mask of ones that some relatives of T5 make when they are not traced, and read."""
    with contextlib.ExitStack() as stack:
        for name in _MASKED:
            module = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
            if module is not None:
                stack.enter_context(mock.patch.object(module, "is_torchdynamo_compiling", _no))
        yield


_MASKED = ("longt5", "switch_transformers")


def _no() -> bool:
    return False


@contextlib.contextmanager
def noting_inner_outputs(model: nn.Module) -> Iterator[None]:
    """With the hooks that note outputs of inner modules, where no call has installed them yet.

    They do nothing unless forward asks for such outputs, and are taken out again.
    """
    noting = sys.modules.get("transformers.utils.output_capturing")
    modeling = sys.modules.get("transformers.modeling_utils")
    if noting is None or modeling is None:
        yield
        return
    own = [m for m in model.modules() if isinstance(m, modeling.PreTrainedModel)]
    hooks = {module: dict(module._forward_hooks) for module in model.modules()}
    new = [module for module in own if not _notes(module)]
    for module in own:
        # The outermost first, as eager does, which installs those of the models in it as well.
        if not any(isinstance(m, modeling.PreTrainedModel) and _notes(m) for m in module.modules()):
            noting.install_all_output_capturing_hooks(module)
    for module, before in hooks.items():
        _number_alike(module, before)
    try:
        yield
    finally:
        for module, before in hooks.items():
            for key in module._forward_hooks.keys() - before.keys():
                del module._forward_hooks[key]
        for module in new:
            vars(module).pop(_INSTALLED, None)


@contextlib.contextmanager
def padded_labels() -> Iterator[None]:
    """With the loss of speech recognition on labels that stay N x S."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    if losses is None or "ForCTC" not in losses.LOSS_MAPPING:
        yield
        return
    with mock.patch.dict(losses.LOSS_MAPPING, {"ForCTC": _ctc_loss}):
        yield


def _ctc_loss(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean",
    zero_infinity: bool = False,
    ignore_index: int = -100,
    **_: object,
) -> Tensor:
    is_read = (labels != ignore_index) & (labels != blank_token_id)
    first = (~is_read).long().argsort(dim=1, stable=True)
    scores = F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    return F.ctc_loss(
        scores,
        labels.gather(1, first),
        logit_lengths,
        is_read.sum(-1),
        blank=blank_token_id,
        reduction=reduction,
        zero_infinity=zero_infinity,
    )


@contextlib.contextmanager
def without_leaf_inputs(model: nn.Module) -> Iterator[None]:
    """Encoders of sound do not mark their input as one that requires a gradient.

    They do so for checkpoints that need it; nobody reads that gradient.
    """
    marking = [part for part in model.modules() if getattr(part, _MARKS, False) is True]
    for part in marking:
        setattr(part, _MARKS, False)
    try:
        yield
    finally:
        for part in marking:
            setattr(part, _MARKS, True)


_MARKS = "_requires_grad"


def _number_alike(module: nn.Module, before: Collection[int]) -> None:
    """Number the new hooks of a module from -1 down: torch counts those of all modules together, by
    which equal blocks would differ."""
    new = [key for key in module._forward_hooks if key not in before]
    for number, key in enumerate(new, start=1):
        module._forward_hooks[-number] = module._forward_hooks.pop(key)


_INSTALLED = "_output_capturing_hooks_installed"


def _notes(module: nn.Module) -> bool:
    """Whether a model of Hugging Face has the hooks already."""
    return getattr(module, _INSTALLED, False)


@contextlib.contextmanager
def without_cache(model: nn.Module, is_step: bool) -> Iterator[None]:
    """A step returns no keys and values for later tokens: it trains or evaluates, in one pass."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caching = [c for c in configs.values() if is_step and getattr(c, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
