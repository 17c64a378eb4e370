"""Every loss of torch.nn.functional: equal to eager where batch and classes are cut."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardweave as sw
from shardweave.tests.compiled import compile_copy

F64 = torch.float64
NUM_CLASSES = 4
CUT = {"linear.weight": '[{"tensor"}, {}]', "linear.bias": '[{"tensor"}]'}
REDUCTIONS = ("mean", "sum", "none")


class Data(NamedTuple):
    """Logits, features, probabilities, classes, labels of which each row ends at -1, and weights."""

    h: Tensor
    x: Tensor
    p: Tensor
    i: Tensor
    labels: Tensor
    w: Tensor


Loss = Callable[..., Tensor]
"""Of Data, and of a reduction."""


def signs(values: Tensor) -> Tensor:
    return torch.where(values > 0, 1.0, -1.0).to(F64)


LOSSES: dict[str, list[Loss]] = {
    "cross_entropy": [
        lambda d, **k: F.cross_entropy(d.h, d.i, **k),
        lambda d, **k: F.cross_entropy(
            d.h, d.i, weight=d.w, ignore_index=2, label_smoothing=0.1, **k
        ),
        lambda d, **k: F.cross_entropy(d.h, d.p.softmax(-1), d.w, label_smoothing=0.1, **k),
        lambda d, **k: F.cross_entropy(
            d.h[..., None].expand(-1, -1, 3), d.i[:, None].expand(-1, 3), d.w, ignore_index=1, **k
        ),
    ],
    "nll_loss": [lambda d, **k: F.nll_loss(d.h.log_softmax(-1), d.i, d.w, ignore_index=3, **k)],
    "linear_cross_entropy": [lambda d, **k: F.linear_cross_entropy(d.h, torch.diag(d.w), d.i, **k)],
    "binary_cross_entropy": [
        lambda d, **k: F.binary_cross_entropy(d.h.sigmoid(), d.p, **k),
        lambda d, **k: F.binary_cross_entropy(d.h.sigmoid(), d.p, weight=d.w, **k),
        lambda d, **k: F.binary_cross_entropy((d.h * 400).sigmoid(), d.p.round(), **k),
    ],
    "binary_cross_entropy_with_logits": [
        lambda d, **k: F.binary_cross_entropy_with_logits(d.h, d.p, **k),
        lambda d, **k: F.binary_cross_entropy_with_logits(
            d.h * 400, d.p, d.w, pos_weight=d.w + 1, **k
        ),
    ],
    "kl_div": [
        lambda d, **k: F.kl_div(d.h.log_softmax(-1), d.p, **k),
        lambda d, **k: F.kl_div(d.h.log_softmax(-1), d.p.log(), log_target=True, **k),
        lambda d, **k: F.kl_div(d.h.log_softmax(-1), d.p, reduction="batchmean"),
    ],
    "mse_loss": [
        lambda d, **k: F.mse_loss(d.h, d.x, **k),
        lambda d, **k: F.mse_loss(d.h, d.x, weight=d.w.expand_as(d.h), **k),  # pyright: ignore[reportCallIssue]
    ],
    "l1_loss": [lambda d, **k: F.l1_loss(d.h, d.x, **k)],
    "smooth_l1_loss": [
        lambda d, **k: F.smooth_l1_loss(d.h, d.x, beta=0.5, **k),
        lambda d, **k: F.smooth_l1_loss(d.h, d.x, beta=0, **k),
    ],
    "huber_loss": [
        lambda d, **k: F.huber_loss(d.h, d.x, delta=0.5, **k),
        lambda d, **k: F.huber_loss(d.h, d.x, weight=d.w.expand_as(d.h), **k),  # pyright: ignore[reportCallIssue]
    ],
    "poisson_nll_loss": [
        lambda d, **k: F.poisson_nll_loss(d.h, d.p * 4, full=True, **k),
        lambda d, **k: F.poisson_nll_loss(d.h.exp(), d.p, log_input=False, **k),
    ],
    "cosine_embedding_loss": [
        lambda d, **k: F.cosine_embedding_loss(d.h, d.x, signs(d.x[:, 0]), margin=0.1, **k)
    ],
    "hinge_embedding_loss": [
        lambda d, **k: F.hinge_embedding_loss(d.h, signs(d.x), margin=0.5, **k)
    ],
    "margin_ranking_loss": [
        lambda d, **k: F.margin_ranking_loss(d.h, d.p, signs(d.x), margin=0.1, **k)
    ],
    "soft_margin_loss": [lambda d, **k: F.soft_margin_loss(d.h, signs(d.x), **k)],
    "multi_margin_loss": [
        lambda d, **k: F.multi_margin_loss(d.h, d.i, weight=d.w, margin=0.7, **k),
        lambda d, **k: F.multi_margin_loss(d.h, d.i, p=2, **k),
    ],
    "multilabel_margin_loss": [lambda d, **k: F.multilabel_margin_loss(d.h, d.labels, **k)],
    "multilabel_soft_margin_loss": [
        lambda d, **k: F.multilabel_soft_margin_loss(d.h, d.p.round(), weight=d.w, **k)
    ],
    "triplet_margin_loss": [lambda d, **k: F.triplet_margin_loss(d.h, d.x, d.p, swap=True, **k)],
    "triplet_margin_with_distance_loss": [
        lambda d, **k: F.triplet_margin_with_distance_loss(
            d.h, d.x, d.p, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b), **k
        )
    ],
}


OWN_FORMS = {
    *("nll_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss", "multilabel_margin_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
}
"""Losses that are single ops when torch differentiates them; others torch makes of other ops."""

ELSEWHERE = ("gaussian_nll_loss", "ctc_loss")
"""Those that `test_written_out` tries."""


def tried(names: Set[str], *marks: pytest.MarkDecorator) -> list[Any]:
    """Those of some losses that this torch has, in order, under marks."""
    return [pytest.param(name, marks=marks) for name in sorted(names) if hasattr(F, name)]


class WithLosses(nn.Module):
    """A linear map, whose features are the classes, and losses under each reduction."""

    weights: Tensor

    def __init__(self, losses: list[Loss]) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_CLASSES, NUM_CLASSES, dtype=F64)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=F64))
        self.losses = losses

    def forward(self, x: Tensor, p: Tensor, i: Tensor, labels: Tensor) -> Tensor:
        data = Data(self.linear(x), x, p, i, labels, self.weights)
        results = [loss(data, reduction=r) for loss in self.losses for r in REDUCTIONS]
        return torch.stack([(result * (1 + result)).sum() for result in results]).sum()


def batch() -> tuple[Tensor, ...]:
    i = torch.tensor([2, 1, 0, 3])
    labels = torch.tensor([[1, 2, -1, 0], [0, -1, 3, 3], [-1, 0, 1, 2], [3, 2, 1, 0]])
    x, p = torch.randn(4, 4, dtype=F64), torch.rand(4, 4, dtype=F64)
    return x, p, i, labels


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(
    "name", [*tried(OWN_FORMS), *tried(LOSSES.keys() - OWN_FORMS, pytest.mark.slow)]
)
def test_loss_equals_eager_where_batch_and_classes_are_cut(name: str) -> None:
    model, inputs = WithLosses(LOSSES[name]), batch()
    rows = dict.fromkeys(("x", "p", "labels"), '[{"data"}, {}]')
    mesh = {"data": 2, "tensor": 2}
    plan = sw.Plan(mesh=mesh, parameters=CUT, inputs={**rows, "i": '[{"data"}]'})
    step = compile_copy(model, inputs, plan=plan, backend="reference")
    expected = model(*inputs)
    expected.backward()
    torch.testing.assert_close(step(*inputs), expected, rtol=1e-11, atol=0)
    for parameter, own in zip(model.parameters(), step.parameters(), strict=True):
        torch.testing.assert_close(own.grad, parameter.grad, rtol=1e-9, atol=1e-11)


def test_layer_of_torch_that_looks_at_values_is_refused_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_torch_has_it = nn.modules.batchnorm._BatchNorm.forward
    monkeypatch.setattr("shardweave.ir.capture.substitutes.written_out.batch_norm", as_torch_has_it)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(sw.CaptureError, match=r"write out .* torch's nn/\w+(/\w+)?\.py, line \d+"):
        compile_copy(model, (torch.randn(4, 4),), mesh="data=2", backend="reference")


def test_every_loss_of_torch_is_tried() -> None:
    names = {name for name in dir(F) if name.endswith("_loss") or "entropy" in name}
    assert names | {"kl_div"} <= {*LOSSES, *ELSEWHERE}
