"""chunk-loss: which losses are cut, into what, and that logits exist for one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardweave.backends.reference.reference import Key, run_reference, values_of
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.annotations import copy_of
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Axis
from shardweave.ir.program.program import Program
from shardweave.ir.proof.prove import prove
from shardweave.passes.memory.chunk_loss import CHUNKS
from shardweave.passes.notes import heard_by
from shardweave.passes.pipeline import PassError, as_mesh, run_passes
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron

BATCH, LENGTH, WORDS, WIDTH = 4, 6, 16, 8
Batch = dict[str, Tensor]
Loss = Callable[["Model", Tensor, Batch], Tensor]


class Model(nn.Module):
    """A layer, a head, and the head of a teacher."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head, self.teacher = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor, soft: Tensor) -> Tensor:
        hidden = self.norm(self.layer(self.words(x)).tanh())
        batch = {"x": x, "y": y, "weights": weights, "soft": soft}
        return self.loss(self, self.head(hidden), batch)


def by_token(logits: Tensor, batch: Batch, reduction: str = "none", **options: float) -> Tensor:
    flat, y = logits.flatten(0, 1), batch["y"].flatten()
    return F.cross_entropy(flat, y, reduction=reduction, **options)  # pyright: ignore[reportArgumentType]


def chosen(logits: Tensor, batch: Batch) -> Tensor:
    return logits.log_softmax(-1).gather(-1, batch["y"][..., None]).squeeze(-1)


def distilled(model: Model, logits: Tensor, batch: Batch) -> Tensor:
    with torch.no_grad():
        teacher = model.teacher(model.words(batch["x"]).tanh()).log_softmax(-1)
    own = logits.log_softmax(-1)
    return F.kl_div(own, teacher, log_target=True, reduction="batchmean")


