"""Ops of torch.library that torch does not have: ops of a program, sharded by a record."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.backends.emit.emit import emit, load_step
from shardweave.planners.lowering.lower import local_program
from shardweave.tests.eager import Model, assert_three_steps_equal_eager, rows

OPS = "shardweave_tests"


def _op(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.custom_op(f"{OPS}::{name}", mutates_args=(), **options)


@_op("clip")
def clip(x: Tensor, bound: float) -> Tensor:
    """bound * tanh(x / bound), by a kernel of somebody's own."""
    return torch.tanh(x / bound) * bound


@_op("clip_backward")
def clip_backward(gradient: Tensor, y: Tensor, bound: float) -> Tensor:
    return gradient * (1 - (y / bound) ** 2)


def _keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.bound = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return clip_backward(gradient, ctx.saved_tensors[0], ctx.bound), None


clip.register_fake(lambda x, bound: torch.empty_like(x))
clip_backward.register_fake(lambda gradient, y, bound: torch.empty_like(y))
clip.register_autograd(_backward, setup_context=_keep)


@_op("total_and_rows")
def total_and_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Its kernel reads memory as it lies."""
    flat = torch.as_strided(x, (x.numel(),), (1,))
    return flat[:2].clone(), x.sum(1)


@_op("noise", tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@torch.library.custom_op(f"{OPS}::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


seen = torch.library.Library(OPS, "FRAGMENT")
seen.define("seen(Tensor(a) x) -> Tensor(a)")
seen.impl("seen", lambda x: x.view(x.shape), "CompositeExplicitAutograd")
torch.library.register_fake(f"{OPS}::seen", lambda x: x.view(x.shape), lib=seen)


@_op("bare")
def bare(x: Tensor) -> Tensor:
    return 2 * x


total_and_rows.register_fake(lambda x: (x.new_empty(2), x.new_empty(x.shape[0])))
noise.register_fake(torch.empty_like)


def _rows(x: Tensor) -> Tensor:
    head, sums = total_and_rows(x.detach())
    return x * head.sum() + sums


def _doubled(x: Tensor) -> Tensor:
    x = x.clone()
    double_(x)
    return x


@pytest.fixture
def ruled() -> Iterator[None]:
    """With records by which the op and its gradient are computed element by element."""
    from shardweave.ir.ops import registry

    for name in ("clip", "clip_backward"):
        sw.register_op(sw.OpSpec(f"{OPS}.{name}", rule="pointwise"), replace=True)
    yield
    for name in ("clip", "clip_backward"):
        del registry._RECORDS[f"{OPS}.{name}"]


def _net(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Model(lambda self, x: self.linear(function(self.linear(x))).square().sum())


@pytest.mark.parametrize("function", [lambda x: clip(x, 2.0), _rows], ids=["clip", "rows"])
def test_op_without_a_rule_is_exact_on_whole_operands_and_noted(function: Any) -> None:
    model = _net(function)
    with pytest.warns(UserWarning, match=rf"{OPS}\.\w+ \(in .*\) has no factor rule"):
        assert_three_steps_equal_eager(model, mesh="data=2,tensor=2")


@pytest.mark.usefixtures("ruled")
def test_op_with_a_rule_is_sharded_read_back_proved_and_emitted() -> None:
    model = _net(lambda x: clip(x, 2.0))
    program = sw.capture(model, rows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_three_steps_equal_eager(model)
    assert f"{OPS}.clip(" in str(program)
    assert str(sw.parse(str(program))) == str(program)
    local = local_program(program, sw.plan(program, "data=2", "megatron"))
    sw.prove(local, against=program)
    assert {c.kind for c in local.stats().collectives} == {"all_reduce"}
    source = emit(local)
    assert f"torch.ops.{OPS}.clip.default(" in source
    load_step(source)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (noise, r"noise draws random numbers in a way.*draw by torch\.rand"),
        (_doubled, r"double_\.default changes an argument in place; let the op return a new"),
        (
            lambda x: x + torch.ops.shardweave_tests.seen(x.detach()),
            r"let the op return a new tens",
        ),
        (bare, r"no fake impl.*use `bare\.register_fake`"),
        (lambda x: total_and_rows(x)[1][:, None] * x, r"no autograd formula.*register_autograd"),
    ],
)
def test_op_that_cannot_be_in_a_program_is_refused_with_its_line(
    function: Callable[[Tensor], Tensor], expected: str
) -> None:
    is_without_gradient = function is noise
    model = _net(lambda x: x + function(x.detach() if is_without_gradient else x))
    with pytest.raises(
        sw.CaptureError, match=rf"(test_custom_ops\.py:\d+.*|^the model.*){expected}"
    ):
        sw.capture(model, rows())


def test_op_of_a_triton_kernel_stays_an_op() -> None:
    triton = pytest.importorskip("triton")

    @triton.jit
    def double_kernel(x, y, n, BLOCK: triton.language.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        offsets = triton.language.arange(0, BLOCK)
        value = triton.language.load(x + offsets, mask=offsets < n)
        triton.language.store(y + offsets, 2 * value, mask=offsets < n)

    @torch.library.triton_op(f"{OPS}::double_on_gpu", mutates_args={})
    def double(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(double_kernel)[(1,)](x, y, x.numel(), 64)
        return y

    double.register_autograd(lambda _, gradient: double(gradient))
    program = sw.capture(_net(double), rows())
    assert [op.name for op in program.ops].count(f"{OPS}.double_on_gpu") == 2
