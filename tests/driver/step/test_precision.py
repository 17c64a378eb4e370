"""Precision: autocast, asked for or around the call, is that of eager."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import prune

from shardweave.ir.capture.capture import capture
from shardweave.passes.notes import PassNote
from shardweave.tests.compiled import compile_copy, step_of_copy
from shardweave.tests.driver.step.models import Normed, batch
from shardweave.tests.spawn import run_ranks

BF16 = torch.bfloat16


def inputs() -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in batch().items()}


def eager(model: nn.Module, given: dict[str, Tensor], *, cast: bool) -> Tensor:
    """The loss; gradients are in `.grad`."""
    with torch.autocast("cpu", BF16, enabled=cast):
        loss, _ = model(**given)
    loss.backward()
    return loss.detach()


def distance(module: nn.Module, exact: nn.Module) -> float:
    """Of all gradients together, relative."""
    pairs = [
        (module.get_parameter(name).grad, parameter.grad)
        for name, parameter in exact.named_parameters()
    ]
    error = sum(
        ((a.double() - b) ** 2).sum().item() for a, b in pairs if a is not None and b is not None
    )
    return math.sqrt(error / sum((b**2).sum().item() for _, b in pairs if b is not None))


@pytest.mark.parametrize("is_around", [False, True], ids=["asked for", "around the call"])
def test_autocast_on_one_device_is_that_of_eager(is_around: bool) -> None:
    model, given = Normed().float(), inputs()
    step = compile_copy(model, kwargs=given, precision="" if is_around else "bf16")
    with torch.autocast("cpu", BF16, enabled=is_around):
        loss, out = step(**given)
    assert out.dtype == BF16
    assert loss.item() == eager(model, given, cast=True).item()
    for name, parameter in model.named_parameters():
        ours = step.get_parameter(name)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.grad, parameter.grad, rtol=1e-5, atol=1e-6)
    step.eval()
    model.eval()
    with torch.autocast("cpu", BF16):
        torch.testing.assert_close(step(**given)[0], model(**given)[0].detach())


@pytest.mark.parametrize(
    ("mesh", "bound"),
    [
        ("data=2", 1.05),  # the ratios spread by 0.05, so that their mean does by 0.015
        # Each rank rounds its term of a product to bfloat16, and then their sum is rounded.
        ("tensor=2", 1.15),
    ],
)
def test_autocast_on_a_mesh_is_about_as_far_from_float64_as_eager(mesh: str, bound: float) -> None:
    step = compile_copy(
        Normed().float(), kwargs=inputs(), mesh=mesh, backend="reference", precision="bf16"
    )
    ratios: list[float] = []
    for _ in range(16):  # Sums in another order round otherwise: better once, worse once.
        model, given = Normed().float(), inputs()
        exact = copy.deepcopy(model).double()
        eager(exact, {name: tensor.double() for name, tensor in given.items()}, cast=False)
        eager(model, given, cast=True)
        step.zero_grad()
        step.load_state_dict(model.state_dict())
        step(**given)
        assert 1e-4 < distance(model, exact) < 5e-2
        ratios.append(distance(step, exact) / distance(model, exact))
    assert statistics.geometric_mean(ratios) <= bound


def test_programs_with_and_without_autocast_are_kept_apart() -> None:
    model, given = Normed().float(), inputs()
    step = compile_copy(model, kwargs=given, backend="reference")
    plain = step(**given)[1]
    with torch.autocast("cpu", BF16):
        assert step(**given)[1].dtype == BF16
    assert plain.dtype == step(**given)[1].dtype == torch.float32
    assert [name.partition(",")[0] for name, _ in step.programs.kept()] == [
        "training in bfloat16",
        "training",
    ]


def test_autocast_around_a_given_program_is_refused() -> None:
    model, given = Normed().float(), inputs()
    step = step_of_copy(capture(model, kwargs=given), model)
    with (
        torch.autocast("cpu", BF16),
        pytest.raises(ValueError, match=r"dtypes torch\.autocast cannot"),
    ):
        step(**given)


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision 'fp8' is unknown"):
        compile_copy(Normed(), kwargs=batch(), precision="fp8")


# Parameters in bfloat16


def test_parameters_in_bfloat16_are_those_of_a_model_in_bfloat16() -> None:
    model, given = Biased(), {"x": torch.randn(16, 8), "y": torch.randn(16, 8)}
    before = copy.deepcopy(model.state_dict())
    step = compile_copy(model, kwargs=given, precision="bf16-true")
    expected = copy.deepcopy(model).to(BF16)
    loss, out = step(**given)
    wanted, _ = expected(**{name: tensor.to(BF16) for name, tensor in given.items()})
    wanted.backward()
    assert (loss.dtype, out.dtype) == (BF16, BF16)
    assert loss.item() == wanted.item()
    for name, parameter in expected.named_parameters():
        ours = step.get_parameter(name)
        assert ours.dtype == BF16
        torch.testing.assert_close(ours.grad, parameter.grad)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    step.eval()
    expected.eval()
    torch.testing.assert_close(
        step(**given)[0], expected(**{n: t.to(BF16) for n, t in given.items()})[0].detach()
    )


class Turned(nn.Module):
    """Turns pairs by angles that are complex numbers, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        angles = torch.linspace(0, 3, 4)
        self.register_buffer("turns", torch.polar(torch.ones(4), angles))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.linear(x).float().reshape(len(x), 4, 2))
        return torch.view_as_real(pairs * self.get_buffer("turns")).cos().mean()


