# pyright: basic
# torch's own functions are only partly typed.
"""Functions of torch that branch on values, written out as ops that can be traced.

- `ctc_loss` has a kernel whose shapes depend on the lengths: it becomes a loop over time.
- `gaussian_nll_loss`, `cov` and `corrcoef` read values only to refuse wrong ones.
- `torch.narrow` with a tensor as its start becomes a lookup.
- Distributions read their parameters and samples only to refuse wrong ones.
- Encoders and decoders of `nn.Transformer` compare a mask with the causal one, to call a kernel
  without a mask: here the mask stays.
- `nn.AdaptiveLogSoftmaxWithLoss` computes each cluster for the rows that have it as their target:
  it becomes all clusters for all rows, and a lookup.
- Recurrent layers are traced as time steps, from which torch leaves out the dropout between layers.
- Batch norm with `momentum=None` reads the number of batches so far: it stays a tensor. That of
  `nn.SyncBatchNorm` asks for other processes, and sends them its sums: a program's batch is the
  global one already.
- Modules of fake quantization branch on the values of their buffers: see `quantized`.

A step accepts values that eager refuses (negative variances, lengths that are too long).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.ir.capture.substitutes.quantized import quantized_written_out
from shardweave.ir.capture.substitutes.stand_ins import wide_under_autocast
from shardweave.ir.torch_private import AdaptiveLogSoftmaxOutput, BatchNorm, original_of, replaced

Lengths = Tensor | Sequence[int]

_cov = torch.cov
_batch_norm = BatchNorm.forward
_recurrent_layers = original_of("recurrent layers")


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Replace torch's functions by the functions of this file, while in the context."""
    with (
        mock.patch.object(torch, "ctc_loss", ctc_loss),
        mock.patch.object(torch, "cov", cov),
        mock.patch.object(torch, "corrcoef", corrcoef),
        mock.patch.object(torch, "narrow", narrow),
        mock.patch.object(F, "gaussian_nll_loss", gaussian_nll_loss),
        mock.patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", adaptive_log_softmax),
        mock.patch.object(BatchNorm, "forward", batch_norm),
        mock.patch.object(nn.SyncBatchNorm, "forward", batch_norm),
        quantized_written_out(),
        replaced(
            {
                "causal mask": _said_to_be_causal,
                "distribution checks": False,
                "recurrent layers": recurrent_layers,
                "grouped product": _grouped_product,
            }
        ),
    ):
        yield


def _said_to_be_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    return is_causal is True


_scaled_grouped_product = original_of("grouped product")


