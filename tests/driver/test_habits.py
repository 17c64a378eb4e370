"""Habits from plain PyTorch that a step cannot follow are answered, not silently ignored."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardweave as sw
from shardweave.driver.step import programs
from shardweave.driver.step.lowering import Lowered, made_here
from shardweave.driver.step.precision import copy_of_model
from shardweave.ir.library.philox import STATE
from shardweave.tests.compiled import in_eager


class Scaled(nn.Module):
    """A map, and settings of which forward reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale, self.epoch = 1.0, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.fc(x) * self.scale
        return out.square().mean(), out


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def compiled(model: nn.Module, x: Tensor = X, **options: object) -> sw.CompiledModule:
    options = {"mesh": "data=2", "backend": "reference", "backward": "in_call", **options}
    return sw.compile(model, (x,), **options)  # type: ignore[arg-type]


def test_setting_changed_after_compile_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardweave")
    model = Scaled()
    step = compiled(model)
    step(X)
    model.scale = 5.0
    torch.testing.assert_close(step(X)[0], in_eager(model, X)[0])
    step(X)
    (record,) = caplog.records
    assert record.getMessage().endswith(": scale is 5.0, was 1.0")
    model.scale = 1.0
    torch.testing.assert_close(step(X)[0], in_eager(model, X)[0])


def test_setting_that_forward_does_not_read_costs_one_look(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "shardweave")
    looks: list[object] = []

    def counting(*args: Any) -> Lowered:
        looks.append(args)
        return made_here(*args)

    monkeypatch.setattr(programs, "made_here", counting)
    model = Scaled()
    step = compiled(model)
    for epoch in range(3):
        model.epoch = epoch
        step(X)
    assert len(looks) == 1
    assert caplog.records == [], "no program was compiled"


def test_program_that_was_dropped_and_is_compiled_again_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "shardweave")
    step = compiled(Scaled(), max_programs=1)
    step(torch.randn(2, 4))
    step(X)
    assert "the last 1 programs are kept; pad batches" in caplog.records[-1].getMessage()


def test_plan_of_a_program_captured_by_position_names_inputs_as_forward_does() -> None:
    model = Scaled()
    plan = sw.plan(sw.capture(model, (X,)), "data=2", "megatron")
    assert dict(plan.inputs) == {"x": '[{"data"}, {}]'}
    step = compiled(copy_of_model(model), plan=plan)
    torch.testing.assert_close(step(X)[0], model(X)[0])


def test_product_of_two_dtypes_is_refused_with_its_line() -> None:
    with pytest.raises(sw.CaptureError, match=r"test_habits.py.*one dtype.*float64 and torch.flo"):
        compiled(Scaled(), X.double())


def test_precision_may_be_none() -> None:
    compiled(Scaled(), precision=None)
    with pytest.raises(ValueError, match=r"'fp32' is unknown; use one of .*leave it out \(None\)"):
        compiled(Scaled(), precision="fp32")


def test_zero_stores_parameters_in_shards() -> None:
    model = Scaled()
    step = compiled(model, zero=3)
    assert step.stored["param", "fc.weight"].shape == (4, 4)
    assert step.shardings["param", "fc.weight"].axes == {"data"}
    torch.testing.assert_close(step(X)[0], in_eager(model, X)[0])
    with pytest.raises(ValueError, match="no ZeRO stage"):
        compiled(Scaled(), zero=4)
    with pytest.raises(
        ValueError, match="parameters over the axis 'data', which the mesh tensor=2"
    ):
        sw.compile(Scaled(), (X,), mesh="tensor=2", zero=1, backend="reference")


def test_model_that_something_else_wraps_is_refused() -> None:
    for kind in (DistributedDataParallel, nn.DataParallel):
        wrapped = kind.__new__(kind)
        nn.Module.__init__(wrapped)
        with pytest.raises(ValueError, match=r"pass model\.module"):
            compiled(wrapped)
    scripted = torch.jit.ScriptModule.__new__(torch.jit.ScriptModule)
    with pytest.raises(ValueError, match="a TorchScript module; pass the Python module"):
        compiled(scripted)
    with pytest.raises(ValueError, match=r"pass the original model, model._orig_mod"):
        compiled(torch.compile(Scaled(), backend="eager"))  # type: ignore[arg-type]


def test_mesh_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh is a list, expected"):
        sw.compile(Scaled(), (X,), mesh=[2], backend="reference")  # pyright: ignore[reportArgumentType]


