"""The comparison with eager: what it calls equal, and what it does not."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardweave.driver.checking.check import (
    TOLERANCES,
    Expected,
    check_steps,
    coarsest_dtype,
    compare,
    compare_steps,
    eager_step,
    moved_steps,
    relative_error,
    results_of,
    run_eager,
    tolerance_of,
)
from shardweave.ir.capture.capture import capture
from shardweave.ir.capture.outputs import loss_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.staged import is_staged
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline

F64 = torch.float64


def expected(loss: float = 2.0, **gradients: list[float]) -> Expected:
    """Results with these gradients and no buffers."""
    return Expected(loss, {n: torch.tensor(g, dtype=F64) for n, g in gradients.items()}, {})


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of one device that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_results_are_those_of_their_step_though_the_next_one_writes(one_rank: DeviceMesh) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("count", DTensor.from_local(torch.zeros(2), one_rank, [Replicate()]))
    results = results_of(model, torch.tensor(0.0))
    model.get_buffer("count").add_(1)
    assert results.buffers["count"].tolist() == [0.0, 0.0]


def test_equal_results_pass_with_error_zero() -> None:
    result = compare(expected(a=[3.0, 4.0]), expected(a=[3.0, 4.0]), F64)
    assert result.ok
    assert result.max_rel_grad_error == 0.0
    assert result.num_parameters == 1


def test_error_is_relative_to_the_norm_of_the_parameters_own_gradient() -> None:
    eager = expected(a=[3.0, 4.0], b=[1.0, 0.0])
    found = expected(a=[3.0, 4.0], b=[1.0, 0.01])
    result = compare(found, eager, F64)
    assert not result.ok
    assert result.worst_parameter == "b"
    assert result.max_rel_grad_error == pytest.approx(0.01)


def test_rounding_in_a_gradient_that_is_zero_passes_and_is_named() -> None:
    eager = expected(a=[3.0, 4.0], key_bias=[1e-17, -2e-17])
    found = expected(a=[3.0, 4.0], key_bias=[-3e-17, 1e-17])
    result = compare(found, eager, F64)
    assert result.ok
    assert result.at_floor == ("key_bias",)


def test_gradient_that_should_be_zero_but_is_not_fails() -> None:
    result = compare(expected(a=[3.0], b=[1e-13]), expected(a=[3.0], b=[0.0]), F64)
    assert not result.ok
    assert result.worst_parameter == "b"


def test_all_zero_gradients_are_compared_absolutely() -> None:
    assert compare(expected(a=[0.0]), expected(a=[0.0]), F64).ok
    assert not compare(expected(a=[1e-3]), expected(a=[0.0]), F64).ok


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_gradient_that_is_not_finite_fails_and_is_the_worst(odd: float) -> None:
    result = compare(expected(a=[odd], b=[2.0]), expected(a=[1.0], b=[1.0]), F64)
    assert not result.ok
    assert result.worst_parameter == "a"


def test_wrong_loss_fails() -> None:
    assert not compare(expected(2.1, a=[1.0]), expected(2.0, a=[1.0]), F64).ok
    assert not compare(expected(math.nan, a=[1.0]), expected(2.0, a=[1.0]), F64).ok


def test_wrong_buffer_fails_and_is_named() -> None:
    eager = Expected(1.0, {}, {"running_mean": torch.tensor([1.0, 2.0])})
    found = Expected(1.0, {}, {"running_mean": torch.tensor([1.0, 2.1])})
    result = compare(found, eager, F64)
    assert not result.ok
    assert result.worst_buffer == "running_mean"


def test_buffer_with_infinite_values_is_compared_where_it_is_finite_and_has_to_be_the_same() -> (
    None
):
    mask = torch.tensor([0.0, -math.inf, math.nan, 1.0])
    eager = Expected(1.0, {}, {"mask": mask})
    assert compare(Expected(1.0, {}, {"mask": mask.clone()}), eager, F64).ok
    for index, other in ((1, math.inf), (1, 0.0), (2, 0.0), (0, -math.inf), (3, 1.1)):
        wrong = mask.clone()
        wrong[index] = other
        assert not compare(Expected(1.0, {}, {"mask": wrong}), eager, F64).ok


def test_sparse_buffer_is_compared_by_its_elements() -> None:
    eager = Expected(1.0, {}, {"heads": torch.eye(3).to_sparse()})
    assert compare(Expected(1.0, {}, {"heads": torch.eye(3).to_sparse()}), eager, F64).ok
    assert not compare(Expected(1.0, {}, {"heads": torch.ones(3, 3)}), eager, F64).ok


def test_missing_parameter_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="no gradient or buffer 'a'"):
        compare(expected(), expected(a=[1.0]), F64)


def test_parameter_of_another_shape_is_an_error_that_gives_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"'a' has shape \(1,\) in the step, but \(2,\)"):
        compare(expected(a=[1.0]), expected(a=[1.0, 1.0]), F64)


def test_dtype_without_a_bound_is_an_error_that_lists_those_that_have_one() -> None:
    with pytest.raises(ValueError, match=r"torch\.int8 has no error bound .*float64"):
        tolerance_of(torch.int8)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_tolerance_is_above_the_rounding_of_its_dtype_and_below_a_missing_term(
    dtype: torch.dtype,
) -> None:
    tolerance, eps = tolerance_of(dtype), torch.finfo(dtype).eps
    assert 10 * eps < tolerance.bound < 0.25
    assert eps / 10 < tolerance.bound * tolerance.floor
    assert tolerance.floor <= 0.01


class Scaled(nn.Module):
    """A parameter that the loss uses, one that it does not, and a buffer that it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.unused = nn.Parameter(torch.tensor([1.0]))
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1.0)
        return (self.used * x).sum()


