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
from shardweave.driver.checking.check import scalar_loss
from shardweave.driver.models.gpt import GPT, GPTConfig, build_gpt
from shardweave.driver.models.models import build_example
from shardweave.tests.compiled import compile_copy
from shardweave.tests.driver.step.models import close
from shardweave.tests.spawn import run_ranks

ODD = GPTConfig(layers=1, hidden=14, heads=7, vocab=37, seq=5, batch=6, ffn=9)


def gpt(config: GPTConfig) -> tuple[GPT, dict[str, Tensor]]:
    model, batch = build_gpt(config)
    return model.double(), batch


def check(
    model: nn.Module, batch: dict[str, Tensor], mesh: str, plan: sw.Plan | str = "megatron"
) -> sw.CompiledModule:
    """Loss and gradients on a virtual mesh beside those of eager."""
    eager = copy.deepcopy(model)
    step = compile_copy(model, kwargs=batch, mesh=mesh, plan=plan, backend="reference")
    loss, expected = scalar_loss(step(**batch)), scalar_loss(eager(**batch))
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
    assert step.notes == (
        "data=4 leaves 1 of 4 parts idle: dim 0 of input 'input_ids' has size 6; give a larger "
        "batch, or fewer devices there",
        "sizes that do not divide are padded, and devices compute the padding in vain: 6 over "
        "data=4 as 8, 7 over tensor=2 as 8, 9 over tensor=2 as 10, 1 more size",
    )
    assert step.plan is not None
    assert step.plan.parameters["wte.weight"] == '[{"tensor"}, {}]'
    assert step.plan.used["h.0.attn.q.weight"] == '[{"tensor":8}, {}]'
    assert step.plan.inputs["input_ids"] == '[{"data"}, {}]'


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_gpt2_vocabulary_is_parallel(size: int) -> None:
    model, batch = gpt(GPTConfig(layers=1, hidden=8, heads=4, vocab=50257, seq=4, batch=2))
    step = check(model, batch, f"tensor={size}")
    assert step.plan is not None
    assert step.plan.parameters["wte.weight"] == '[{"tensor"}, {}]'
    local = step.program.stats().flops
    whole = sw.capture(model, kwargs=batch).stats().flops
    for phase, flops in whole.items():
        assert local[phase] < 1.01 * flops / size
    again, _ = gpt(GPTConfig(layers=1, hidden=8, heads=4, vocab=50257, seq=4, batch=2))
    again.load_state_dict(step.full_state_dict())
    close(again(**batch), model(**batch))


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


class Fused(nn.Module):
    """Attention of seven heads, whose queries, keys and values are one projection."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(14, 42, bias=kind != "unbind"), nn.Linear(14, 14)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        if self.kind == "unbind":
            q, k, v = y.reshape(2, 6, 3, 7, 2).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (part.view(2, 6, 7, 2).transpose(1, 2) for part in y.chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).reshape(2, 6, 14)).square().sum()


class Packed(nn.Module):
    """`nn.MultiheadAttention` on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(14, 7, batch_first=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0].square().sum()


GPT2 = "hf:gpt2:n_layer=1,n_embd=14,n_head=7,vocab_size=32,n_positions=6,batch=2,seq=6"


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("packed", "attn.in_proj_weight"),
        ("unbind", "qkv.weight"),
        pytest.param("chunk", "qkv.weight", marks=pytest.mark.slow),
        pytest.param("gpt2", "transformer.h.0.attn.c_attn.weight", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "mesh", ["tensor=2", pytest.param("data=2,tensor=4", marks=pytest.mark.slow)]
)
def test_seven_heads_of_a_fused_projection_are_cut(kind: str, weight: str, mesh: str) -> None:
    torch.manual_seed(0)
    model, batch = (
        Packed() if kind == "packed" else Fused(kind),
        {"x": torch.randn(2, 6, 14).double()},
    )
    if kind == "gpt2":
        example = build_example(GPT2, dtype=torch.float64)
        model, batch = example.module, dict(example.kwargs)
    step = check(model, batch, mesh)
    assert step.plan is not None
    assert step.plan.projections[weight].parts == 3
    heads = {str(op.results[0].type) for op in step.program.ops if "flash" in op.name}
    assert heads == {"tensor<2x4x6x2xf64>" if mesh == "tensor=2" else "tensor<1x2x6x2xf64>"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"zero": 1}, {"zero": 3}, {"batch_split": 2, "recompute": "layer"}]
)
def test_parts_of_a_projection_with_what_else_a_plan_asks(changes: dict[str, object]) -> None:
    example = build_example(GPT2.replace("batch=2", "batch=8"), dtype=torch.float64)
    program = sw.capture(example.module, kwargs=example.kwargs)
    plan = sw.plan(program, "data=2,tensor=2", "megatron")
    assert plan.projections
    assert sw.Plan.from_json(plan.to_json()) == plan
    check(example.module, dict(example.kwargs), "data=2,tensor=2", replace(plan, **changes))


@pytest.mark.slow
def test_width_of_100_over_8() -> None:
    check(*gpt(replace(ODD, hidden=20, heads=10, ffn=100, vocab=100)), "tensor=8")


def train(folder: Path) -> None:
    """Two steps with clipped gradients, a checkpoint between them, and the model's state."""
    torch.manual_seed(0)
    model, batch = gpt(ODD)
    step = compile_copy(model, kwargs=batch, mesh="tensor=2", plan="megatron")
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
    step = compile_copy(model, kwargs=batch, mesh="data=4", plan="replicated")
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