def test_compiled_model_is_not_pickled_and_says_so() -> None:
    step = compiled(Scaled())
    with pytest.raises(TypeError, match=r"its model\.full_state_dict\(\)"):
        torch.save(step, io.BytesIO())
    with pytest.raises(TypeError, match=r"sw\.save_checkpoint or .*copy\.deepcopy"):
        pickle.dumps(step)


def test_copy_of_a_module_of_a_step_has_tensors_of_its_own() -> None:
    ours = compiled(Scaled()).fc
    twin = copy.deepcopy(ours)
    assert isinstance(twin, nn.Linear)
    with torch.no_grad():
        twin.weight.zero_()
    assert ours.weight.any()


def test_call_after_one_that_failed_on_all_virtual_ranks_is_as_before() -> None:
    table, ids = nn.EmbeddingBag(4, 2).double(), torch.zeros(4, 3, dtype=torch.int64)
    step = sw.compile(table, (ids,), mesh="data=2", loss=lambda out: out.sum(), backend="reference")
    with pytest.raises((ValueError, IndexError)):
        step(ids + 9)
    torch.testing.assert_close(step(ids)[0], in_eager(table, ids).sum(), rtol=1e-12, atol=1e-12)


def test_step_cannot_become_another_dtype_or_device() -> None:
    step = compiled(Scaled())
    before = step(X)[0]
    for change in (step.half, step.double, lambda: step.to("meta")):
        with pytest.raises(
            TypeError, match=r"fc\.weight|weight' is .* cannot become .* precision="
        ):
            change()
    with pytest.raises(TypeError, match=r"stays on cpu \(.*\)\. Convert the model before sw.comp"):
        step.to("cuda:7" if torch.cuda.is_available() else "cuda")
    assert step.float().to("cpu") is step
    torch.testing.assert_close(step(X)[0], before)


def test_numbers_of_numpy_are_saved(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path, 1, {"best": np.float64(0.5), "counts": [np.int64(3)]})
    last = sw.load_checkpoint(tmp_path, {})
    assert last is not None
    assert last.values == {"best": 0.5, "counts": [3]}


def test_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    step = compiled(Scaled())
    step(X)
    adam = torch.optim.AdamW(step.parameters())
    adam.step()
    sw.save_checkpoint(tmp_path, 1, {"model": step, "optimizer": adam})
    other = torch.optim.SGD(step.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="'optimizer' is of another class"):
        sw.load_checkpoint(tmp_path, {"model": step, "optimizer": other})


def test_full_tensor_takes_plain_tensors_and_trees() -> None:
    loss, out = sw.full_tensor(compiled(Scaled())(X))
    assert loss.shape == ()
    assert out.shape == (4, 4)


def test_state_of_the_plain_model_is_loaded_into_one_that_draws() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Scaled())
    plain = copy.deepcopy(model)
    step = compiled(model)
    before = step.state_dict()[STATE].clone()
    with torch.no_grad():
        plain[0].weight.fill_(2.0)  # type: ignore[union-attr]
    step.load_state_dict(plain.state_dict())
    assert set(step.full_state_dict()) - set(plain.state_dict()) == {STATE}
    torch.testing.assert_close(step.full_state_dict()["0.weight"], torch.full((4, 4), 2.0))
    assert torch.equal(step.state_dict()[STATE], before)


def test_attributes_of_other_wrappers_name_what_stands_for_them() -> None:
    step = compiled(Scaled())
    assert not hasattr(step, "module")
    for name, words in (
        ("module", "it is the model itself"),
        ("clip_grad_norm_", r"nn.utils.clip_grad_norm_\(model.parameters"),
        ("set_requires_gradient_sync", "no_sync"),
    ):
        with pytest.raises(AttributeError, match=words):
            getattr(step, name)


def test_part_of_the_model_may_have_the_name_of_such_an_attribute() -> None:
    model = nn.Sequential()
    model.module = Scaled()
    assert compiled(model).get_submodule("module").fc.weight.shape == (4, 4)  # type: ignore[union-attr]


def test_processes_do_not_share_the_memory_of_a_compiled_model() -> None:
    with pytest.raises(ValueError, match="give a mesh such as data=2"):
        compiled(Scaled()).share_memory()


