"""A step on one device, and on four processes."""

# torch documents dcp.save and dcp.load, but does not export them by its own rules.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardweave.backends.emit.emit import emit
from shardweave.backends.state.checkpoint import checkpointable
from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.driver.models.models import build_example
from shardweave.driver.step.step import Step
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.tests.backends.programs import MLPModel, Squares, mlp_program, squares_program
from shardweave.tests.compiled import OfX, step_of_copy
from shardweave.tests.spawn import run_ranks

GPT = "gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=2"
CNN = "cnn:depth=10,channels=4,size=16,batch=2"


def captured(spec: str) -> tuple[nn.Module, dict[str, Tensor], Program]:
    example = build_example(spec, dtype=torch.float64)
    return example.module, example.kwargs, capture(example.module, kwargs=example.kwargs)


# One device


def test_step_without_a_mesh_leaves_eager_gradients_on_plain_parameters() -> None:
    model, batch, program = captured(GPT)
    step = step_of_copy(program, model)
    loss = step(**batch)
    wanted = model(**batch)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    with pytest.raises(RuntimeError, match="backward ran in the step already"):
        (loss / 2).backward()
    assert [name for name, _ in step.named_parameters()] == [n for n, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        found = step.get_parameter(name)
        assert type(found) is nn.Parameter
        torch.testing.assert_close(found.grad, parameter.grad)


def test_gradients_add_up_until_zero_grad() -> None:
    model, batch, program = captured(GPT)
    step = step_of_copy(program, model)
    step(**batch)
    once = step.get_parameter("ln_f.weight").grad
    assert once is not None
    once = once.clone()
    step(**batch)
    torch.testing.assert_close(step.get_parameter("ln_f.weight").grad, 2 * once)
    step.zero_grad()
    assert step.get_parameter("ln_f.weight").grad is None


def test_training_a_step_leaves_the_model_alone() -> None:
    model, batch, program = captured(GPT)
    before = copy.deepcopy(model.state_dict())
    step = step_of_copy(program, model)
    step(**batch)
    torch.optim.SGD(step.parameters(), lr=1.0).step()
    torch.testing.assert_close(model.state_dict(), before)
    assert not torch.equal(step.state_dict()["ln_f.weight"], before["ln_f.weight"])


def test_buffers_are_updated_as_eager_updates_them() -> None:
    model, batch, program = captured(CNN)
    step = step_of_copy(program, model)
    step(**batch)
    model(**batch)
    assert dict(model.named_buffers())
    torch.testing.assert_close(dict(step.named_buffers()), dict(model.named_buffers()))


def test_state_dict_has_the_names_of_the_model_and_ties_what_is_tied() -> None:
    model, _, program = captured(GPT)
    step = step_of_copy(program, model)
    assert list(step.state_dict()) == list(model.state_dict())
    first, second = (step.state_dict()[name] for name in ("wte.weight", "head.weight"))
    assert first.data_ptr() == second.data_ptr()
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in step.parameters():
            parameter.add_(1)
    fresh.load_state_dict(step.full_state_dict(), strict=True)
    torch.testing.assert_close(fresh.state_dict(), step.state_dict())
    step.load_state_dict(model.state_dict())
    torch.testing.assert_close(step.state_dict(), model.state_dict())


def test_a_state_of_another_shape_or_with_other_names_is_refused() -> None:
    model, _, program = captured(GPT)
    step = step_of_copy(program, model)
    state = dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*ln_f\.bias"):
        step.load_state_dict({k: v for k, v in state.items() if k != "ln_f.bias"})
    with pytest.raises(ValueError, match=r"'ln_f\.bias' has shape \(3,\), expected.*\(16,\)"):
        step.load_state_dict({**state, "ln_f.bias": torch.zeros(3)})


def test_what_the_program_does_not_use_is_kept_without_a_gradient() -> None:
    model = MLPModel(unused=True)
    x = torch.randn(6, 4, dtype=torch.float64)
    step = step_of_copy(capture(model, args=(x,)), model)
    step(x)
    assert step.get_parameter("spare").grad is None
    assert torch.equal(step.state_dict()["table"], torch.arange(3))
    assert list(step.state_dict()) == list(model.state_dict())


def test_a_frozen_parameter_gets_no_gradient() -> None:
    model = MLPModel()
    x = torch.randn(6, 4, dtype=torch.float64)
    program = capture(model, args=(x,))
    model.up.bias.requires_grad_(False)
    step = step_of_copy(program, model)
    step(x)
    assert step.get_parameter("up.bias").grad is None
    assert step.get_parameter("up.weight").grad is not None


def test_a_program_without_gradients_returns_the_outputs_of_the_model() -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 3)})
    model.forward = lambda x: model["up"](x).tanh()  # pyright: ignore[reportAttributeAccessIssue]
    x = torch.randn(2, 4)
    step = step_of_copy(capture(model, args=(x,), train=False), model)
    torch.testing.assert_close(step(x), model(x).detach())


