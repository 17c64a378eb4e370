"""Functions of torch that look at values: written out they are what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

import shardweave as sw
from shardweave.ir.capture.substitutes.written_out import (
    adaptive_log_softmax,
    corrcoef,
    cov,
    ctc_loss,
    gaussian_nll_loss,
)
from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import assert_step_equals_eager, assert_three_steps_equal_eager
from shardweave.tests.marks import slow

F64 = torch.float64
STEPS, SAMPLES, CLASSES = 7, 4, 5
# A repeated label, one that ends early, one that is too long for its scores, an empty one.
LABELS = torch.tensor([[1, 1, 2], [3, 4, -1], [2, 2, 2], [1, -1, -1]])


def scores() -> Tensor:
    """T x N x C, which are no logarithms of probabilities."""
    made = torch.randn(STEPS, SAMPLES, CLASSES, dtype=F64, generator=torch.manual_seed(0))
    return made.requires_grad_()


def same(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Equal, and so are the gradients of what is finite."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    pairs = [
        torch.autograd.grad(each.sum(), inputs, retain_graph=True) if each.sum().isfinite() else ()
        for each in (found, expected)
    ]
    torch.testing.assert_close(*pairs, rtol=1e-11, atol=1e-12)


CTC: dict[str, tuple[Any, ...]] = {
    "tensors": (LABELS, torch.tensor([7, 5, 6, 1]), torch.tensor([3, 2, 3, 0])),
    "numbers": (LABELS, (7, 5, 6, 1), (3, 2, 3, 0)),
    "all-steps": (LABELS.clamp_min(1), (7, 7, 7, 7), (3, 3, 3, 3)),
    "one-row": (torch.tensor([1, 1, 2, 3, 4, 2, 2, 2]), (7, 5, 6, 1), (3, 2, 3, 0)),
    "too-long": (LABELS, (7, 2, 4, 6), (3, 2, 3, 1)),
}


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("case", CTC)
def test_ctc_loss_is_that_of_torch(case: str, reduction: int, zero_infinity: bool) -> None:
    given = scores()
    both: tuple[Any, Any] = ctc_loss, torch.ctc_loss  # torch's stubs lack lengths as numbers
    found, expected = (f(given, *CTC[case], 0, reduction, zero_infinity) for f in both)
    same(found, expected, given)


def test_ctc_loss_of_one_sample_with_another_blank_is_that_of_torch() -> None:
    given = scores()
    lengths = torch.tensor(6), torch.tensor(3)
    for reduction in (0, 1):
        found, expected = (
            f(given[:, 0], torch.tensor([1, 0, 0]), *lengths, 4, reduction)
            for f in (ctc_loss, torch.ctc_loss)
        )
        same(found, expected, given)


@pytest.mark.parametrize("var", [(4, 3), (4,), (4, 1)])
@pytest.mark.parametrize("options", [{}, {"full": True, "eps": 0.5, "reduction": "sum"}])
def test_gaussian_nll_loss_is_that_of_torch(var: tuple[int, ...], options: dict[str, Any]) -> None:
    x, y = torch.randn(2, 4, 3, dtype=F64).requires_grad_()
    variance = torch.rand(var, dtype=F64).requires_grad_()
    found, expected = (
        f(x, y, variance, **options) for f in (gaussian_nll_loss, F.gaussian_nll_loss)
    )
    same(found, expected, x, variance)


@pytest.mark.parametrize("shape", [(3, 6), (6,), (1, 6)])
def test_covariances_are_those_of_torch(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=F64).requires_grad_()
    same(cov(x, correction=0), torch.cov(x, correction=0), x)
    same(corrcoef(x), torch.corrcoef(x), x)


@pytest.mark.parametrize("rows", [(6,), ()])
def test_adaptive_softmax_is_that_of_torch(rows: tuple[int, ...]) -> None:
    part = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3, 6], div_value=1.5, dtype=F64)
    x = torch.randn(*rows, 4, dtype=F64).requires_grad_()
    target = torch.randint(0, 9, rows)
    found, expected = adaptive_log_softmax(part, x, target), part(x, target)
    same(found.output, expected.output, x)
    same(found.loss, expected.loss, x, part.head.weight)


class Recognised(nn.Module):
    """Scores of frames, and the losses that people write for them."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.variance = nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)
        self.tail = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3, 6], div_value=1.5)
        self.ctc, self.gaussian = nn.CTCLoss(), nn.GaussianNLLLoss()

    def forward(self, x: Tensor, y: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
        logits = self.scores(x)
        of_frames = self.ctc(logits.log_softmax(-1).transpose(0, 1), y, frames, labels)
        of_values = self.gaussian(logits, x[..., :1].cos(), F.softplus(self.variance(x)))
        spread = torch.cov(logits.flatten(0, 1).T).square().mean()
        tail = self.tail(x[:, 0], y[:, 0] * 2).loss
        return of_frames + of_values + spread + torch.corrcoef(logits[:, 0].T).sum() + tail


def test_model_with_them_equals_eager_where_batch_and_classes_are_cut() -> None:
    torch.manual_seed(0)
    model = Recognised().double()
    x = torch.randn(SAMPLES, STEPS, 4, dtype=F64)
    batch = (x, LABELS, torch.tensor([7, 5, 6, 4]), torch.tensor([3, 2, 3, 0]))
    step = compile_copy(model, batch, mesh="data=2,tensor=2", backend="reference")
    assert_step_equals_eager(step, model, *batch)


class Translator(nn.Module):
    """Torch's own transformer with the mask that its tutorials make."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.net = nn.Transformer(8, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        made = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=F64)
        given = {"tgt_mask": made, "src_key_padding_mask": source == 0}
        hidden = self.net(self.table(source), self.table(target), **given)
        return F.cross_entropy((hidden @ self.table.weight.T).flatten(0, 1), target.flatten())


class Policy(nn.Module):
    """Log-probabilities and entropies of distributions that check what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, action: Tensor, choice: Tensor) -> Tensor:
        mean = self.mean(x)
        normal = Normal(mean, self.spread.exp().expand_as(mean))
        discrete = Categorical(logits=mean)
        scores = normal.log_prob(action).sum(-1) + discrete.log_prob(choice)
        drawn = normal.rsample().square().mean()
        return drawn - (scores + normal.entropy().sum(-1) + discrete.entropy()).mean()


