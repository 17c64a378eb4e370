"""Batches of which each rank gives its own rows, and those that all give alike."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardweave as sw
from shardweave.backends.batch.replicas import FIRST_CALLS
from shardweave.backends.watch.agreement import AgreementError
from shardweave.backends.watch.watch import BEAT_S, TRAIL_CALLS
from shardweave.ir.mesh.mesh import Mesh
from shardweave.tests.spawn import run_ranks

KINDS = ("loss", "outside", "in call", "gradients of inputs", "submodules")


class Net(nn.Module):
    """Returns outputs, and the loss before them if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor, y: Tensor | None = None, by: Tensor | None = None) -> Any:
        out = self.down(torch.tanh(self.up(x)))
        out = out if by is None else out @ by
        return out if y is None else (F.mse_loss(out, y), out)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def numbers(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


XS, YS = numbers(12, 8), numbers(12, 4)


def own_rows(counts: list[int], mesh: str) -> slice:
    sizes = Mesh.parse(mesh)
    place = sizes.coordinates(dist.get_rank()).get("data", 0)
    first = sum(counts[:place])
    return slice(first, first + counts[place])


def train(mesh: str, zero: int, kinds: list[str]) -> None:
    """Steps with as many rows on each rank, with fewer, and with none on some, beside eager."""
    warnings.simplefilter("ignore", sw.PlanNote)
    for kind in kinds:
        torch.manual_seed(0)
        eager = Net()
        model = copy.deepcopy(eager)
        example = (XS[:3],) if kind == "outside" else (XS[:3], YS[:3])
        backward = "in_call" if kind == "in call" else "autograd"
        sw.compile(model, example, mesh=mesh, zero=zero, batch="local", backward=backward)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager)]
        for counts in [[3, 3]] * 2 if kind == "submodules" else ([3, 3], [4, 2], [3, 3], [2, 0]):
            for optimizer in optimizers:
                optimizer.zero_grad()
            one_step(model, eager, own_rows(counts, mesh), sum(counts), kind)
            for optimizer in optimizers:
                optimizer.step()
        state = sw.Step.of(model).full_state_dict()
        for name, value in eager.state_dict().items():
            close(state[name], value)
        model.eval()
        with torch.no_grad():
            close(model(XS[own_rows([1, 2], mesh)]), eager(XS[:3])[own_rows([1, 2], mesh)])


def one_step(model: Any, eager: nn.Module, mine: slice, total: int, kind: str) -> None:
    x, y = XS[:total].clone(), YS[:total]
    own, by = x[mine].clone(), numbers(4, 4) if kind == "loss" else None
    if kind == "gradients of inputs":
        own.requires_grad_()
        x.requires_grad_()
    wanted, outputs = eager(x, y, by)
    wanted.backward()
    if kind == "outside":
        out = model(own)
        F.mse_loss(out, y[mine], reduction="sum").div(max(1, out.numel())).backward()
    elif kind == "submodules":
        out = model.down(torch.tanh(model.up(own)))
        F.mse_loss(out, y[mine]).backward()
    else:
        loss, out = model(own, y[mine], by)
        close(loss, wanted)
        if kind != "in call":
            loss.backward()
    assert type(out) is Tensor
    close(out, outputs[mine])
    if x.grad is not None and len(own):  # as in DDP, of a mean over own rows
        close(own.grad, x.grad[mine] * total / len(own))


def test_rows_of_ranks_train_as_the_batch_of_them_all() -> None:
    run_ranks(train, 2, "data=2", 3, list(KINDS))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2,tensor=2", 3), ("stage=2,data=2", 0)])
def test_rows_of_ranks_train_beside_axes_that_share_them(mesh: str, zero: int) -> None:
    run_ranks(train, 4, mesh, zero, [KINDS[0], KINDS[1], KINDS[3]])


def refused() -> list[str]:
    rank, words = dist.get_rank(), list[str]()
    rows = numbers(4, 8) + rank
    cases: list[tuple[str, str | None, Tensor]] = [
        ("data=2", None, rows),
        ("data=2", "global", rows),
        ("tensor=2", "local", rows),
        ("tensor=2", "local", rows[rank:]),
        ("data=2", "local", numbers(4, 8)[:, rank:]),
    ]
    for mesh, batch, x in cases:
        model = sw.compile(Net(), (numbers(4, 8),), mesh=mesh, batch=batch)
        with pytest.raises(AgreementError) as error:
            model(x)
        words.append(str(error.value))
    return words


def test_rows_that_differ_where_they_must_not_are_refused_with_what_to_do() -> None:
    both = ("input 'x'", 'batch="local"', "local_batch")
    shared = ("give the same rows on ranks with equal coordinates on ",)
    expected = (both, both, ("input 'x'", *shared), ("4 rows, rank 1 has 3 rows", *shared),
                (r"x \(rows, 8\) float64", r"\(rows, 7\)", "pad inputs to one length"))  # fmt: skip
    for words in run_ranks(refused, 2):
        for text, patterns in zip(words, expected, strict=True):
            for pattern in patterns:
                assert re.search(pattern, text), (pattern, text)


def differing_later(mesh: str, batch: str | None) -> str:
    """What is said of rows that differ only after the calls on which they are compared."""
    model = sw.compile(Net(), (numbers(4, 8),), mesh=mesh, batch=batch)
    for call in range(TRAIL_CALLS):
        model(numbers(4, 8) + (dist.get_rank() if call > FIRST_CALLS else 0))
    time.sleep(4 * BEAT_S)
    try:
        model(numbers(4, 8))
    except AgreementError as error:
        return str(error)
    return ""


def test_rows_that_differ_later_are_noticed_after_sixteen_calls() -> None:
    for mesh, batch in (("data=2", None), ("tensor=2", "local")):
        for text in run_ranks(differing_later, 2, mesh, batch):
            assert "had different batches" in text
    assert run_ranks(differing_later, 2, "data=2", "local") == ["", ""]


def same_rows() -> str:
    """What is said of a batch that all ranks give alike, and nothing says so."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        model = sw.compile(Net(), (numbers(4, 8),), mesh="data=2")
        model(numbers(4, 8))
        model(numbers(4, 8))
    return said.getvalue()


def test_rows_that_all_ranks_give_alike_are_the_global_batch_and_a_line_says_so() -> None:
    first, second = run_ranks(same_rows, 2)
    assert first.count("takes as the global batch") == 1
    assert not second