def test_layers_named_as_the_steps_own_attributes_are_kept() -> None:
    names = ("program", "runtime", "programs", "bound", "gradients", "stored", "backend", "modes")
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    model.forward = lambda x: sum(model[name](x) for name in names).sum()  # pyright: ignore[reportAttributeAccessIssue]
    x = torch.randn(2, 4)
    step = step_of_copy(capture(model, args=(x,)), model)
    step(x)
    assert list(step.state_dict()) == list(model.state_dict())
    assert isinstance(Step.of(step).program, Program)
    assert isinstance(step.program, nn.Linear)


def test_a_wrong_batch_is_explained() -> None:
    model, batch, program = captured(GPT)
    step = step_of_copy(program, model)
    with pytest.raises(TypeError, match="missing a required argument: 'labels'"):
        step(input_ids=batch["input_ids"])
    with pytest.raises(ValueError, match=r"'labels' has shape \(1, 8\).*global shape \(2, 8\)"):
        step(**{**batch, "labels": batch["labels"][:1]})


def test_a_model_or_mesh_that_does_not_fit_the_program_is_explained() -> None:
    model, x = MLPModel(), torch.randn(6, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"the model lacks param 'up\.weight'"):
        step_of_copy(capture(model, args=(x,)), OfX())
    _, _, program = captured(GPT)
    other = build_example(GPT.replace("hidden=16", "hidden=8"), dtype=torch.float64).module
    with pytest.raises(ValueError, match=r"has shape \(32, 8\).*program expects \(32, 16\)"):
        step_of_copy(program, other)
    with pytest.raises(ValueError, match="but 1 process runs"):
        step_of_copy(mlp_program(), MLPModel())


def test_source_is_the_emitted_module() -> None:
    model, _, program = captured(GPT)
    assert step_of_copy(program, model).source == emit(program)


@pytest.mark.gpu
def test_step_on_one_gpu_equals_eager_on_the_cpu() -> None:
    model, batch, program = captured(GPT)
    wanted = model(**batch)
    wanted.backward()
    on_gpu = copy.deepcopy(model).cuda()
    step = step_of_copy(program, on_gpu)
    loss = step(**{name: tensor.cuda() for name, tensor in batch.items()})
    torch.testing.assert_close(loss.cpu(), wanted.detach())
    for name, parameter in model.named_parameters():
        grad = step.get_parameter(name).grad
        assert grad is not None
        torch.testing.assert_close(grad.cpu(), parameter.grad)


# Four processes

SHAPES = {
    "plain": (4, 6),
    "nested": (8,),
    "against_mesh_order": (8, 2),
    "fused": (12, 3),
    "strided_twice": (24, 2),
    "two_dims": (4, 12),
    "replicated": (3,),
    "scalar": (),
}
SHARDINGS = {
    "plain": '[{"a"}, {}]',
    "nested": '[{"a", "b"}]',
    "against_mesh_order": '[{"b", "a"}, {}]',
    "fused": '[{"a":2}, {}]',
    "strided_twice": '[{"a":4, "b":2}, {}]',
    "two_dims": '[{"a"}, {"b":2}]',
    "replicated": "[{}]",
    "scalar": "[]",
}
OTHER_SHARDINGS = {
    **SHARDINGS,
    "plain": '[{}, {"b"}]',
    "fused": '[{"b":1}, {}]',
    "strided_twice": '[{"b":4}, {}]',
    "replicated": "[{}]",
}