def sentences() -> tuple[Tensor, Tensor]:
    source, target = torch.randint(1, 8, (2, 4, 5))
    source[1, 3:] = 0
    return source, target


def actions() -> tuple[Tensor, ...]:
    x, action = torch.randn(4, 4, dtype=F64), torch.randn(4, 3, dtype=F64)
    return x, action, torch.randint(0, 3, (4,))


class Averaged(nn.Module):
    """Batch norms whose running statistics are means over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.last = nn.SyncBatchNorm(4, momentum=None, affine=False)

    def forward(self, x: Tensor, action: Tensor, choice: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.outer(self.norm(self.inner(x)).relu())), choice)


class Recurrent(nn.Module):
    """Recurrent layers with dropout between them, which torch's own time steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 3, 2, batch_first=True, dropout=0.4, bidirectional=True, proj_size=2)
        self.gru = nn.GRU(4, 4, 3, dropout=0.4)
        self.table = nn.Embedding(8, 8)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        hidden = self.lstm(self.table(source))[0]
        scores, last = self.gru(hidden.transpose(0, 1))
        return F.cross_entropy(scores.flatten(0, 1), target.T.flatten() % 4) + last.sum()


@pytest.mark.parametrize(
    ("model", "batch"),
    [(Translator, sentences), (Policy, actions), (Averaged, actions), slow(Recurrent, sentences)],
)
def test_parts_of_torch_that_look_at_values_equal_eager(
    model: Callable[[], nn.Module], batch: Callable[[], tuple[Tensor, ...]]
) -> None:
    assert_three_steps_equal_eager(model().double(), batch, mesh="data=2,tensor=2")


def test_ctc_loss_of_targets_in_one_row_that_the_data_divides_is_refused() -> None:
    loss: Callable[..., Tensor] = F.ctc_loss

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(4, CLASSES)

        def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
            frames = torch.full((SAMPLES,), STEPS)
            return loss(self.scores(x).log_softmax(-1), y, frames, lengths)

    batch = (torch.randn(STEPS, SAMPLES, 4), torch.ones(8, dtype=torch.int64), torch.full((4,), 2))
    with pytest.raises(sw.CaptureError, match="pad targets to a tensor of N x S"):
        compile_copy(Joined(), batch, mesh="data=2", backend="reference")


class Flow(nn.Module):
    """Determinants of weights that lie transposed in memory, as torch's QR leaves its factors."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(4, 4, dtype=F64)).Q)
        self.other = nn.Parameter(torch.randn(4, 4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        spread = (self.other.T @ self.other + torch.eye(4)).T.contiguous()
        volume = torch.linalg.slogdet(self.mix).logabsdet + spread.logdet()
        return (x @ self.mix @ spread).square().mean() - volume - (2 * self.mix).T.det()


@pytest.mark.parametrize("mesh", ["data=2", "data=2,tensor=2"])
def test_gradients_of_determinants_are_those_of_the_matrix_as_eager_has_it(mesh: str) -> None:
    torch.manual_seed(0)
    model = Flow()
    assert not model.mix.is_contiguous()
    assert_three_steps_equal_eager(model, mesh=mesh)
