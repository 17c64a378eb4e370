"""What a model draws: a program has the numbers that eager PyTorch draws under `sw.seeded`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardweave as sw
from shardweave.backends.reference.reference import run_reference, values_of
from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.tests.compiled import compile_copy

F64 = torch.float64


class Drawing(nn.Module):
    """A linear map, what `body` does with it, and the sum of squares."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=F64)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x)).square().sum()


def blank(h: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=h.dtype)


def attention(h: Tensor) -> Tensor:
    heads = h.view(2, 2, -1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4, is_causal=True)


BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout of channels": lambda h: F.dropout2d(h.view(2, 4, 3, 1), 0.5),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.2, training=True),
    "attention": attention,
    "stochastic depth": lambda h: h * blank(h, len(h), 1).bernoulli_(0.6).div_(0.6),
    "bernoulli of probabilities": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "bernoulli with a tensor": lambda h: h * torch.empty_like(h).bernoulli_(h.detach().sigmoid()),
    "rand": lambda h: h * torch.rand(4, 6, dtype=h.dtype),
    "rand_like in float32": lambda h: h * torch.rand_like(h, dtype=torch.float32),
    "uniform_": lambda h: h * blank(h, 4, 6).uniform_(-1, 2),
    "randn": lambda h: h + torch.randn(6, dtype=h.dtype),
    "randn_like": lambda h: h + torch.randn_like(h),
    "normal_": lambda h: h + blank(h, 4, 6).normal_(1.0, 0.5),
    "normal of a mean": lambda h: h * torch.normal(h.detach(), 0.5),
    "normal of deviations": lambda h: h * torch.normal(1.0, h.detach().abs()),
    "normal of both": lambda h: h * torch.normal(h.detach(), h.detach().abs()),
    "exponential": lambda h: h * blank(h, 4, 6).exponential_(2.0),
    "gumbel softmax": lambda h: F.gumbel_softmax(h, tau=0.7),
    "randint": lambda h: h[torch.randint(4, (5,))],
    "randint from": lambda h: h * torch.randint(-3, 3, (6,)),
    "randint_like": lambda h: h * torch.randint_like(h, 2, 5),
    "randperm": lambda h: h[torch.randperm(4)[:3]],
    "a scalar": lambda h: h * torch.rand((), dtype=h.dtype),
    "several": lambda h: F.dropout(F.dropout(h, 0.5) + torch.rand_like(h), 0.5),
}


@pytest.mark.parametrize("name", BODIES)
def test_program_draws_what_eager_draws(name: str) -> None:
    torch.manual_seed(0)
    model, x = Drawing(BODIES[name]), torch.randn(4, 6, dtype=F64)
    program = capture(model, [x])
    with sw.seeded(3) as numbers:
        loss = model(x)
    loss.backward()
    results = run_reference(program, values_of(program, model, {"x": x}, seed=3))
    torch.testing.assert_close(results["output", "0"], loss.detach(), rtol=1e-12, atol=0)
    for parameter, gradient in model.named_parameters():
        torch.testing.assert_close(
            results["grad", parameter], gradient.grad, rtol=1e-11, atol=1e-13
        )
    assert torch.equal(results["buffer", "random_state"], numbers.state)
    assert numbers.state[1] > 0


def test_dropout_of_everything_draws_nothing() -> None:
    model, x = Drawing(lambda h: F.dropout(h, 1.0) + h), torch.randn(4, 6, dtype=F64)
    program = capture(model, [x])
    with sw.seeded(3) as numbers:
        loss = model(x)
    results = run_reference(program, values_of(program, model, {"x": x}))
    torch.testing.assert_close(results["output", "0"], loss.detach(), rtol=1e-12, atol=0)
    assert numbers.state.tolist() == [3, 0]


def test_programs_that_draw_nothing_have_no_state() -> None:
    model, x = Drawing(lambda h: F.dropout(h, 0.0)), torch.randn(4, 6, dtype=F64)
    assert "random" not in str(capture(model, [x]))
    dropping = Drawing(nn.Dropout(0.5))
    assert "random" not in str(capture(dropping, [x], train=False))