def squares(shardings: Mapping[str, str], seed: int) -> tuple[Squares, CompiledModule]:
    torch.manual_seed(seed)
    mesh, model = Mesh(a=2, b=2), Squares(SHAPES)
    return model, step_of_copy(squares_program(mesh, SHAPES, shardings), model)


def train_squares() -> list[float]:
    """AdamW with clipping beside eager; errors of losses, norms, and then parameters."""
    model, step = squares(SHARDINGS, seed=1)
    for name, parameter in step.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), model.get_parameter(name)), name
    errors: list[float] = []
    warnings.simplefilter("error", UserWarning)
    for foreach in (True, False):
        optimizers = [
            torch.optim.AdamW(module.parameters(), lr=0.1, foreach=foreach)
            for module in (step, model)
        ]
        for _ in range(2):
            loss = model()
            errors.append((step() - loss).item())
            loss.backward()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (step, model)]
            assert isinstance(norms[0], DTensor)
            errors.append((norms[0].full_tensor() - norms[1]).item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    full = step.full_state_dict()
    return errors + [(full[n] - p).abs().max().item() for n, p in model.named_parameters()]


def test_optimizer_and_clipping_equal_eager_on_every_kind_of_shard() -> None:
    for errors in run_ranks(train_squares, 4):
        assert max(map(abs, errors)) < 1e-12


def save_and_load(path: str) -> tuple[list[bool], dict[str, Tensor]]:
    """Save after a step; load into other shardings; both then train on alike.

    Returns whether states were equal, and what was saved, whole.
    """
    _, saved = squares(SHARDINGS, seed=1)
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.1)
    saved()
    optimizer.step()
    state = {"model": saved.state_dict(), "optimizer": get_optimizer_state_dict(saved, optimizer)}
    dcp.save(checkpointable(state), checkpoint_id=path)
    whole_state = saved.full_state_dict()

    _, loaded = squares(OTHER_SHARDINGS, seed=2)
    other = torch.optim.AdamW(loaded.parameters(), lr=0.1)
    state = {"model": loaded.state_dict(), "optimizer": get_optimizer_state_dict(loaded, other)}
    dcp.load(checkpointable(state), checkpoint_id=path)
    set_optimizer_state_dict(loaded, other, state["optimizer"])
    same = [equal_states(saved, loaded)]
    for step, one in ((saved, optimizer), (loaded, other)):
        step.zero_grad()
        step()
        one.step()
    same.append(equal_states(saved, loaded))

    whole = StateDictOptions(full_state_dict=True)
    _, third = squares(OTHER_SHARDINGS, seed=3)
    set_model_state_dict(third, get_model_state_dict(saved, options=whole), options=whole)
    same.append(equal_states(saved, third))
    _, fourth = squares(OTHER_SHARDINGS, seed=4)
    fourth.load_state_dict(saved.state_dict())
    same.append(equal_states(saved, fourth))
    return same, whole_state


def equal_states(a: CompiledModule, b: CompiledModule) -> bool:
    wanted = a.full_state_dict()
    return all(torch.equal(tensor, wanted[name]) for name, tensor in b.full_state_dict().items())


def test_checkpoints_of_every_kind_of_shard_load_into_other_shardings(tmp_path: Any) -> None:
    results = run_ranks(save_and_load, 4, str(tmp_path / "checkpoint"))
    assert all(same == [True] * 4 for same, _ in results)
    state = {"model": Squares(SHAPES).state_dict()}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    torch.testing.assert_close(dict(state["model"]), results[0][1], rtol=0, atol=0)


