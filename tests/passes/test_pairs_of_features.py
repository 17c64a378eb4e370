"""Every pair of features at once: a small transformer under each pair of ways to run it.

Rows of the table are drawn so that each pair of values of two features stands in at least one. Each
row is lowered by its plan, proved, and run on all ranks of a virtual mesh, beside eager.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch
from torch import Tensor, nn

from shardweave.backends.reference.reference import run_reference, values_of
from shardweave.driver.checking.check import run_eager
from shardweave.driver.models.models import Example
from shardweave.ir.capture.capture import capture
from shardweave.ir.capture.seeded import SeededRandom
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.proof.prove import prove
from shardweave.ir.verify.program import check
from shardweave.passes.notes import unheard
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.zoo import Captured, check_against_eager

BATCH, TOKENS, HIDDEN, HEADS, WORDS = 8, 8, 16, 4, 16

MODEL = {
    "attention": ("causal", "grouped", "masked", "grouped and masked"),
    "random": (False, True),
    "rows": (False, True),
    "dtype": (torch.float64, torch.float32),
}
"""Features of the model. rows: each row is weighed by its number in the batch."""

PLAN = {
    "stages": (1, 2),
    "parts": (1, 2),
    "data": (1, 2),
    "tensor": (1, 2),
    "context": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "layer", "after-products"),
}
"""Features of the plan. parts: micro-batches where there are stages, else sub-batches."""

BINARY = ("random", "rows", "dtype")

FEATURES: dict[str, tuple[object, ...]] = {**MODEL, **PLAN}
Row = Mapping[str, object]


class Block(nn.Module):
    """Attention and a product, each beside the stream."""

    def __init__(self, attention: str, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.keys = attention, HEADS // 2 if "grouped" in attention else HEADS
        head = HIDDEN // HEADS
        self.query = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.key = nn.Linear(HIDDEN, head * self.keys, dtype=dtype)
        self.value = nn.Linear(HIDDEN, head * self.keys, dtype=dtype)
        self.out, self.drop = nn.Linear(HIDDEN, HIDDEN, dtype=dtype), nn.Dropout(dropout)
        self.up, self.down = (nn.Linear(HIDDEN, HIDDEN, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for linear, heads in (
                (self.query, HEADS),
                (self.key, self.keys),
                (self.value, self.keys),
            )
        )
        is_masked = "masked" in self.kind
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, mask if is_masked else None, is_causal=not is_masked,
            enable_gqa=self.keys != HEADS,
        )  # fmt: skip
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Two blocks, and a loss that may weigh rows by their number."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        dtype = row["dtype"]
        assert isinstance(dtype, torch.dtype)
        self.weighs_rows, dropout = row["rows"], 0.3 if row["random"] else 0.0
        self.words = nn.Embedding(WORDS, HIDDEN, dtype=dtype)
        self.h = nn.ModuleList(Block(str(row["attention"]), dropout, dtype) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN, dtype=dtype)
        self.register_buffer("mask", torch.randn(TOKENS, TOKENS, dtype=dtype))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.h:
            x = block(x, self.mask)
        errors = (self.norm(x) - target).square().mean((1, 2))
        if self.weighs_rows:
            errors = errors * torch.arange(1, len(tokens) + 1, dtype=errors.dtype)
        return errors.mean()


@cache
def models() -> list[Row]:
    """Eight models with each pair of their features: capturing one takes most of a row's time."""
    chosen = zip(MODEL["attention"], ((0, 0, 1), (0, 1, 1), (0, 0, 1), (0, 1, 0)), strict=True)
    return [
        {
            "attention": kind,
            **{name: MODEL[name][i ^ turned] for name, i in zip(BINARY, which, strict=True)},
        }
        for kind, which in chosen
        for turned in (0, 1)
    ]


@cache
def covering() -> list[dict[str, object]]:
    """Rows in which each pair of values of two features stands at least once (greedy)."""
    rng = random.Random(7)  # of a dozen the one with the fewest rows
    pairs = _pairs()
    rows: list[dict[str, object]] = []
    while pairs:
        candidates = [
            {**rng.choice(models()), **{name: rng.choice(PLAN[name]) for name in PLAN}}
            for _ in range(200)
        ]
        candidates = [row for row in candidates if row["data"] == 2 or row["zero"] == 0]
        best = max(candidates, key=lambda row: len(pairs & _pairs_of(row)))
        pairs -= _pairs_of(best)
        rows.append(best)
    return rows


def _pairs() -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """The pairs that some row can have: ZeRO divides over `data`."""
    return {
        ((a, one), (b, other))
        for a, b in combinations(FEATURES, 2)
        for one, other in product(FEATURES[a], FEATURES[b])
        if not ((a, one) == ("data", 1) and b == "zero" and other != 0)
    }


def _pairs_of(row: Row) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return set(combinations(((name, row[name]) for name in FEATURES), 2))


@cache
def case_of(model: tuple[tuple[str, object], ...]) -> Captured:
    """The model of a row, captured, and what eager computes of it."""
    torch.manual_seed(0)
    row = dict(model)
    module = Model(row)
    target = torch.randn(BATCH, TOKENS, HIDDEN, dtype=module.norm.weight.dtype)
    kwargs = {"tokens": torch.randint(0, WORDS, (BATCH, TOKENS)), "target": target}
    with SeededRandom(0):
        eager = run_eager(module, kwargs)
    module.zero_grad()
    program = capture(module, kwargs=kwargs)
    values = values_of(program, module, kwargs)
    example = Example(module, kwargs)
    return Captured(example, program, values, eager.loss, eager.gradients, eager.buffers)


def plan_of(case: Captured, row: Row) -> Plan:
    """Megatron's plan for a row's mesh, with what else the row asks for."""
    axes = {name: int(str(row[name])) for name in ("data", "tensor", "context")}
    stages, parts = int(str(row["stages"])), int(str(row["parts"]))
    mesh = Mesh.parse(
        ",".join(f"{name}={size}" for name, size in {"stage": stages, **axes}.items())
    )
    plan = plan_megatron(case.program, mesh)
    if stages > 1:
        layers = balanced_stages(case.program, stages)
        plan = replace(plan, pipeline=Pipeline(layers, parts))
    else:
        plan = replace(plan, batch_split=parts)
    return replace(plan, zero=int(str(row["zero"])), recompute=str(row["recompute"]))


@pytest.mark.parametrize("number", range(len(covering())))
def test_every_pair_of_features_trains_as_eager(number: int) -> None:
    row = covering()[number]
    case = case_of(tuple((name, row[name]) for name in MODEL))
    with unheard():
        program = local_program(case.program, plan_of(case, row))
    check(program)
    prove(program, against=case.program)
    results = run_reference(program, case.values)
    if row["dtype"] == torch.float64:
        check_against_eager(results, case)
        return
    loss = results["output", "0"].item()
    assert abs(loss - case.loss) <= 1e-6 * abs(case.loss)
    for name, expected in case.gradients.items():
        torch.testing.assert_close(results["grad", name], expected, rtol=2e-5, atol=2e-6)


def test_rows_hold_every_pair() -> None:
    assert set().union(*(_pairs_of(row) for row in covering())) == _pairs()
