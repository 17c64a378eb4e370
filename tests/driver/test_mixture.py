"""Mixtures of experts in static shapes, against loops over experts and tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.driver.checking.check import run_eager
from shardweave.driver.models.mixture import (
    Experts,
    dropped_choices,
    every_expert,
    experts_with_capacity,
    slots_of,
)
from shardweave.driver.models.models import build_example
from shardweave.tests.zoo import gradient_errors

TOKENS, HIDDEN, COUNT, CHOICES, GROUPS = 24, 6, 5, 2, 3


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(params=[False, True], ids=["plain", "biased"])
def case(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, Tensor, Experts]:
    """Tokens, their experts, the weights of these, and gated experts with biases or without."""
    torch.manual_seed(0)
    x, up, down = normal(TOKENS, HIDDEN), normal(COUNT, HIDDEN, 8), normal(COUNT, 4, HIDDEN)
    weights, chosen = torch.randn(TOKENS, COUNT).double().softmax(-1).topk(CHOICES)
    biases = (normal(COUNT, 8), normal(COUNT, HIDDEN)) if request.param else (None, None)
    experts = Experts(up, down, partial(F.glu, dim=-1), *biases)
    return x, chosen, weights.requires_grad_(), experts


def expected(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts, slots: int, groups: int
) -> tuple[Tensor, int]:
    """The sums, token by token, where experts take what comes first; and what was dropped."""
    rows: list[Tensor] = []
    dropped = 0
    for token in range(TOKENS):
        if token % (TOKENS // groups) == 0:
            taken = [0] * COUNT
        out = torch.zeros(HIDDEN, dtype=x.dtype)
        for choice in range(CHOICES):
            expert = int(chosen[token, choice])
            if taken[expert] == slots:
                dropped += 1
                continue
            taken[expert] += 1
            inner = x[token] @ experts.up[expert]
            if experts.up_bias is not None:
                inner = inner + experts.up_bias[expert]
            made = experts.activation(inner) @ experts.down[expert]
            if experts.down_bias is not None:
                made = made + experts.down_bias[expert]
            out = out + weights[token, choice] * made
        rows.append(out)
    return torch.stack(rows), dropped


def assert_alike(
    found: Tensor, wanted: Tensor, case: tuple[Tensor, Tensor, Tensor, Experts]
) -> None:
    """Results and their gradients are equal."""
    torch.testing.assert_close(found, wanted)
    x, _, weights, experts = case
    read = [x, weights, experts.up, experts.down]
    read += [bias for bias in (experts.up_bias, experts.down_bias) if bias is not None]
    of = torch.randn_like(wanted)
    gradients = (torch.autograd.grad(one, read, of) for one in (found, wanted))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other)


def test_every_expert_is_the_weighted_sum_of_the_chosen(
    case: tuple[Tensor, Tensor, Tensor, Experts],
) -> None:
    wanted, dropped = expected(*case, slots=TOKENS, groups=1)
    assert dropped == 0
    assert_alike(every_expert(*case), wanted, case)


@pytest.mark.parametrize("groups", [1, GROUPS])
@pytest.mark.parametrize("capacity", [0.5, 1.0, COUNT / CHOICES])
def test_what_finds_no_slot_is_dropped_and_counted(
    case: tuple[Tensor, Tensor, Tensor, Experts], capacity: float, groups: int
) -> None:
    slots = slots_of(TOKENS // groups, CHOICES, COUNT, capacity)
    wanted, dropped = expected(*case, slots=slots, groups=groups)
    found, counts = experts_with_capacity(*case, capacity=capacity, groups=groups)
    assert counts.tolist() == [dropped, TOKENS * CHOICES]
    assert (dropped == 0) is (capacity == COUNT / CHOICES)
    assert_alike(found, wanted, case)


def test_there_are_never_more_slots_than_tokens() -> None:
    assert [slots_of(8, 2, 4, capacity) for capacity in (0.1, 1.0, 1.1, 2.0, 9.0)] == [
        1,
        4,
        5,
        8,
        8,
    ]


def test_groups_of_unequal_length_are_refused(
    case: tuple[Tensor, Tensor, Tensor, Experts],
) -> None:
    with pytest.raises(ValueError, match="24 tokens do not divide into 5 groups"):
        experts_with_capacity(*case, capacity=1.0, groups=5)


@pytest.mark.parametrize(
    "kind",
    [
        "mixtral",
        pytest.param("gpt_oss", marks=pytest.mark.slow),  # with biases, and inputs first
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
    ],
)
def test_hugging_face_computes_the_same(kind: str) -> None:
    spec = f"hf:{kind}:tiny,num_hidden_layers=2,batch=2,seq=8"
    given = build_example(f"{spec},experts_implementation=batched_mm", dtype=torch.float64)
    wanted = run_eager(given.module, given.kwargs)
    for more in ("", ",capacity=2"):
        example = build_example(spec + more, dtype=torch.float64)
        found = run_eager(example.module, example.kwargs)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-9)
        errors = gradient_errors(found.gradients, wanted.gradients)
        # Routers compute in float32, whatever the model's dtype.
        assert max(errors.values()) < 1e-6
        counts = dropped_choices(example.module)
        assert counts is None if not more else counts is not None and counts[0] == 0 < counts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("capacity=0", "capacity=0 should be a positive number"),
        ("groups=2", "groups=2 has no effect without a capacity"),
        ("capacity=1,groups=0", "groups=0 is not a positive integer"),
        ("capacity=1,experts_implementation=batched_mm", "experts_implementation is given"),
    ],
)
def test_options_without_effect_are_refused(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_example(f"hf:mixtral:tiny,{options}")


def test_a_capacity_needs_experts() -> None:
    with pytest.raises(ValueError, match="the model has no such experts; leave it out"):
        build_example("hf:gpt2:tiny,capacity=1.5")
    with pytest.raises(ValueError, match=r"give experts=\.\. too"):
        build_example("gpt:capacity=1")
    with pytest.raises(
        ValueError, match="choices=2 experts for each token are more than experts=1"
    ):
        build_example("gpt:experts=1")


def test_models_without_experts_drop_nothing() -> None:
    assert dropped_choices(nn.Linear(1, 1)) is None