def feed_mlp(x: Tensor) -> dict[str, Any]:
    """One partitioned step for each form of the batch."""
    torch.manual_seed(1)
    model = MLPModel(unused=True)
    step = step_of_copy(mlp_program(), model)
    mesh = step.runtime.device_mesh
    assert mesh is not None
    local = x.chunk(2)[step.runtime.coordinates["data"]]
    with pytest.raises(ValueError, match=r"ranks differ in input 'x'.*local_batch"):
        step(x=local)
    assert x[list(step.rows("x"))].equal(local)
    losses = [
        step(x=x),
        step(**step.local_batch(x=local)),
        step(x=DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)),
        step(x=distribute_tensor(x, mesh, [Replicate(), Shard(1)])),
    ]
    up, spare = step.get_parameter("up.weight"), step.get_parameter("spare")
    assert isinstance(up, DTensor)
    assert isinstance(spare, DTensor)
    assert isinstance(up.grad, DTensor)
    placements = [up.placements, up.grad.placements, spare.placements]
    grads = {
        name: parameter.grad.full_tensor()
        for name, parameter in step.named_parameters()
        if isinstance(parameter.grad, DTensor)
    }
    return {
        "losses": [loss.detach() for loss in losses],
        "grads": grads,
        "placements": [str(p) for p in placements],
        "local": tuple(up.grad.to_local().shape),
        "names": list(step.state_dict()),
        "full": step.full_state_dict(),
    }


def test_a_batch_may_be_global_or_local_or_distributed() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.manual_seed(1)
    model = MLPModel(unused=True)
    loss = model(x)
    loss.backward()
    for found in run_ranks(feed_mlp, 4, x):
        for one in found["losses"]:
            torch.testing.assert_close(one, loss.detach())
        assert set(found["grads"]) == {"up.weight", "up.bias", "down.weight"}
        for name, grad in found["grads"].items():
            torch.testing.assert_close(grad / 4, model.get_parameter(name).grad)
        shard, whole = "(Replicate(), Shard(dim=0))", "(Replicate(), Replicate())"
        assert found["placements"] == [shard, shard, whole]
        assert found["local"] == (4, 4)
        assert found["names"] == list(model.state_dict())
        model.load_state_dict(found["full"], strict=True)


GPT_SHARDINGS = {
    r"(q|k|v|fc_in)\.weight": '[{"tensor"}, {}]',
    r"(q|k|v|fc_in)\.bias": '[{"tensor"}]',
    r"(proj|fc_out)\.weight": '[{}, {"tensor"}]',
    r"wte\.weight": '[{"tensor"}, {}]',
    r"input_ids|labels": '[{"data"}, {}]',
}


def sharded_gpt() -> tuple[nn.Module, dict[str, Tensor], Program]:
    """Megatron's shards of a small GPT, the batch over data."""
    model, batch, program = captured(GPT)
    given = {
        index: ShardingAttr.parse_text(text)
        for index, slot in enumerate(program.arguments)
        for pattern, text in GPT_SHARDINGS.items()
        if re.search(pattern, slot.name)
    }
    program.set_argument_attributes("dist.sharding", given)
    passes = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives"
    return model, batch, run_passes(program, passes, mesh=Mesh(data=2, tensor=2))


def train_gpt(text: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of three steps of AdamW, and the parameters after them."""
    example = build_example(GPT, dtype=torch.float64)
    step = step_of_copy(Program.parse(text), example.module)
    optimizer = torch.optim.AdamW(step.parameters(), lr=0.01)
    losses: list[Tensor] = []
    for _ in range(3):
        losses.append(step(**example.kwargs).detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, step.full_state_dict()


def test_three_adamw_steps_of_a_sharded_gpt_equal_eager() -> None:
    model, batch, program = sharded_gpt()
    by_rank = run_ranks(train_gpt, 4, str(program))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wanted: list[Tensor] = []
    for _ in range(3):
        loss = model(**batch)
        loss.backward()
        wanted.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    for losses, parameters in by_rank:
        torch.testing.assert_close(losses, wanted)
        torch.testing.assert_close(parameters, dict(model.state_dict()), rtol=1e-9, atol=1e-9)