def _grouped_product(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Make the fake result of `torch._grouped_mm`; torch takes only a GPU's dtypes and strides."""
    offs, scale_a = kwargs.get("offs"), kwargs.get("scale_a")
    if scale_a is not None:
        return _scaled_grouped_product(mat_a, mat_b, *args, **kwargs)
    if (mat_a.dim() == mat_b.dim() == 3) != (offs is None):
        raise ValueError("_grouped_mm needs offs, except with two 3-d operands, which take none")
    groups = mat_a.shape[:1] if offs is None else offs.shape
    shape = (*mat_a.shape[-2:-1], *mat_b.shape[-1:])
    is_stacked = mat_a.dim() == mat_b.dim()
    dtype = kwargs.get("out_dtype") or mat_a.dtype
    return mat_a.new_empty((*groups, *shape) if is_stacked else shape, dtype=dtype)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Compute torch's `ctc_loss` (Graves et al. 2006): -log of the probability of all alignments.

    Shapes: log_probs T x N x C, targets N x S, or one row if the target lengths are numbers; all
    without N for one sample. reduction: 0 none, 1 the mean of losses by target length, 2 the sum.
    As in torch, the gradient assumes that log_probs are the result of a `log_softmax`.
    """
    log_probs = wide_under_autocast(log_probs)
    is_one = log_probs.dim() == 2
    scores = log_probs[:, None] if is_one else log_probs
    steps, samples = _each(input_lengths, scores), _each(target_lengths, scores)
    labels = _padded(targets, target_lengths, samples, is_one)
    losses = _minus_log_likelihood(scores, labels, steps, samples, blank, zero_infinity)
    if reduction == 1:
        return (losses / samples.clamp_min(1)).mean()
    return losses.sum() if reduction == 2 else losses.squeeze(0) if is_one else losses


def _each(lengths: Lengths, scores: Tensor) -> Tensor:
    """Return lengths as a tensor of shape (N,)."""
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(list(lengths), dtype=torch.int64, device=scores.device)
    return lengths.to(scores.device).reshape(-1)


def _padded(targets: Tensor, lengths: Lengths, samples: Tensor, is_one: bool) -> Tensor:
    """Return targets as N x S. Raises ValueError if lengths that are a tensor divide one row."""
    if targets.dim() == 2 or is_one:
        return targets.reshape(len(samples), -1)
    if isinstance(lengths, Tensor):
        raise ValueError(
            "ctc_loss: targets is 1-d, so that target_lengths would split it by the data; pad "
            "targets to a tensor of N x S"
        )
    first = samples.cumsum(0) - samples
    index = first[:, None] + torch.arange(max(lengths), device=targets.device)
    return targets[index.clamp_max(len(targets) - 1)]


def _minus_log_likelihood(
    scores: Tensor, labels: Tensor, steps: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Compute CTC losses (N). Shapes: scores T x N x C, labels N x S, steps and lengths N."""
    num_steps, num_states = len(scores), 2 * labels.shape[1] + 1
    never = torch.finfo(scores.dtype).min / 4  # what is finite has gradients
    state = torch.arange(num_states, device=scores.device)
    # Blanks lie between labels and at both ends; after the end of a row nothing is read.
    label = F.pad(labels, (0, 1)).repeat_interleave(2, 1)[:, :num_states]
    is_label = (state % 2 == 1) & (state < 2 * lengths[:, None])
    label = torch.where(is_label, label, blank)
    may_skip = is_label & (state > 1) & (label != label.roll(2, 1))
    own = scores.gather(2, label.expand(num_steps, -1, -1))
    reached = torch.where((state < 2) & (state <= 2 * lengths[:, None]), own[0], never)
    for step in range(1, num_steps):
        before = F.pad(reached, (2, 0), value=never)
        skipped = torch.where(may_skip, before[:, :-2], never)
        paths = torch.stack([reached, before[:, 1:-1], skipped])
        reached = torch.where(step < steps[:, None], paths.logsumexp(0) + own[step], reached)
    ends = (state == 2 * lengths[:, None]) | (state == 2 * lengths[:, None] - 1)
    losses = -torch.where(ends, reached, never).logsumexp(1)
    is_possible = torch.where(steps > 0, losses < -never / 2, lengths == 0)
    losses = torch.where(steps > 0, losses, 0.0)
    is_read = torch.arange(num_steps, device=scores.device)[:, None] < steps
    # Torch takes the scores for a log_softmax, whose sums of probabilities have no gradient.
    total = torch.where(is_read[..., None], scores.exp(), 0).sum((0, 2))
    impossible = 0.0 if zero_infinity else math.inf
    return torch.where(is_possible, losses + (total - total.detach()), impossible)


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute torch's loss: (log v + (x - y)^2 / v) / 2, where v = max(var, eps).

    Shapes: input and target alike; var as input, or without its last dim, or with one dim of 1.
    """
    if not isinstance(var, Tensor):
        var = var * torch.ones_like(input)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.ndim != var.ndim or [
            y for x, y in zip(input.shape, var.shape, strict=True) if x != y
        ] != [1]:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Compute `torch.cov`. Shapes: variables x observations, or observations -> n x n."""
    if input.numel() == 0:
        return _cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    given = [weight for weight in (fweights, aweights) if weight is not None]
    if not given:
        centred = rows - rows.sum(1, keepdim=True) / rows.shape[1]
        return (centred @ centred.mT.conj() / max(rows.shape[1] - correction, 0)).squeeze()
    weights = given[0] * given[-1] if len(given) == 2 else given[0]
    total = weights.sum()
    centred = rows - (rows * weights).sum(1, keepdim=True) / total
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    return ((centred * weights) @ centred.mT.conj() / (total - lost).clamp_min(0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Compute `torch.corrcoef`. Shapes: as in `cov`."""
    matrix = cov(input)
    if matrix.dim() == 0:
        return matrix / matrix
    deviation = matrix.diagonal().real.sqrt() if matrix.is_complex() else matrix.diagonal().sqrt()
    matrix = matrix / deviation[:, None] / deviation
    return matrix if matrix.is_complex() else matrix.clip(-1, 1)


def narrow(input: Tensor, dim: int, start: int | Tensor, length: int) -> Tensor:
    """Compute `torch.narrow`; for a tensor `start`, look up `length` positions from there."""
    if not isinstance(start, Tensor):
        return input.narrow(dim, start, length)
    first = torch.where(start < 0, start + input.shape[dim], start)
    return input.index_select(dim, first + torch.arange(length, device=input.device))


def adaptive_log_softmax(self: Any, input_: Tensor, target_: Tensor) -> Any:
    """Compute `nn.AdaptiveLogSoftmaxWithLoss.forward`. Shapes: N x F and N, or F and ()."""
    rows, target = torch.atleast_2d(input_), target_.reshape(-1)
    head = F.log_softmax(self.head(rows), 1)
    clusters = [
        F.log_softmax(tail(rows), 1) + head[:, self.shortlist_size + number, None]
        for number, tail in enumerate(self.tail)
    ]
    scores = torch.cat([head[:, : self.shortlist_size], *clusters], 1)
    output = scores.gather(1, target[:, None]).squeeze(1)
    return AdaptiveLogSoftmaxOutput(output.reshape(target_.shape), -output.mean())


def recurrent_layers(
    input: Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer_fn: Any,
) -> tuple[Tensor, list[Any]]:
    """Compute torch's recurrent layers one by one, with dropout between them.

    Shapes: input T x N x F, or N x T x F with batch_first  ->  the same with the last layer's F.
    """
    rows = input.transpose(0, 1) if batch_first else input
    directions = 2 if bidirectional else 1
    states: list[Any] = []
    for first in range(0, num_layers * directions, directions):
        own = slice(first, first + directions)
        given = hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False
        if first and train and dropout:
            rows = torch.dropout(rows, dropout, True)
        rows, new_states = _recurrent_layers(rows, *given, layer_fn)
        states += new_states
    return (rows.transpose(0, 1) if batch_first else rows), states


def batch_norm(self: Any, input: Tensor) -> Tensor:
    """Compute `forward` of `nn.BatchNorm*`, and of `nn.SyncBatchNorm` over the global batch.
    Without a momentum, running statistics are means over the statistics of all batches so far."""
    num_batches = self.num_batches_tracked
    is_tracked = self.training and self.track_running_stats
    if self.momentum is not None or not is_tracked or num_batches is None:
        return _batch_norm(self, input)
    self._check_input_dim(input)
    num_batches.add_(1)
    # With a momentum of 1 they become the statistics of this batch.
    mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    normalized = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
    share = 1 / num_batches.double()
    self.running_mean.mul_(1 - share).add_(share * mean)
    self.running_var.mul_(1 - share).add_(share * variance)
    return normalized
