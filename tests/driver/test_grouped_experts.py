"""Experts that take all rows routed to them, by grouped products, against a loop over experts."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardweave as sw
from shardweave.ir.dialects.dist_rows import RowsOp
from shardweave.ir.ops.registry import flops_of
from shardweave.passes.notes import PlanNote
from shardweave.planners.predict.predict import predicted_of, simulate_step
from shardweave.tests.compiled import compile_copy
from shardweave.tests.marks import slow
from shardweave.tests.spawn import run_ranks

grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]

TOKENS, HIDDEN, INNER, EXPERTS = 16, 8, 12, 4


class Mixture(nn.Module):
    """Gated experts behind a norm, with biases of the up projection, and a residual."""

    def __init__(self, is_grouped: bool = True) -> None:
        super().__init__()
        self.is_grouped = is_grouped
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, INNER, HIDDEN))
        self.gate = nn.Parameter(0.3 * torch.randn(EXPERTS, INNER, HIDDEN))
        self.bias = nn.Parameter(0.3 * torch.randn(EXPERTS, INNER))
        self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, INNER))
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        z = self.norm(x)
        mixed = (
            self.grouped(z, chosen, weights) if self.is_grouped else self.loop(z, chosen, weights)
        )
        return self.head(x + mixed).square().mean()

    def grouped(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        expert, order = chosen.view(-1).sort(stable=True)
        token = order // chosen.shape[1]
        counts = torch.histc(expert.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = z[token]
        up = grouped_mm(rows, self.up.mT, offs=ends) + self.bias[expert]
        gate = grouped_mm(rows, self.gate.mT, offs=ends).cos()
        out = grouped_mm(F.silu(up) * gate, self.down.mT, offs=ends)
        out = out * weights.view(-1)[order][:, None]
        return torch.zeros_like(z).scatter_add(0, token[:, None].expand(-1, HIDDEN), out)

    def loop(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        mixed = torch.zeros_like(z)
        for expert in range(EXPERTS):
            up = F.silu(z @ self.up[expert].T + self.bias[expert])
            out = (up * (z @ self.gate[expert].T).cos()) @ self.down[expert].T
            mixed = mixed + out * (weights * (chosen == expert)).sum(1, keepdim=True)
        return mixed


def routing(seed: int, choices: int) -> dict[str, Tensor]:
    """Tokens and their experts: of all, of two, or one for all tokens; an expert comes up twice."""
    generator = torch.Generator().manual_seed(seed)
    low, high = ((0, EXPERTS), (1, 3), (seed % EXPERTS, seed % EXPERTS + 1))[seed % 3]
    shape = TOKENS, choices
    return {
        "x": torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64),
        "chosen": torch.randint(low, high, shape, generator=generator),
        "weights": torch.randn(shape, generator=generator, dtype=torch.float64),
    }


def model_and_loop() -> tuple[Mixture, Mixture]:
    torch.manual_seed(0)
    model = Mixture().double()
    loop = copy.deepcopy(model)
    loop.is_grouped = False
    return model, loop


def assert_equal(step: Any, loop: Mixture, batch: dict[str, Tensor]) -> None:
    step.zero_grad()
    loop.zero_grad()
    loss, wanted = step(**batch), loop(**batch)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)
    gradients = step.full_gradients()
    for name, parameter in loop.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "zero", "choices"),
    [
        ("expert=2", 0, 2),
        slow("data=2", 0, 1),
        ("data=2,expert=2", 3, 2),
        ("expert=2,tensor=2", 0, 4),
        slow("expert=4", 0, 8),
        ("stage=2", 0, 2),
    ],
)
def test_any_routing_equals_a_loop_over_experts(mesh: str, zero: int, choices: int) -> None:
    model, loop = model_and_loop()
    first = routing(0, choices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = compile_copy(model, kwargs=first, mesh=mesh, zero=zero, backend="reference")
    idle = [str(w.message) for w in caught if issubclass(w.category, PlanNote)]
    assert not any("idle" in note for note in idle)
    for seed in range(9):
        assert_equal(step, loop, routing(seed, choices))


@slow
@pytest.mark.parametrize(
    "mesh", ["expert=2", "data=2,expert=2", "expert=2,tensor=2", "expert=4", "stage=2,expert=2"]
)
@pytest.mark.parametrize("choices", range(1, 9))
def test_fifty_routings_equal_a_loop_over_experts(mesh: str, choices: int) -> None:
    model, loop = model_and_loop()
    step = compile_copy(model, kwargs=routing(0, choices), mesh=mesh, backend="reference")
    for seed in range(50):
        assert_equal(step, loop, routing(seed, choices))


def test_devices_share_the_products_and_send_tokens_alone() -> None:
    model, _ = model_and_loop()
    batch = routing(0, 2)
    whole = sum(map(flops_of, sw.capture(model, kwargs=batch).ops))
    program = compile_copy(model, kwargs=batch, mesh="data=2,expert=2", backend="reference").program
    assert sum(map(flops_of, program.ops)) == whole / 4
    rows = TOKENS * 2 * HIDDEN * 8
    for one in program.stats().collectives:
        # Nothing over the experts is as wide as they are inside.
        assert "expert" not in one.axes or one.bytes <= one.count * rows


def test_a_step_is_proved_from_blocks_of_experts_on() -> None:
    model, _ = model_and_loop()
    batch, options = routing(0, 2), {"backend": "reference", "prove": True}
    step = compile_copy(model, kwargs=batch, mesh="data=2,expert=2", **options)
    assert any("block-experts gives them, which is not proved" in note for note in step.notes)
    other = compile_copy(model, kwargs=batch, mesh="tensor=2", **options)
    assert any(note.endswith("proved to compute the model's results") for note in other.notes)


def train(mesh: str) -> list[float]:
    model, loop = model_and_loop()
    step = compile_copy(model, kwargs=routing(0, 2), mesh=mesh)
    for seed in range(3):
        assert_equal(step, loop, routing(seed, 2))
    return []


def test_processes_equal_a_loop_over_experts() -> None:
    run_ranks(train, 2, "expert=2")


def send(mesh: str) -> list[str]:
    """Three steps whose tokens travel; the messages of rows, of a rank."""
    model, loop = model_and_loop()
    step = compile_copy(model, kwargs=routing(0, 1), mesh=mesh)
    for seed in range(3):
        assert_equal(step, loop, routing(seed, 1))
    return [op.name for op in step.program.ops if isinstance(op, RowsOp)]


@pytest.mark.parametrize("mesh", ["expert=2", slow("data=2,expert=2"), slow("expert=4")])
def test_tokens_travel_between_processes_and_none_is_dropped(mesh: str) -> None:
    sent = run_ranks(send, 2 if mesh == "expert=2" else 4, mesh)
    kinds = ["fetch_rows", "add_rows", "fetch_rows", "add_rows"]
    assert sent[0] == [f"dist.start_{kind}" for kind in kinds]


def test_gradients_of_weights_are_computed_while_tokens_travel() -> None:
    model, _ = model_and_loop()
    options = {"mesh": "expert=2", "backend": "reference"}
    program = compile_copy(model, kwargs=routing(0, 1), **options).program
    ops = list(program.ops)
    starts = [op for op in ops if op.name == "dist.start_fetch_rows"]
    (wait,) = (use.operation for use in starts[-1].results[0].uses)
    meanwhile = ops[ops.index(starts[-1]) : ops.index(wait)]
    assert any(op.name == "aten.mm" for op in meanwhile)
    predicted = predicted_of(simulate_step(program, "h100-pod:nodes=1"))
    assert predicted.communication_s["expert"] > 0