def preferred(model: Model, logits: Tensor, batch: Batch) -> Tensor:
    score = chosen(logits, batch).sum(-1)
    return -F.logsigmoid(score[: BATCH // 2] - score[BATCH // 2 :]).mean()


LOSSES: dict[str, Loss] = {
    "cross entropy, smoothed": lambda m, z, b: by_token(z, b, "mean", label_smoothing=0.1),
    "tokens that are ignored": lambda m, z, b: by_token(z, b, "mean", ignore_index=3),
    "z-loss": lambda m, z, b: by_token(z, b).mean() + 1e-2 * z.logsumexp(-1).square().mean(),
    "soft targets": lambda m, z, b: -(b["soft"].softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "distillation": distilled,
    "weights by token": lambda m, z, b: (
        (by_token(z, b) * b["weights"].flatten()).sum() / b["weights"].sum()
    ),
    "learned weights": lambda m, z, b: (
        by_token(z, b) * m.gate(m.words(b["x"])).sigmoid().flatten()
    ).mean(),
    "capped logits": lambda m, z, b: by_token(5 * (z / 5).tanh(), b, "sum"),
    "next tokens": lambda m, z, b: -chosen(z[:, :-1], {"y": b["y"][:, 1:]}).mean(),
    "preferences": preferred,
}

REFUSED: dict[str, tuple[Loss, str]] = {
    "root": (lambda m, z, b: by_token(z, b, "mean").sqrt(), r"aten.div.* reads %sum, a sum over"),
    "entropy of the mean": (
        lambda m, z, b: torch.special.entr(z.softmax(-1).mean((0, 1))).sum(),
        "chunks of rows: aten.*, a sum over all chunks",
    ),
}


def batch_of(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (2, BATCH, LENGTH), generator=generator)
    floats = {"generator": generator, "dtype": torch.float64}
    return {
        "x": ids[0],
        "y": ids[1],
        "weights": torch.rand(BATCH, LENGTH, **floats),
        "soft": torch.randn(BATCH, LENGTH, WORDS, **floats),
    }


@cache
def case(name: str) -> tuple[Program, dict[Key, Tensor], dict[Key, Tensor]]:
    """The program of a loss, its arguments, and what eager computes."""
    torch.manual_seed(0)
    model = Model({**LOSSES, **{k: loss for k, (loss, _) in REFUSED.items()}}[name]).double()
    batch = batch_of()
    program = capture(model, kwargs=batch)
    values = dict(values_of(program, model, batch))
    loss = model(**batch)
    loss.sum().backward()
    gradients = {("grad", n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return program, values, {("output", "0"): loss.detach(), **gradients}


def chunked(program: Program, mesh: str, chunks: int) -> Program:
    plan = replace(plan_megatron(program, as_mesh(mesh)), loss_chunks=chunks)
    return run_passes(program, plan_passes(plan), mesh=mesh)


def check(name: str, mesh: str, chunks: int) -> Program:
    program, values, wanted = case(name)
    local = chunked(program, mesh, chunks)
    results = run_reference(local, values)
    for key, value in wanted.items():
        torch.testing.assert_close(results[key], value, rtol=1e-9, atol=1e-9)
    return local


@pytest.mark.parametrize("name", LOSSES)
def test_loss_in_chunks_is_eager_s_with_the_vocabulary_cut(name: str) -> None:
    check(name, "data=2,tensor=2", 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mesh", ["data=1", "data=2", "tensor=2"])
def test_loss_in_chunks_is_eager_s_on_any_mesh(name: str, mesh: str) -> None:
    check(name, mesh, 3)
    check(name, mesh, 5)


@pytest.mark.slow
@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("mesh", ["data=1", "data=2", "tensor=2", "data=2,tensor=2", "tensor=3"])
def test_models_are_eager_s_in_chunks(model: str, mesh: str) -> None:
    for chunks in (2, 3, 4):
        program = chunked(captured(SPECS[model]).program, mesh, chunks)
        assert_equals_eager(program, captured(SPECS[model]))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2", {"zero": 3, "recompute": "layer"}),
        ("data=2,tensor=2", {"batch_split": 2, "schedule": "cross-pass"}),
        ("context=2,data=2", {}),
        ("stage=2", {}),
    ],
)
def test_chunks_go_with_other_fields_of_a_plan(mesh: str, options: dict[str, int]) -> None:
    plan = replace(megatron(SPECS["gpt"], mesh), loss_chunks=4, **options)
    program = run_passes(captured(SPECS["gpt"]).program, plan_passes(plan), mesh=mesh)
    assert_equals_eager(program, captured(SPECS["gpt"]))


def test_chunks_are_proved_to_compute_the_loss() -> None:
    program, _, _ = case("distillation")
    prove(chunked(program, "data=2,tensor=2", 3), against=program)


@pytest.mark.parametrize("name", REFUSED)
def test_loss_that_is_no_sum_over_rows_is_refused_by_name(name: str) -> None:
    with pytest.raises(PassError, match=REFUSED[name][1]):
        chunked(case(name)[0], "data=2", 2)


def test_last_chunk_is_shorter_where_rows_do_not_divide() -> None:
    program = check("cross entropy, smoothed", "data=1", 5)
    rows = [op for op in program.ops if op.name == "aten.mm" and shape_of(op.results[0])[0] == 5]
    assert {copy_of(op) for op in rows} == {(i,) for i in range(5)}
    sliced = run_passes(case("next tokens")[0], PARTITION, mesh="data=1")
    assert sliced.mesh is not None
    assert sliced.mesh.axes[-1] == Axis(CHUNKS, 4, "time")  # along the batch: 24 rows, not 20


PARTITION = (
    "plan-megatron,split-addmm,add-pending-sums,propagate-shardings,chunk-loss{chunks=3},"
    "insert-collectives"
)


def test_each_chunk_s_gradients_follow_its_logits() -> None:
    local = check("z-loss", "tensor=2", 3)
    order = [copy[0] for op in local.ops if (copy := copy_of(op))]
    assert order == sorted(order)
    assert set(order) == {0, 1, 2}


def test_logits_take_a_tenth_of_their_memory() -> None:
    program = captured("gpt:layers=1,hidden=8,heads=2,vocab=4096,seq=64,batch=8").program
    logits = 8 * 64 * 4096 * 8
    plan = plan_megatron(program, as_mesh("data=1"))
    whole, cut = (
        peak_memory(local_program(program, replace(plan, loss_chunks=n))).peak_bytes
        for n in (1, 32)
    )
    assert whole > 2 * logits  # with their gradients
    assert whole - cut > 0.9 * 2 * logits


def test_what_has_no_effect_is_noted() -> None:
    program = case("z-loss")[0]
    heard: list[str] = []
    with heard_by(heard.append):
        run_passes(program, PARTITION.replace("chunks=3", "chunks=1"), mesh="data=1")
        run_passes(program, PARTITION.replace("chunks=3", "chunks=5"), mesh="data=1")
        run_passes(program, PARTITION.replace("chunks=3", "chunks=2"), mesh="stage=2")
    notes = [note for note in heard if "chunk" in note]
    assert "chunks=1 leaves the loss as it is" in notes[0]
    assert "split into 6 chunks: a device's rows do not divide into 5" in notes[1]
    assert "kept until its backward pass" in notes[2]


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("chunk-loss", "run it after propagate-shardings"),
        (PARTITION.replace("chunks=3", "chunks=0"), "chunks=0; use chunks >= 1"),
        (PARTITION.replace(",insert", ",chunk-loss,insert"), "has an axis 'loss' already"),
    ],
)
def test_what_cannot_be_done_is_said(passes: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        run_passes(case("capped logits")[0], passes, mesh="data=1")


def test_rows_that_devices_have_one_of_are_not_cut() -> None:
    with pytest.raises(PassError, match="has 8 rows, too few for each device"):
        chunked(captured(SPECS["cnn"]).program, "data=8", 2)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ("output %z", "leads to a scalar output"),
        ("output a = %s\n output b = %z", "returns the logits as output 'b'"),
    ],
)
def test_logits_that_are_returned_are_not_cut(results: str, message: str) -> None:
    text = f"""
        param %w : tensor<4x6xf64>
        input %x : tensor<8x4xf64>
        %z = aten.mm(%x, %w) : tensor<8x6xf64>
        %s = aten.sum.dim_IntList(%z, dim = [0, 1]) : tensor<f64>
        {results}
    """
    with pytest.raises(PassError, match=message):
        run_passes(step(text, "data=2"), "propagate-shardings,chunk-loss{chunks=2}")


class Denoiser(nn.Module):
    """A model whose last product reads the neighbours of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.out(x), noise)


def test_images_are_cut_into_samples_and_not_between_neighbours() -> None:
    for batch, can in ((4, True), (1, False)):
        x = torch.randn(batch, 3, 4, 4, dtype=torch.float64)
        program = capture(Denoiser(), kwargs={"x": x, "noise": x.flip(2)})
        if can:
            assert chunked(program, "data=1", 2).needed_mesh().time_names == ()
        else:
            with pytest.raises(PassError, match="reads rows of other chunks, as a convolution"):
                chunked(program, "data=1", 2)
