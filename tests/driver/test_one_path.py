"""`shardweave run` and `sw.compile` are one way: the same request gives the same program."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.benchmarks.local_programs import MODELS
from shardweave.driver.checking import measure
from shardweave.driver.cli import command_line, main
from shardweave.driver.commands.arguments import commands_of
from shardweave.driver.models.models import build_example
from shardweave.driver.step.checks import check_request
from shardweave.driver.step.request import CompileOptions, Request
from shardweave.driver.step.request_text import OF_A_RANK, describe_request
from shardweave.tests.compiled import compile_copy
from shardweave.tests.marks import slow_where

LLAMA = (
    "hf:llama:num_hidden_layers=1,hidden_size=8,num_attention_heads=2,num_key_value_heads=2,"
    "intermediate_size=8,vocab_size=16,batch=2,seq=4"
)
MESH, BACKEND = "data=2,tensor=2", "reference"
WITHOUT_FLAG = {
    "backward",
    "batch",
    "optimizers",
    "outputs",
    "cluster",
    "train",
    "seed",
    "dynamic",
    "max_programs",
    "sync",
    "timeout",
    "twin",
    "weights",
}
"""Options that a run of a few steps has no use for, or has an argument of its own for."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[sw.CompiledModule]:
    """The steps that the command makes."""
    made: list[sw.CompiledModule] = []

    def compiled(*args: Any, **kwargs: Any) -> sw.CompiledModule:
        made.append(compile_copy(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(measure, "compile", compiled)
    return made


def compiled_like(spec: str, **options: Any) -> sw.CompiledModule:
    """The step that a person makes of the model of a command."""
    example = build_example(spec, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.PlanNote)
        return compile_copy(
            example.module, kwargs=example.kwargs, mesh=MESH, backend=BACKEND, **options
        )


def run(spec: str, *options: str) -> int:
    """The command on the model's own mesh."""
    common = ["--dtype", "float64", "--mesh", MESH, "--backend", BACKEND]
    return main(["run", spec, *common, *options])


@pytest.mark.parametrize(
    "name", slow_where(lambda name: name not in ("gpt", "llama", "cnn"), MODELS)
)
def test_command_checks_the_program_that_people_train(
    name: str, steps: list[sw.CompiledModule]
) -> None:
    assert run(MODELS[name], "--check") == 0
    assert str(steps[0].program) == str(compiled_like(MODELS[name]).program)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--zero", "3"], {"zero": 3}),
        (["--loss", "loss", "--sequence-parallel"], {"loss": "loss", "sequence_parallel": True}),
        (["--loss", "0"], {"loss": 0}),
        (["--only-loss", "--passes", "cse"], {"only_loss": True, "passes": "cse"}),
        (["--precision", "bf16"], {"precision": "bf16"}),
        (["--precision", "bf16-true"], {"precision": "bf16-true"}),
        (["--reduce-dtype", "float32"], {"reduce_dtype": torch.float32}),
    ],
)
def test_flag_of_the_command_means_what_the_option_means(
    flags: list[str], options: dict[str, Any], steps: list[sw.CompiledModule]
) -> None:
    assert run(LLAMA, *flags, "--steps", "1", "--no-eager") == 0
    assert str(steps[0].program) == str(compiled_like(LLAMA, **options).program)


def test_every_option_has_a_flag_but_those_without_use_in_a_run() -> None:
    flags = commands_of(command_line())["run"]._option_string_actions
    without = {
        option.name
        for option in fields(CompileOptions)
        if "--" + option.name.replace("_", "-") not in flags
    }
    assert without | {"seed"} == WITHOUT_FLAG
    helps = {
        option.name: option.metadata["help"] for option in fields(CompileOptions) if option.metadata
    }
    assert {name: flags["--" + name.replace("_", "-")].help for name in helps} == helps


def test_compile_has_the_signature_of_its_request() -> None:
    own, asked = inspect.signature(sw.compile), inspect.signature(Request)
    assert own.parameters == asked.parameters
    assert own.return_annotation == "CompiledModule"
    names = [option.name for option in fields(CompileOptions)]
    assert list(own.parameters) == ["model", "args", "kwargs", *names]


def test_argument_that_compile_lacks_is_named_with_the_nearest() -> None:
    given: dict[str, Any] = {"mash": "data=2"}
    with pytest.raises(TypeError, match=r"compile\(\) has no argument 'mash'; did you mean 'mesh'"):
        compile_copy(nn.Linear(2, 2), (torch.ones(2, 2),), **given)


OTHER: dict[str, Any] = {
    "mesh": "data=2", "plan": "replicated", "cluster": "testbed", "sequence_parallel": True,
    "zero": 1, "passes": "cse", "backend": "triton", "cuda_graph": True, "train": True,
    "loss": "loss", "only_loss": True, "precision": "bf16", "reduce_dtype": "float32", "seed": 1,
    "dynamic": False, "max_programs": 1, "validate": True, "validate_limit": 1.0, "prove": True,
    "sync": False, "backward": "in_call", "batch": "local", "artifact": "step.swa", "weights": "weights.safetensors", "outputs": "full",
}  # fmt: skip


def test_ranks_agree_on_every_option() -> None:
    request = check_request(Request(nn.Linear(2, 2), backend=BACKEND))
    told = describe_request(request)
    for option in fields(CompileOptions):
        if option.name not in (*OF_A_RANK, "program"):
            other = replace(request, **{option.name: OTHER[option.name]})
            assert describe_request(other) != told, option.name
