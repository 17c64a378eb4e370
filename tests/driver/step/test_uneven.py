"""Steps of models whose sizes do not divide by the mesh: exact, and kept as DTensor keeps them."""

# torch documents dcp.save and dcp.load, but does not export them by its own rules.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import shardweave as sw
from shardweave.driver.gpt import GPT, GPTConfig, build_gpt
from shardweave.driver.models import build_example
from shardweave.tests.driver.step.models import close
from shardweave.tests.spawn import run_ranks

ODD = GPTConfig(layers=1, hidden=14, heads=7, vocab=37, seq=5, batch=6, ffn=9)


def gpt(config: GPTConfig) -> tuple[GPT, dict[str, Tensor]]:
    model, batch = build_gpt(config)
    return model.double(), batch


def check(
    model: nn.Module, batch: dict[str, Tensor], mesh: str, plan: sw.Plan | str = "megatron"
) -> sw.Step:
    """Loss and gradients on a virtual mesh beside those of eager."""
    eager = copy.deepcopy(model)
    step = sw.compile(model, kwargs=batch, mesh=mesh, plan=plan, backend="reference")
    loss, expected = step(**batch), eager(**batch)
    expected.backward()
    close(loss, expected)
    for name, parameter in eager.named_parameters():
        assert parameter.grad is not None
        ours = step.get_parameter(name).grad
        assert ours is not None
        close(ours, parameter.grad, f"gradient of {name}")
    return step


def test_vocabulary_heads_features_and_batch_that_do_not_divide_are_cut_exactly() -> None:
    step = check(*gpt(ODD), "data=4,tensor=2")
    assert step.notes == ()
    assert step.plan is not None
    assert step.plan.parameters["wte.weight"] == '[{"tensor"}, {}]'
    assert step.plan.used["h.0.attn.q.weight"] == '[{"tensor":8}, {}]'
    assert step.plan.inputs["input_ids"] == '[{"data"}, {}]'


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_gpt2_vocabulary_is_parallel(size: int) -> None:
    model, batch = gpt(GPTConfig(layers=1, hidden=8, heads=4, vocab=50257, seq=4, batch=2))
    local = check(model, batch, f"tensor={size}").program.stats().flops
    whole = sw.capture(model, kwargs=batch).stats().flops
    for phase, flops in whole.items():
        assert local[phase] < 1.01 * flops / size


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,tensor=4"])
def test_unet_with_odd_channels_is_exact(mesh: str) -> None:
    given = build_example("unet:channels=6,size=8,batch=3,levels=2,groups=3,heads=3")
    batch = {n: t.double() if t.is_floating_point() else t for n, t in given.kwargs.items()}
    check(given.module.double(), batch, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"zero": 1}, {"zero": 3}, {"batch_split": 2, "recompute": "layer"}, {"recompute": "layer"}],
)
def test_uneven_parts_with_sub_batches_recomputation_and_stored_shards(
    changes: dict[str, object],
) -> None:
    model, batch = gpt(replace(ODD, batch=7))
    plan = sw.plan(sw.capture(model, kwargs=batch), "data=2,tensor=2", "megatron")
    check(model, batch, "data=2,tensor=2", replace(plan, **changes))


@pytest.mark.slow
def test_width_of_100_over_8() -> None:
    check(*gpt(replace(ODD, hidden=20, heads=10, ffn=100, vocab=100)), "tensor=8")


def train(folder: Path) -> None:
    """Two steps with clipped gradients, a checkpoint between them, and the model's state."""
    torch.manual_seed(0)
    model, batch = gpt(ODD)
    step = sw.compile(model, kwargs=batch, mesh="tensor=2", plan="megatron")
    weight = step.get_parameter("wte.weight")
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0),)
    assert weight.to_local().shape == ((19, 14), (18, 14))[dist.get_rank()]
    # Not Adam: of a gradient that is 0 but for rounding, as that of a key's bias, it makes more.
    both = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (step, model)]
    for index in range(2):
        for optimizer in both:
            optimizer.zero_grad()
        expected = model(**batch)
        expected.backward()
        close(step(**batch), expected)
        norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.5) for module in (step, model)]
        close(_whole(norms[0]), norms[1])
        for optimizer in both:
            optimizer.step()
        if index == 0:
            dcp.save({"model": step.state_dict()}, checkpoint_id=folder)
            saved = copy.deepcopy(model.state_dict())
    for name, tensor in step.full_state_dict().items():
        close(tensor, model.state_dict()[name], name)
    again = {"model": step.state_dict()}
    dcp.load(again, checkpoint_id=folder)
    step.load_state_dict(again["model"])
    eager, _ = gpt(ODD)
    eager.load_state_dict(step.full_state_dict())
    for name, tensor in eager.state_dict().items():
        close(tensor, saved[name], name)


def _whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows() -> None:
    """A batch of which the last rank has fewer rows, whole, by rows, and in micro-batches."""
    torch.manual_seed(0)
    model, batch = gpt(replace(ODD, batch=6))
    step = sw.compile(model, kwargs=batch, mesh="data=4", plan="replicated")
    assert [len(step.rows("labels", n)) for n in (6, 8)] == [(2, 2, 2, 0)[dist.get_rank()], 2]
    mine = list(step.rows("labels"))
    local = step.local_batch(**{name: tensor[mine] for name, tensor in batch.items()})
    assert all(tensor.shape == (6, 5) for tensor in local.values())
    expected = model(**batch)
    expected.backward()
    for given, accumulate in ((batch, 1), (local, 1), (batch, 2), (local, 2)):
        step.zero_grad()
        close(step(**given, accumulate=accumulate), expected)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            close(_whole(step.get_parameter(name).grad), parameter.grad, name)


def test_checkpoints_norms_and_optimizers_see_no_padding(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path)


@pytest.mark.slow
def test_last_ranks_may_have_fewer_rows() -> None:
    run_ranks(rows, 4)