def test_eager_run_gives_loss_gradients_and_updated_buffers() -> None:
    result = run_eager(Scaled(), {"x": torch.tensor([3.0, 4.0])})
    assert result.loss == 11.0
    assert result.gradients["used"].tolist() == [3.0, 4.0]
    assert result.gradients["unused"].tolist() == [0.0]
    assert result.buffers["calls"].item() == 1.0


def test_loss_is_found_in_whatever_a_model_returns() -> None:
    loss = torch.tensor(1.5)
    alone = {"contrastive": loss, "image": torch.ones(2)}
    for output in (loss, (loss, "logits"), {"loss": loss}, alone, nn.Module()):
        if isinstance(output, nn.Module):
            output.loss = loss
        assert loss_of(output) is loss


def test_eager_model_without_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="no scalar loss; return the loss"):
        eager_step(nn.Identity(), {"input": torch.ones(2)})


def test_relative_error_of_an_expected_zero_is_absolute() -> None:
    assert relative_error(0.5, 0.0) == 0.5
    assert relative_error(3.0, 2.0) == 0.5


# Several steps, and models that compute in several dtypes.


def test_check_of_several_steps_has_the_largest_error_of_each_kind() -> None:
    good = expected(1.0, a=[3.0])
    later = expected(2.0, a=[5.0])
    result = compare_steps([good, expected(2.2, a=[6.0])], [good, later], F64)
    assert not result.ok
    assert result.num_steps == 2
    assert result.loss == result.eager_loss == 1.0
    assert result.loss_error == pytest.approx(0.1)
    assert result.max_rel_grad_error == pytest.approx(0.2)


def test_buffer_that_is_zero_but_for_rounding_is_measured_against_all_buffers() -> None:
    found = Expected(1.0, {}, {"mean": torch.tensor([1e-16], dtype=F64), "var": torch.ones(1)})
    eager = Expected(1.0, {}, {"mean": torch.tensor([2e-16], dtype=F64), "var": torch.ones(1)})
    assert compare(found, eager, F64).ok
    wrong = Expected(1.0, {}, {"mean": torch.tensor([1e-3], dtype=F64), "var": torch.ones(1)})
    assert not compare(wrong, eager, F64).ok


class Rounding(nn.Module):
    """Computes a part in float32, whatever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).float().exp().sum()


def test_bound_is_that_of_the_coarsest_dtype_where_the_finest_is_not_met() -> None:
    program = capture(Rounding(), [torch.randn(2, 4, dtype=F64)])
    assert coarsest_dtype(program, F64) is torch.float32
    exact, rounded = expected(1.0, a=[1.0]), expected(1.0, a=[1.0 + 1e-7])
    assert check_steps([exact], [exact], F64, program, list).bound == 1e-9
    result = check_steps([rounded], [exact], F64, program, list)
    assert result.ok
    assert result.bound == 1e-4


class RoundingWithin(Rounding):
    """The same, of which nothing is seen in the dtype of its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).double()


def test_bound_of_stages_is_that_of_what_their_functions_compute_in() -> None:
    program = capture(RoundingWithin(), [torch.randn(4, 4, dtype=F64)])
    plan = Plan(pipeline=Pipeline((("linear",),), 2))
    staged = partition(program, Mesh(), plan)
    assert is_staged(staged)
    assert coarsest_dtype(staged, F64) is torch.float32


@pytest.mark.parametrize(("own", "bound"), [(1e-12, 1e-9), (1e-8, 2e-7), (1e-3, 1e-4)])
def test_model_that_multiplies_rounding_is_held_to_what_eager_loses(
    own: float, bound: float
) -> None:
    program = capture(Loose(), [torch.randn(2, 4, dtype=F64)])
    exact, away = expected(1.0, a=[1.0]), expected(1.0, a=[1.0 + 1.5e-7])
    result = check_steps([away], [exact], F64, program, lambda: [expected(1.0, a=[1.0 + own])])
    assert result.bound == pytest.approx(bound)
    assert result.ok == (bound > 1.5e-7)
    assert bool(result.bound_of) == (bound > 1e-9)


class Loose(nn.Module):
    """A linear map and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


def test_moved_steps_differ_in_the_last_digits_alone() -> None:
    model, batch = Loose(), {"x": torch.randn(2, 4, dtype=F64)}
    eager = [run_eager(model, batch)]
    own = compare_steps(moved_steps(model, [batch]), eager, F64)
    assert 0 < own.max_rel_grad_error < 1e-14
