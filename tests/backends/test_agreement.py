"""Ranks that differ: they get the same values, or all stop and say who has what."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardweave.backends.batch.replicas import CHECK
from shardweave.backends.watch.agreement import (
    AgreementError,
    broadcast_from_rank_0,
    first_difference,
    ranks_text,
)
from shardweave.tests.backends.programs import MLPModel, mlp_program
from shardweave.tests.compiled import compile_copy as compile_step
from shardweave.tests.compiled import step_of_copy
from shardweave.tests.spawn import run_ranks


class Model(nn.Module):
    def __init__(self, hidden: int = 8, *, is_tanh: bool = False) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, hidden), nn.BatchNorm1d(hidden)
        self.act = nn.Tanh() if is_tanh else nn.ReLU()
        self.down = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.norm(self.up(x)))).square().mean()


def batch(num_rows: int = 8) -> Tensor:
    return torch.linspace(-1, 1, num_rows * 4).reshape(num_rows, 4)


def said(error: pytest.ExceptionInfo[AgreementError]) -> str:
    return re.sub(r"digest \w+", "digest ..", str(error.value))


def test_ranks_read_as_runs() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_first_difference_groups_the_ranks_that_agree() -> None:
    texts = [["a", "b", "c"], ["a", "x", "y"], ["a", "b", "z"], ["a"]]
    assert first_difference(texts) == "ranks 0, 2 have b, rank 1 has x, rank 3 has nothing"


# Values


def seeded() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A step of a model with another seed on each rank: its state, and that of rank 0's model."""
    torch.manual_seed(dist.get_rank())
    model = Model()
    model.get_buffer("norm.running_mean").fill_(dist.get_rank())
    step = compile_step(model, (batch(),), mesh="data=2,tensor=2")
    torch.manual_seed(0)
    wanted = Model()
    wanted.get_buffer("norm.running_mean").fill_(0)
    return step.full_state_dict(), dict(wanted.state_dict())


def test_ranks_with_other_seeds_start_with_the_values_of_rank_0() -> None:
    for found, wanted in run_ranks(seeded, 4):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_other_values_are_refused_without_sync_on_all_ranks() -> None:
    found = run_ranks(refused_pair, 2)
    assert len(set(found)) == 1
    assert found[0].startswith(
        "ranks differ in the model's values: rank 0 has param 'up.weight' with digest .., "
        "rank 1 has param 'up.weight' with digest ..; start from the same seed"
    )


def refused_pair() -> str:
    torch.manual_seed(dist.get_rank())
    with pytest.raises(AgreementError) as error:
        compile_step(Model(), (batch(),), mesh="data=2", sync=False)
    return said(error)


def accepted() -> Tensor:
    torch.manual_seed(0)
    step = compile_step(Model(), (batch(),), mesh="data=2", sync=False)
    return step(batch())


def test_equal_values_are_accepted_without_sync() -> None:
    assert all(run_ranks(accepted, 2))


def given_program() -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    return step_of_copy(mlp_program(), MLPModel()).full_state_dict()


def test_step_of_a_given_program_starts_with_the_values_of_rank_0() -> None:
    first, *others = run_ranks(given_program, 4)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def mixed() -> list[list[Tensor]]:
    """Tensors of many dtypes and forms, of other values on each rank, as they arrive; and again
    rank 0's."""
    results: list[list[Tensor]] = []
    for seed in (dist.get_rank(), 0):
        torch.manual_seed(seed)
        large = torch.rand(2**22 + 3, dtype=torch.float64)
        tensors = [
            torch.rand(3),
            torch.rand(5) > 0.5,
            torch.randint(0, 100, (7,)),
            torch.rand(2, 3, dtype=torch.bfloat16),
            torch.rand((), dtype=torch.complex128),
            torch.empty(0),
            torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            large,
            torch.rand(4, 6).t(),
        ]
        results.append(tensors)
    results[0] = list(broadcast_from_rank_0(results[0], torch.device("cpu")))
    assert results[0][6].is_contiguous(memory_format=torch.channels_last)
    return [[t[:100] if t.numel() > 1000 else t for t in each] for each in results]


def test_tensors_of_every_dtype_and_form_arrive() -> None:
    for found, wanted in run_ranks(mixed, 2):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


# Models, plans, meshes, programs