def test_complex_numbers_stay_where_parameters_are_cast() -> None:
    model, x = Turned(), torch.randn(4, 8)
    step = compile_copy(model, (x,), mesh="data=2", backend="reference", precision="bf16-true")
    assert step.get_buffer("turns").dtype == torch.complex64
    expected = copy.deepcopy(model).bfloat16()(x.to(BF16))
    torch.testing.assert_close(step(x), expected.detach(), rtol=1e-5, atol=1e-6)


def test_weights_that_hooks_make_anew_are_cast_as_their_parameters_are() -> None:
    """Those of pruning are plain tensors of the module, which Python cannot copy."""
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(4, 8)
    prune.l1_unstructured(model.linear, "weight", 0.5)
    step = compile_copy(model, (x,), mesh="data=2", backend="reference", precision="bf16-true")
    assert {p.dtype for p in step.parameters()} == {BF16}
    assert model.linear.weight_orig.dtype == torch.float32
    expected = model.bfloat16()(x.to(BF16))
    torch.testing.assert_close(step(x), expected.detach(), rtol=1e-5, atol=1e-6)


class WithLoss(nn.Module):
    """A linear map, and a loss that is written out where a program is captured."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 5), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.linear(x))


def _ctc(scores: Tensor) -> Tensor:
    labels, lengths = torch.tensor([[1, 2], [3, 3]]), torch.tensor([4, 4])
    return nn.functional.ctc_loss(scores.view(4, 2, 5), labels, lengths, torch.tensor([2, 2]))


def _multilabel(scores: Tensor) -> Tensor:
    return nn.functional.multilabel_margin_loss(scores, torch.tensor([[3, 0, -1, 1, 1]] * 8))


@pytest.mark.parametrize("loss", [_ctc, _multilabel])
def test_losses_that_are_written_out_are_those_of_autocast(
    loss: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model, x = WithLoss(loss), torch.randn(8, 8)
    step = compile_copy(model, (x,), mesh="data=2", backend="reference", precision="bf16")
    with torch.autocast("cpu", BF16):
        expected = model(x)
    found = step(x)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


def test_input_that_is_cast_cannot_have_a_gradient() -> None:
    given = inputs()
    given["x"].requires_grad_()
    with pytest.raises(
        ValueError, match=r"input 'x' has dtype torch\.float32 and requires a gradient, but"
    ):
        compile_copy(Normed().float(), kwargs=given, precision="bf16-true")


# float16, with a loss scale


def test_training_in_float16_with_a_gradient_scaler_is_that_of_eager() -> None:
    model = Normed().float()
    step = compile_copy(model, kwargs=inputs(), precision="fp16")
    ours, theirs = (
        torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2) for _ in "ab"
    )
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (step, model)]
    scales: list[float] = []
    for _ in range(16):
        given = inputs()
        step.zero_grad()
        loss, _ = step(**given, loss_scale=ours)
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            wanted, _ = model(**given)
        theirs.scale(wanted).backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-3)
        for scaler, optimizer, module in zip(
            (ours, theirs), optimizers, (step, model), strict=True
        ):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert ours.get_scale() == theirs.get_scale()
        scales.append(ours.get_scale())
    assert scales[0] < 2.0**17, "no step was skipped"
    assert scales != sorted(scales, reverse=True), "the scale never grew"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.get_parameter(name), parameter, rtol=1e-3, atol=1e-4)


def scale_on_ranks(plan: dict[str, str]) -> tuple[list[float], Tensor, Tensor]:
    """Scales of steps in the second of which a gradient of rank 1 alone is infinite, and a weight
    before and after that step."""
    torch.manual_seed(0)
    step = compile_copy(
        Normed().float(), kwargs=inputs(), mesh="data=2", plan=plan, precision="fp16"
    )
    optimizer = torch.optim.AdamW(step.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales: list[float] = []
    before = after = torch.zeros(())
    for number in range(3):
        optimizer.zero_grad()
        step(**inputs(), loss_scale=scaler)
        if number == 1:
            before = step.full_state_dict()["up.weight"]
            # The first gradient is not sharded, so that torch would ask no other rank.
            first: Any = next(step.parameters())
            assert first.placements == (Replicate(),)
            gradient = step.get_parameter("down.weight").grad
            assert isinstance(gradient, DTensor)
            if dist.get_rank() == 1:
                gradient.to_local()[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if number == 1:
            after = step.full_state_dict()["up.weight"]
    return scales, before, after


def reduce_on_ranks(reduce_dtype: torch.dtype) -> tuple[set[torch.dtype], set[torch.dtype], float]:
    """The dtypes of the all-reduces of a call, and of one of two micro-batches, and how far all
    gradients are from those of eager."""
    torch.manual_seed(0)
    model, given = Normed().float(), inputs()
    step = compile_copy(model, kwargs=given, mesh="data=2", reduce_dtype=reduce_dtype)
    dtypes: list[set[torch.dtype]] = []
    before = dist.all_reduce

    def seen(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes[-1].add(tensor.dtype)
        return before(tensor, *args, **kwargs)

    dist.all_reduce = seen
    try:
        for options in ({}, {"accumulate": 2}):
            dtypes.append(set())
            step(**given, **options)
    finally:
        dist.all_reduce = before
    exact = copy.deepcopy(model).double()
    for rows, weight in ((slice(0, 8), 1.0), (slice(0, 4), 0.5), (slice(4, 8), 0.5)):
        (exact(given["x"][rows].double(), given["y"][rows].double())[0] * weight).backward()
    whole = nn.Module()
    for name, _ in exact.named_parameters():
        gradient = step.get_parameter(name).grad
        assert isinstance(gradient, DTensor)
        step.get_parameter(name).grad = None
        setattr(whole, name.replace(".", "_"), gradient.full_tensor())
    error = sum(
        (getattr(whole, name.replace(".", "_")) - parameter.grad).square().sum().item()
        for name, parameter in exact.named_parameters()
        if parameter.grad is not None
    )
    size = sum(p.grad.square().sum().item() for p in exact.parameters() if p.grad is not None)
    return dtypes[0], dtypes[1], math.sqrt(error / size)


STORED = {"down.weight": '[{"data"}, {}]'}


def on_ranks() -> tuple[Any, ...]:
    """All of the above in one start of processes."""
    return scale_on_ranks({}), scale_on_ranks(STORED), reduce_on_ranks(BF16)


@pytest.mark.filterwarnings("ignore::shardweave.passes.notes.PlanNote")
def test_ranks_agree_on_overflows_and_reduce_in_the_dtype_asked_for() -> None:
    for *scaled, (whole, accumulated, error) in run_ranks(on_ranks, 2):
        for scales, before, after in scaled:
            assert scales == [8.0, 4.0, 4.0]
            torch.testing.assert_close(before, after, rtol=0, atol=0)
        # The losses, and the statistics of batch norm, are in float32 as before.
        assert whole == accumulated == {BF16, torch.float32}
        assert 1e-4 < error < 1e-2


def test_dtypes_of_reductions_that_there_are_not_are_refused() -> None:
    options: dict[str, Any] = {"kwargs": inputs(), "mesh": "data=2", "backend": "reference"}
    with pytest.raises(ValueError, match=r"reduce_dtype=torch\.int8 is not supported; use one of"):
        compile_copy(Normed().float(), **options, reduce_dtype=torch.int8)
    with pytest.raises(
        ValueError, match=r"put 'reduce-in\{dtype=\"bfloat16\"\}' after insert-collectives"
    ):
        compile_copy(Normed().float(), **options, reduce_dtype=BF16, passes="preset:partition")
    with pytest.warns(PassNote, match="in another dtype than float32"):
        compile_copy(Normed().float(), **options, reduce_dtype=torch.float32)


def test_bias_added_to_a_sum_in_float32_is_closer_to_float64() -> None:
    """Tensor parallelism rounds each rank's term, their sum, and the sum with the bias."""
    steps = [
        compile_copy(
            Biased(),
            (torch.randn(16, 8), torch.randn(16, 8)),
            mesh="tensor=2",
            backend="reference",
            precision="bf16",
            reduce_dtype=dtype,
        )
        for dtype in (None, torch.float32)
    ]
    errors = [0.0, 0.0]
    for _ in range(16):
        model, x, y = Biased(), torch.randn(16, 8), torch.randn(16, 8)
        exact = model.double()(x.double(), y.double())[1]
        for index, step in enumerate(steps):
            step.load_state_dict(model.state_dict())
            errors[index] += (step(x, y)[1] - exact).norm().item()
    assert errors[1] < 0.95 * errors[0]


class Biased(nn.Module):
    """Two linear maps, of which tensor parallelism cuts the second along what it contracts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.down(self.up(x).relu())
        return nn.functional.mse_loss(out, y), out