def test_equal_blocks_draw_numbers_of_their_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = [nn.Sequential(nn.Linear(6, 6, dtype=F64), nn.Dropout(0.5)) for _ in range(6)]
            self.layers = nn.ModuleList(block)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    model, x = Net(), torch.randn(4, 6, dtype=F64)
    program = capture(model, [x])
    draws = [op.value("draw") for op in program.ops if op.name == "dist.random"]  # type: ignore[attr-defined]
    assert draws == list(range(6))
    with sw.seeded(0):
        loss = model(x)
    found = run_reference(program, values_of(program, model, {"x": x}))["output", "0"]
    torch.testing.assert_close(found, loss.detach())


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (lambda h: h[torch.multinomial(h.detach().softmax(-1), 1).flatten()], "multinomial"),
        (lambda h: h * torch.poisson(h.detach().abs()), "poisson"),
        (lambda h: F.rrelu(h, training=True), "rrelu"),
        (lambda h: h * torch.empty_like(h).cauchy_(), "cauchy"),
    ],
)
def test_other_draws_are_refused_in_both_with_what_to_do(
    body: Callable[[Tensor], Tensor], name: str
) -> None:
    model, x = Drawing(body), torch.randn(4, 6, dtype=F64)
    expected = rf"{name}\S* draws random numbers in a way that has no form .* draw by torch\.rand"
    with pytest.raises(CaptureError, match=rf"test_random\.py:\d+.*{expected}"):
        capture(model, [x])
    with pytest.raises(ValueError, match=expected), sw.seeded(0):
        model(x)


def test_buffer_of_the_name_of_the_state_is_refused() -> None:
    model = Drawing(nn.Dropout(0.5))
    model.register_buffer("random_state", torch.ones(2))
    with pytest.raises(ValueError, match="the model has an attribute 'random_state'"):
        compile_copy(model, (torch.randn(4, 6, dtype=F64),), backend="reference")


# Eager.


def test_eager_goes_on_where_it_was_left_or_from_a_state() -> None:
    with sw.seeded(5) as numbers:
        first = torch.rand(3)
    with numbers:
        second = torch.rand(3)
    with sw.seeded(5):
        assert torch.equal(torch.cat([torch.rand(3), torch.rand(3)]), torch.cat([first, second]))
    with sw.seeded(torch.tensor([5, 1])):
        assert torch.equal(torch.rand(3), second)


def test_eager_draws_in_inference_mode_too() -> None:
    x = torch.ones(4, 6)
    with sw.seeded(1):
        expected = F.dropout(x, 0.5)
    with sw.seeded(1), torch.inference_mode():
        assert torch.equal(F.dropout(x, 0.5), expected)


def test_draw_of_a_checkpoint_in_backward_is_refused() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with sw.seeded(0):
        result: Any = checkpoint(lambda h: F.dropout(h, 0.5).sin(), x, use_reentrant=False)
        with pytest.raises(
            ValueError, match=r"draws random numbers in the backward pass, as torch\.utils\.check"
        ):
            result.sum().backward()


def test_draw_from_a_generator_of_its_own_is_refused_and_left_alone_in_eager() -> None:
    generator = torch.Generator().manual_seed(1)
    model = Drawing(lambda h: h * torch.empty_like(h).uniform_(generator=generator))
    with pytest.raises(CaptureError):
        capture(model, [torch.randn(4, 6, dtype=F64)])
    expected = torch.rand(3, generator=generator.manual_seed(1))
    with sw.seeded(0) as numbers:
        assert torch.equal(torch.rand(3, generator=generator.manual_seed(1)), expected)
    assert numbers.state.tolist() == [0, 0]


def test_what_eager_compiles_inside_runs_as_it_is() -> None:
    compiled = torch.compile(nn.Dropout(0.5), fullgraph=True)
    with sw.seeded(0):
        ours = compiled(torch.ones(8))
    with sw.seeded(0):
        expected = nn.functional.dropout(torch.ones(8), 0.5)
    assert torch.equal(ours, expected)