def compile_apart(kind: str) -> str:
    """What compile says where rank 1 asks for something else."""
    is_other = dist.get_rank() == 1
    options: dict[str, Any] = {"mesh": "data=2"}
    model = Model()
    if kind == "shape":
        model = Model(16 if is_other else 8)
    elif kind == "layer":
        model = Model(is_tanh=is_other)
    elif kind == "mode":
        model.norm.train(not is_other)
    elif kind == "mesh":
        options["mesh"] = "tensor=2" if is_other else "data=2"
    elif kind == "plan":
        options["plan"] = {"up.weight": '[{"data"}, {}]'} if is_other else "replicated"
    elif kind == "precision":
        options["precision"] = "bf16" if is_other else ""
    x = batch(6 if kind == "batch" and is_other else 8)
    with pytest.raises(AgreementError) as error:
        compile_step(model, (x,), **options)
    return str(error.value)


DIFFERENCES = {
    "shape": r"module 'up': Linear\(in_features=4, out_features=8.*rank 1.*out_features=16",
    "layer": r"rank 0 has module 'act': ReLU\(\), rank 1 has module 'act': Tanh\(\)",
    "mode": r"rank 1 has module 'norm': BatchNorm1d.* in evaluation mode",
    "mesh": "rank 0 has .*data=2.*, rank 1 has .*tensor=2",
    "plan": "rank 0 has plan: replicated, rank 1 has plan: up.weight",
    "precision": "rank 0 has precision=, rank 1 has precision=bf16",
    "batch": r"rank 0 has x \(8, 4\) float32.*, rank 1 has x \(6, 4\)",
}


def compile_all_apart() -> list[str]:
    return [compile_apart(kind) for kind in DIFFERENCES]


def test_ranks_that_compile_something_else_all_stop_and_name_it() -> None:
    for messages in run_ranks(compile_all_apart, 2):
        for kind, message in zip(DIFFERENCES, messages, strict=True):
            assert re.search(DIFFERENCES[kind], message), (kind, message)


def other_program() -> str:
    text = str(mlp_program())
    assert "aten.relu" in text
    from shardweave.ir.program.program import Program

    mine = text.replace("aten.relu", "aten.sigmoid") if dist.get_rank() == 3 else text
    with pytest.raises(AgreementError) as error:
        step_of_copy(Program.parse(mine, "x"), MLPModel())
    return str(error.value)


def test_programs_that_differ_are_named_with_their_first_line() -> None:
    for message in run_ranks(other_program, 4):
        assert "ranks differ in what is compiled: ranks 0-2 have %a = aten.relu(%h)" in message
        assert "rank 3 has %a = aten.sigmoid" in message


# SHARDWEAVE_CHECK=1


def checked(kind: str) -> str:
    """What a step says that is called on two ranks that differ in one thing."""
    is_other = dist.get_rank() == 1
    step = compile_step(Model(), (batch(),), mesh="data=2")
    step(batch())
    os.environ[CHECK] = "1"
    try:
        step(batch())
        step(*step.local_batch(batch(4) + dist.get_rank()))
        x = batch()
        if kind == "input":
            x[3, 1] += is_other
        elif kind == "parameter" and is_other:
            step.backend.local(step.stored["param", "down.bias"].detach())[2] = 7
        elif kind == "call":
            step.compile_for(batch(4))
            x = batch(4 if is_other else 8)
        with pytest.raises(AgreementError) as error:
            step(x, accumulate=2 if kind == "accumulate" and is_other else 1)
    finally:
        del os.environ[CHECK]
    step(batch())
    return said(error)


CHECKED = {
    "input": "ranks differ in input 'x': rank 0 has values of digest .., rank 1 has values",
    "parameter": "ranks differ in param 'down.bias': rank 0 has values of digest .., rank 1 has values",
    "call": "ranks differ in the call: rank 0 has x (8, 4) float32 in training, accumulate=1",
    "accumulate": "accumulate=1, loss_scale=1.0, rank 1 has x (8, 4) float32 in training, acc",
}


def check_all() -> list[str]:
    return [checked(kind) for kind in CHECKED]


def test_check_compares_calls_inputs_and_parameters_on_every_step() -> None:
    for messages in run_ranks(check_all, 2):
        for message, words in zip(messages, CHECKED.values(), strict=True):
            assert words in message
