"""Small versions of all kinds of models, captured once per test run, with what eager computes.

All dims divide by 8 where the tests of meshes need it; everything is float64.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shardweave.backends.reference.reference import Key, run_reference, values_of
from shardweave.driver.checking.check import run_eager
from shardweave.driver.models.models import Example, build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.capture.seeded import SeededRandom
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.library.philox import STATE
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import as_mesh, run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan

TEXT_SPECS = {
    "gpt": "gpt:layers=2,hidden=16,heads=8,vocab=32,seq=16,batch=8",
    "gpt2": ("hf:gpt2:n_layer=2,n_embd=16,n_head=8,vocab_size=32,n_positions=16,batch=8,seq=16"),
    "llama": (
        "hf:llama:num_hidden_layers=2,hidden_size=16,num_attention_heads=8,"
        "num_key_value_heads=8,intermediate_size=32,vocab_size=32,batch=8,seq=16"
    ),
    "bert": (
        "hf:bert:num_hidden_layers=2,hidden_size=16,num_attention_heads=8,intermediate_size=32,"
        "vocab_size=32,max_position_embeddings=16,batch=8,seq=16"
    ),
    "t5": ("hf:t5:num_layers=2,d_model=16,d_kv=2,d_ff=32,num_heads=8,vocab_size=32,batch=8,seq=16"),
}
"""Models of sequences: what lies between their tensor-parallel pairs can be cut along them."""

IMAGE_SPECS = {
    "vit": (
        "hf:vit:num_hidden_layers=2,hidden_size=16,num_attention_heads=8,intermediate_size=32,"
        "image_size=8,patch_size=4,num_labels=8,batch=8"
    ),
    "unet": "unet:channels=8,size=8,batch=8,levels=2,groups=4,heads=8",
    "cnn": "cnn:depth=10,channels=8,size=8,batch=8,pool=true",
}
SPECS = {**TEXT_SPECS, **IMAGE_SPECS}

SHARDING_PASSES = (
    "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,cse,dce,merge-collectives"
)

LOSS_BOUND = 1e-12
GRADIENT_BOUND = 1e-9
ZERO = 1e-6
"""A gradient smaller than this times the largest one is zero but for rounding: that of the bias
of an attention's keys, which a softmax does not see. Its error is measured against that bound."""


@dataclass(frozen=True)
class Captured:
    """A model, its global program, the program's arguments, and what eager computes."""

    example: Example
    program: Program
    values: Mapping[Key, Tensor]
    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@cache
def captured(spec: str) -> Captured:
    """The model that a spec names, captured; the model is left as it was built."""
    example = build_example(spec, dtype=torch.float64)
    before = {name: buffer.clone() for name, buffer in example.module.named_buffers()}
    with SeededRandom(0):
        eager = run_eager(example.module, example.kwargs)
    for name, buffer in example.module.named_buffers():
        buffer.copy_(before[name])
    example.module.zero_grad()
    program = capture(example.module, kwargs=example.kwargs)
    values = values_of(program, example.module, example.kwargs)
    return Captured(example, program, values, eager.loss, eager.gradients, eager.buffers)


def megatron(spec: str, mesh: str, *, sequence_parallel: bool = False) -> Plan:
    """The megatron plan of a model on a mesh whose axes are `data` and `tensor`."""
    program = captured(spec).program
    return plan_megatron(program, as_mesh(mesh), sequence_parallel=sequence_parallel)


_partitioned: dict[tuple[str, str, str], Program] = {}


def partitioned(spec: str, mesh: str, plan: Plan) -> Program:
    """The program of each rank: a copy of one that is made once per test run."""
    key = spec, mesh, repr(plan)
    if key not in _partitioned:
        passes = [ApplyPlanPass.of(plan), SHARDING_PASSES]
        _partitioned[key] = run_passes(captured(spec).program, passes, mesh=mesh)
    return _partitioned[key].clone()


def assert_equals_eager(
    program: Program, case: Captured, gradient_bound: float = GRADIENT_BOUND
) -> None:
    """Run a program on all ranks of its mesh and compare loss, gradients and buffers with eager."""
    check_against_eager(run_reference(program, case.values), case, gradient_bound)


def check_against_eager(
    results: Mapping[Key, Tensor], case: Captured, gradient_bound: float = GRADIENT_BOUND
) -> None:
    """Compare the results of a program, by kind and name, with eager."""
    found = {kind: {n: v for (k, n), v in results.items() if k == kind} for kind, _ in results}
    loss = found["output"]["0"].item()
    assert abs(loss - case.loss) <= LOSS_BOUND * abs(case.loss)
    errors = gradient_errors(found["grad"], case.gradients)
    assert {name: error for name, error in errors.items() if error > gradient_bound} == {}
    found.get("buffer", {}).pop(STATE, None)
    changed = {n: b for n, b in case.buffers.items() if not torch.equal(b, _before(case, n))}
    assert set(changed) <= set(found.get("buffer", {}))
    for name, buffer in found.get("buffer", {}).items():
        torch.testing.assert_close(buffer, case.buffers[name], rtol=LOSS_BOUND, atol=LOSS_BOUND)


def _before(case: Captured, name: str) -> Tensor:
    return case.example.module.get_buffer(name)


def gradient_errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """By parameter ||found - expected|| / ||expected||; a parameter without gradient has 0."""
    largest = max(gradient.norm().item() for gradient in expected.values())
    errors: dict[str, float] = {}
    for name, gradient in expected.items():
        difference = found.get(name, torch.zeros_like(gradient)) - gradient
        errors[name] = difference.norm().item() / max(gradient.norm().item(), ZERO * largest)
    assert set(found) <= set(expected)
    return errors


def random_plan(program: Program, seed: int) -> tuple[Plan, str]:
    """A plan that cuts parameters and inputs at random, and the mesh that it is for."""
    rng = random.Random(seed)
    text = rng.choice(("a=2", "a=4", "a=2,b=2", "a=2,b=4", "a=2,b=2,c=2"))
    mesh = as_mesh(text)
    share = {"param": rng.choice((0.2, 0.5, 0.9)), "input": rng.choice((0.0, 0.5, 1.0))}
    tables: dict[str, dict[str, str]] = {"param": {}, "input": {}}
    for slot in program.arguments:
        if rng.random() < share.get(slot.kind, 0.0):
            tables[slot.kind][slot.name] = _random_sharding(rng, shape_of(slot.value), mesh)
    sizes = {axis.name: axis.size for axis in mesh.axes}
    return Plan(mesh=sizes, parameters=tables["param"], inputs=tables["input"]), text


def _random_sharding(rng: random.Random, shape: tuple[int, ...], mesh: Mesh) -> str:
    """Most axes, in any order, each on a dim that divides by it, if there is one."""
    dims: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    for axis in rng.sample(mesh.axes, len(mesh.axes)):
        fitting = [dim for dim, size in enumerate(left) if size % axis.size == 0]
        if fitting and rng.random() < 0.7:
            dim = rng.choice(fitting)
            dims[dim].append(f'"{axis.name}"')
            left[dim] //= axis.size
    return "[" + ", ".join("{" + ", ".join(names) + "}" for names in dims) + "]"