def test_copy_of_a_step_trains_on_its_own() -> None:
    model = Scaled()
    step = compiled(model)
    step(X)
    twin = copy.deepcopy(step)
    before = copy.deepcopy(step.full_state_dict())
    step.zero_grad()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        twin(X)
        optimizer.step()
    assert all(parameter.grad is None for parameter in step.parameters())
    torch.testing.assert_close(step.full_state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(twin(X)[0], in_eager(twin, X)[0])
    with pytest.raises(RuntimeError, match="backward ran in the step"):
        torch.autograd.grad(twin(X)[0], twin.fc.weight)


def test_average_of_weights_is_that_of_eager() -> None:
    model = Scaled()
    step = compiled(copy_of_model(model))
    averages = [
        AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for module in (step, model)
    ]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (step, model)]
    for _ in range(3):
        for module, average, optimizer in zip((step, model), averages, optimizers, strict=True):
            optimizer.zero_grad()
            loss = module(X)[0]
            if module is model:
                loss.backward()
            optimizer.step()
            average.update_parameters(module)
    ours, theirs = (average.eval()(X)[0] for average in averages)
    torch.testing.assert_close(ours, theirs.detach())
    assert step.training


def test_hook_of_the_model_that_is_registered_after_compile_is_called() -> None:
    model = Scaled()
    step = compiled(model)
    step(X)

    def doubled(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        del module, inputs
        return output * 2

    handle = model.fc.register_forward_hook(doubled)
    torch.testing.assert_close(step(X)[0], in_eager(model, X)[0])
    handle.remove()
    torch.testing.assert_close(step(X)[0], in_eager(model, X)[0])


def test_forward_and_modules_of_the_model_may_change_after_compile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Scaled())
    step = compiled(model)
    model[1] = nn.Tanh()
    torch.testing.assert_close(step(X)[0], in_eager(model, X)[0])
    model[1].forward = torch.sin  # type: ignore[method-assign]
    torch.testing.assert_close(step(X)[0], in_eager(model, X)[0])
    model[0] = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"'0' of the model was replaced.*Replace it before sw.compile"
    ):
        step(X)


def test_tensor_or_module_of_a_step_is_not_replaced() -> None:
    def other() -> nn.Parameter:
        return nn.Parameter(torch.ones(4, 4))

    for change, words in (
        (lambda step: setattr(step.fc, "weight", other()), r"'fc\.weight' of the compiled model"),
        (lambda step: setattr(step, "fc", nn.Linear(4, 4)), "module 'fc' of the model"),
        (lambda step: nn.utils.parametrizations.weight_norm(step.fc), r"'fc\.weight' of the comp"),
    ):
        step = compiled(Scaled())
        change(step)
        with pytest.raises(ValueError, match=f"{words}.* was replaced"):
            step(X)
    with pytest.raises(ValueError, match=r"'fc\.weight' of the compiled model was replaced"):
        torch.func.functional_call(compiled(Scaled()), {"fc.weight": other()}, (X,))


def test_step_is_not_transformed_by_torch_func() -> None:
    step = compiled(Scaled())
    with pytest.raises(ValueError, match=r"^torch.func \(vmap, grad"):
        torch.vmap(lambda x: step(x[None])[0])(X)


def test_step_of_which_nothing_is_trained_says_so() -> None:
    step = compiled(Scaled())
    step.requires_grad_(False)
    with pytest.warns(sw.PlanNote, match="no parameter of the step requires one, nor an input"):
        step(X)
    step.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X)


def test_seed_of_torch_that_comes_too_late_is_warned_of_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), Scaled())
    step, seeded = compiled(copy_of_model(model)), compiled(model, seed=3)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X)
        torch.manual_seed(1)
        seeded(X)
    with pytest.warns(UserWarning, match="manual_seed has no effect on a step after sw.compile"):
        step(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X)


class Regression(nn.Module):
    """A loss that torch does not trace without rows, though eager has one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.fc(x), x)


def test_batch_without_rows_is_as_in_eager_or_refused_in_words() -> None:
    step = compiled(Scaled())
    with pytest.warns(sw.PlanNote, match="first dim 0 is too short"):
        assert step(X[:0])[0].isnan()
    assert all(not parameter.grad.any() for parameter in step.parameters())  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"input 'x' of \(0, 4\) float32 has no elements"):
        compiled(Regression())(X[:0])


def test_step_under_torch_compile_is_the_step() -> None:
    model = Scaled()
    step = compiled(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.*")
        loss = torch.compile(step)(X)[0]
    torch.testing.assert_close(loss, in_eager(model, X)[0])
    assert all(parameter.grad is not None for parameter in step.parameters())
