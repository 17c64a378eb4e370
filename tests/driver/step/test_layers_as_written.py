"""Models as people write them, each on meshes that cut what they do: equal to eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.compiled import compile_copy
from shardweave.tests.driver.step.models import Masked, Mixed
from shardweave.tests.eager import ROUNDING, assert_step_equals_eager
from shardweave.tests.marks import slow

F64 = torch.float64


class HiddenToo(nn.Module):
    """Returns what its middle gives, which the backward pass reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, dtype=F64), nn.Linear(8, 1, dtype=F64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).tanh()
        return {"loss": self.last(hidden).square().mean(), "hidden": hidden}


class Rotary(nn.Module):
    """Turns keys of a fused projection as pairs of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8, dtype=F64), nn.Linear(8, 16, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), *self.kv(x).chunk(2, -1)
        q, k, v = (part.view(*x.shape[:2], 2, 4).transpose(1, 2) for part in (q, k, v))
        scores = self.turned(q) @ self.turned(k).transpose(-1, -2)
        return (scores.softmax(-1) @ v).square().mean()

    def turned(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], dtype=F64)[:, None] * torch.ones(2, dtype=F64)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angles), angles).conj()
        return torch.view_as_real(turned).flatten(-2)


class Recurrent(nn.Module):
    """In float32, which the CPU has a kernel of its own for."""

    def __init__(self, *, is_behind: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4) if is_behind else nn.Identity()
        self.cell, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.first(x))[0]).square().mean()


SPLIT = sw.Plan(
    {"data": 2, "stage": 2},
    inputs={"x": '[{"data"}, {}]'},
    pipeline=Pipeline((("first",), ("last",)), 2, schedule="zero-bubble"),
)


@pytest.mark.parametrize(
    ("model", "shape", "mesh", "plan"),
    [
        (HiddenToo, (8, 4), "stage=2", None),
        (HiddenToo, (8, 4), "data=2,stage=2", SPLIT),
        (Rotary, (4, 3, 8), "tensor=2", None),
        (Rotary, (4, 3, 8), "data=2,stage=2", None),
        (Recurrent, (4, 3, 4), "data=2", None),
        (Recurrent, (4, 3, 4), "data=2,stage=2", None),
    ],
)
def test_step_equals_eager(
    model: type[nn.Module], shape: tuple[int, ...], mesh: str, plan: sw.Plan | None
) -> None:
    torch.manual_seed(0)
    eager = model()
    dtype = next(eager.parameters()).dtype
    x = torch.randn(shape, dtype=dtype)
    step = compile_copy(copy.deepcopy(eager), (x,), mesh=mesh, plan=plan, backend="reference")
    bound = 1e-6 if dtype == torch.float32 else ROUNDING
    assert_step_equals_eager(step, eager, x, bound=bound)
    if model is HiddenToo:
        torch.testing.assert_close(step(x)["hidden"], eager(x)["hidden"], rtol=bound, atol=bound)


@pytest.mark.parametrize(("rows", "is_behind"), [(3, False), slow(3, True), (1, True)])
def test_last_batch_of_rows_that_time_steps_need_together_runs_as_one_micro_batch(
    rows: int, is_behind: bool
) -> None:
    """If the rows depend on weights; those of inputs are brought together before."""
    torch.manual_seed(0)
    eager = Recurrent(is_behind=is_behind).double()
    x = torch.randn(4, 3, 4, dtype=F64)
    step = compile_copy(copy.deepcopy(eager), (x,), mesh="data=2,stage=2", backend="reference")
    for batch in (x, x[:rows], x):
        assert_step_equals_eager(step, eager, batch)
    said = [note for note in step.notes if "run as one micro-batch: " in note]
    assert len(said) == (rows == 3 and is_behind)
    assert all("in layer 'cell'" in note for note in said)


def test_step_may_be_compiled_for_such_a_batch() -> None:
    torch.manual_seed(0)
    eager = Recurrent(is_behind=True).double()
    x = torch.randn(4, 3, 4, dtype=F64)
    with pytest.warns(sw.PlanNote, match="run as one micro-batch: .* in layer 'cell'"):
        step = compile_copy(
            copy.deepcopy(eager), (x[:3],), mesh="data=2,stage=2", backend="reference"
        )
    for batch in (x[:3], x):
        assert_step_equals_eager(step, eager, batch)
    pipeline = step.plan.pipeline if step.plan else None
    assert pipeline is not None
    assert pipeline.micro_batches > 1


class NormedOverBatch(nn.Module):
    """Its second layer needs the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8, dtype=F64), nn.BatchNorm1d(8, dtype=F64)
        self.last = nn.Linear(8, 1, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()).square().mean()


def test_layers_that_need_the_whole_batch_run_in_stages_as_one_micro_batch() -> None:
    torch.manual_seed(0)
    eager, x = NormedOverBatch(), torch.randn(8, 4, dtype=F64)
    said = (
        "run as one micro-batch: .* as in batch norm in training; but .* depends on param 'first.*'"
    )
    with pytest.warns(sw.PlanNote, match=said):
        step = compile_copy(copy.deepcopy(eager), (x,), mesh="stage=2", backend="reference")
    assert_step_equals_eager(step, eager, x)


@pytest.mark.parametrize("mesh", ["stage=2", "data=2,stage=2"])
@pytest.mark.parametrize("model", [Masked, Mixed])
def test_what_is_made_of_all_samples_without_weights_is_cut_into_micro_batches(
    model: type[nn.Module], mesh: str
) -> None:
    torch.manual_seed(0)
    eager, x = model(), torch.randn(8, 5, 4, dtype=F64)
    step = compile_copy(
        copy.deepcopy(eager), (x,), mesh=mesh, backend="reference", seed=0, prove=True
    )
    assert not [note for note in step.notes if "one micro-batch" in note]
    with sw.seeded(0):
        for _ in range(2):
            assert_step_equals_eager(step, eager, x)


class Graph(nn.Module):
    """Sends the features of nodes along edges, of which there are more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, dtype=F64), nn.Linear(8, 4, dtype=F64)

    def forward(self, nodes: Tensor, edges: Tensor, source: Tensor) -> Tensor:
        sent = self.last(self.first(nodes[source] + edges).tanh()).square().mean()
        return sent + self.last(self.first(nodes)).square().mean()


def test_inputs_of_several_lengths_have_micro_batches_that_divide_all() -> None:
    torch.manual_seed(0)
    eager = Graph()
    batch = torch.randn(8, 4, dtype=F64), torch.randn(12, 4, dtype=F64), torch.arange(12) % 8
    step = compile_copy(copy.deepcopy(eager), batch, mesh="stage=2", backend="reference")
    assert "2 stages of about equal work, 4 micro-batches, 1f1b" in step.notes
    assert_step_equals_eager(step, eager, *batch)


class Twins(nn.Module):
    """One block for both views of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cosine_similarity(self.block(x), self.block(x.flip(1))).mean()


def test_block_that_is_called_twice_is_cut_where_there_is_no_other_layer() -> None:
    torch.manual_seed(0)
    eager, x = Twins(), torch.randn(8, 4, dtype=F64)
    step = compile_copy(copy.deepcopy(eager), (x,), mesh="stage=2", backend="reference", prove=True)
    assert step.plan is not None
    assert step.plan.pipeline is not None
    assert step.plan.pipeline.stages == (("block.0", "block.1"), ("block.2",))
    assert_step_equals_eager(step, eager, x)
