"""Memory of a step: the storages that the reference backend holds, counted, are the simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.backends.programs import sharding_held
from shardweave.backends.reference.virtual_ranks import (
    global_argument,
    run_op_by_op,
    scatter_shards,
    virtual_mesh,
)
from shardweave.ir.dialects.dist import is_on_host
from shardweave.ir.program.program import Program
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.plan.plan import Plan
from shardweave.tests.zoo import SPECS, captured, megatron

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("data=4", {}),
    "tensor, recomputed": ("tensor=4", {"recompute": "layer"}),
    "both, in sub-batches": ("data=2,tensor=2", {"batch_split": 2, "schedule": "cross-pass"}),
}
MODELS = ("gpt", "gpt2", "llama", "bert", "vit", "unet", "cnn")
PAIRS = [(model, plan) for model in MODELS for plan in PLANS]


class Held(dict[SSAValue, list[Tensor]]):
    """Values of a run, and the bytes of the storages of the first rank's, those on the host left
    out. most: at once."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: Counter[int] = Counter()
        self.now = self.most = 0

    def __setitem__(self, value: SSAValue, tensors: list[Tensor]) -> None:
        super().__setitem__(value, tensors)
        if is_on_host(value):
            return
        storage = tensors[0].untyped_storage()
        self.uses[storage.data_ptr()] += 1
        if self.uses[storage.data_ptr()] == 1:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)

    def __delitem__(self, value: SSAValue) -> None:
        if is_on_host(value):
            return super().__delitem__(value)
        storage = self[value][0].untyped_storage()
        self.uses[storage.data_ptr()] -= 1
        if not self.uses[storage.data_ptr()]:
            self.now -= storage.nbytes()
        super().__delitem__(value)


def counted(program: Program, model: str) -> int:
    """The most bytes that the first rank holds at once."""
    case = captured(SPECS[model])
    mesh, held = virtual_mesh(program), Held()
    for slot in program.arguments:
        whole = global_argument(program, slot, case.values)
        shards = scatter_shards(whole, sharding_held(program, slot), mesh)
        held[slot.value] = [shard.clone() for shard in shards]
    list(run_op_by_op(program, held, mesh))
    return held.most


def plan_of(model: str, name: str) -> Plan:
    mesh, more = PLANS[name]
    return replace(megatron(SPECS[model], mesh), **more)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(*pair, id=", ".join(pair), marks=[pytest.mark.slow] if number else [])
        for number, pair in enumerate(PAIRS)
    ],
)
def test_peak_is_that_of_the_storages_that_are_held(model: str, name: str) -> None:
    program = local_program(captured(SPECS[model]).program, plan_of(model, name))
    assert peak_memory(program).peak_bytes == pytest.approx(counted(program, model), rel=0.02)
