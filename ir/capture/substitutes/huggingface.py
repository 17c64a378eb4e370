# pyright: basic
"""Hugging Face models traced as they run in eager mode: causal attention stays causal.

When traced, these models write out an S x S mask and repeat keys and values for it; in eager mode
they inspect the data and leave both to the attention kernel. They collect outputs of inner modules
(hidden states, attentions, router logits) by hooks, which they install under a lock on first use:
code that torch cannot trace. Their CTC loss joins the labels of all samples in one row, whose
length depends on the data.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LogProbabilities:
    """Replaces TRL's autograd function of this name by plain ops, which autograd differentiates.

    TRL's function writes products into tiles with `out=`, or runs Triton kernels; torch traces
    neither. On a GPU it selects the counted rows by their labels, so that shapes depend on the
    data. A plan can shard this product and softmax, or split them into chunks.
    """

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: Collection[str] = (),
    ) -> tuple[Tensor | None, ...]:
        """Return log-probabilities of the targets, entropies, the log of the summed squares of
        probabilities, mean logits, and is-top-1 flags; the latter four are None if not asked for.

        hidden: rows x width. weight: vocabulary x width. targets: rows.
        """
        del chunk_size
        z = F.linear(hidden, weight, bias).float() * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        z = z / temperature
        logs = z.log_softmax(-1)
        chosen = logs.gather(-1, targets[:, None])[:, 0]
        free = logs.detach()
        more = {
            "entropy": lambda: -(logs.exp() * logs).sum(-1),
            "log_sum_sq_probs": lambda: (2 * free).logsumexp(-1),
            "mean_logits": lambda: z.detach().mean(-1),
            "is_top1": lambda: free.argmax(-1) == targets,
        }
        return chosen, *(make() if name in outputs else None for name, make in more.items())


@contextlib.contextmanager
def as_in_eager(model: nn.Module, inputs: Collection[str], *, is_step: bool) -> Iterator[None]:
    """Let traces in the context run the eager code of Hugging Face models and TRL trainers.

    inputs: names of the model's inputs. Unless `position_ids` is among them, positions count from 0
    in one sequence; given position_ids may belong to packed sequences. is_step: whether to turn
    `use_cache` off, as a training step needs no keys and values for later tokens.
    """
    configs = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
    losses = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
    with (
        contextlib.ExitStack() as stack,
        mock.patch.dict(losses, {"ForCTC": _ctc_loss} if "ForCTC" in losses else {}),
        _without_flag(configs if is_step else (), "use_cache"),
        # Encoders of sound mark their input as one that requires a gradient, for checkpoints that
        # need it; nobody reads that gradient.
        _without_flag(model.modules(), "_requires_grad"),
        _noting_inner_outputs(model),
    ):
        for module, name, new in _REPLACED:
            is_theirs = name == _PACKED and "position_ids" in inputs
            if hasattr(sys.modules.get(module), name) and not is_theirs:
                stack.enter_context(mock.patch.object(sys.modules[module], name, new))
        yield


@contextlib.contextmanager
def _without_flag(holders: Iterable[object], name: str) -> Iterator[None]:
    """Set the flag `name` to False on those objects where it is True, while in the context."""
    flagged = [holder for holder in holders if getattr(holder, name, False) is True]
    for holder in flagged:
        setattr(holder, name, False)
    try:
        yield
    finally:
        for holder in flagged:
            setattr(holder, name, True)


def _none(*args: object, **kwargs: object) -> None:
    return None


_PACKED = "find_packed_sequence_indices"
_REPLACED: tuple[tuple[str, str, object], ...] = (
    ("transformers.masking_utils", _PACKED, _none),
    # The mask of ones that some relatives of T5 make when they are not traced, and read.
    ("transformers.models.longt5.modeling_longt5", "is_torchdynamo_compiling", _none),
    ("transformers.models.switch_transformers.modeling_switch_transformers",
     "is_torchdynamo_compiling", _none),
    ("trl.trainer.utils", "_ChunkedLogProbFunction", LogProbabilities),
    ("trl.trainer.utils", "_use_triton", _none),
)  # fmt: skip
"""(module, function, replacement): replaced during a trace, if the module is loaded."""


@contextlib.contextmanager
def _noting_inner_outputs(model: nn.Module) -> Iterator[None]:
    """Install the hooks that collect outputs of inner modules, if no call has done so yet. The
    hooks do nothing unless forward asks for such outputs, and are removed on exit."""
    noting = sys.modules.get("transformers.utils.output_capturing")
    modeling = sys.modules.get("transformers.modeling_utils")
    if noting is None or modeling is None:
        yield
        return
    own = [m for m in model.modules() if isinstance(m, modeling.PreTrainedModel)]
    hooks = {module: dict(module._forward_hooks) for module in model.modules()}
    new = [module for module in own if not _notes(module)]
    for module in own:
        # The outermost first, as in eager: this also installs the hooks of the models within it.
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
    """Compute the CTC loss of speech models on labels N x S, without joining them in one row."""
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


def _number_alike(module: nn.Module, before: Collection[int]) -> None:
    """Number a module's new hooks from -1 down: torch's ids count the hooks of all modules, and
    would make equal blocks differ."""
    new = [key for key in module._forward_hooks if key not in before]
    for number, key in enumerate(new, start=1):
        module._forward_hooks[-number] = module._forward_hooks.pop(key)


_INSTALLED = "_output_capturing_hooks_installed"


def _notes(module: nn.Module) -> bool:
    """True if a Hugging Face model already has the hooks that collect outputs."""
    return getattr(module, _INSTALLED, False)
