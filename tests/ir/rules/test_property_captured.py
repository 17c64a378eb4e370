"""The ops of real training steps, on the values that they meet there: cut along every factor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.backends.emit.calls import callee_of
from shardweave.backends.reference.reference import values_of
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.aten import AtenOp, OpKey, key_of_op
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement
from shardweave.ir.ops.aten_args import arguments
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.rules import Rule
from shardweave.tests.ir.rules.sharded_op import Cut, Instance, check_cut
from shardweave.tests.marks import slow_where

MODELS = {
    "gpt": "gpt:layers=1",
    "gpt2": "hf:gpt2:n_layer=1,n_embd=64,n_head=4,vocab_size=128,n_positions=32",
    "llama": "hf:llama:num_hidden_layers=1,hidden_size=64,num_attention_heads=4,"
    "num_key_value_heads=2,intermediate_size=128,vocab_size=128",
    "bert": "hf:bert:num_hidden_layers=1,hidden_size=64,num_attention_heads=4,"
    "intermediate_size=128,vocab_size=128,max_position_embeddings=32",
    "vit": "hf:vit:num_hidden_layers=1,hidden_size=64,num_attention_heads=4,"
    "intermediate_size=128,image_size=32,patch_size=8",
    "t5": "hf:t5:num_layers=1,d_model=64,d_kv=16,d_ff=128,num_heads=4,vocab_size=128",
    "unet": "unet:channels=8,size=16,batch=4",
    "cnn": "cnn:channels=8,size=16",
}

_tested: set[OpKey] = set()
"""What earlier models had: equal ops are tested once."""


FAST = "gpt"


@pytest.mark.parametrize(
    "name",
    slow_where(lambda name: name != FAST, MODELS),
)
def test_ops_of_a_model_can_be_cut_along_each_factor(name: str) -> None:
    example = build_example(MODELS[name], dtype=torch.float64)
    program = capture(example.module, kwargs=example.kwargs)
    values = values_of(program, example.module, example.kwargs)
    done = 0
    for instance in instances(program, values):
        assert spec_of(instance.op).has_rule
        for mesh, cut in cuts(instance.rule):
            if cut.is_possible(instance.rule):
                check_cut(instance, mesh, cut)
                done += 1
    assert done > 0


@torch.no_grad()
def instances(program: Program, values: dict[tuple[str, str], Tensor]) -> Iterator[Instance]:
    """The distinct ops of a global program, with the tensors that they are called on."""
    environment: dict[SSAValue, Tensor] = {}
    for slot in program.arguments:
        one = torch.ones((), dtype=torch.float64)
        environment[slot.value] = values.get((slot.kind, slot.name), one).detach()
    for op in program.ops:
        assert isinstance(op, AtenOp)
        args, kwargs = arguments(op, environment.__getitem__)
        returned: Any = callee_of(op)(*args, **kwargs)
        parts = returned if isinstance(returned, tuple | list) else (returned,)
        results = tuple(part for part in parts if part is not None)
        environment.update(zip(op.results, results, strict=True))
        signature = key_of_op(op)
        if signature not in _tested:
            _tested.add(signature)
            yield Instance(op, tuple(environment[v] for v in op.operands), results)


def cuts(rule: Rule) -> Iterator[tuple[Mesh, Cut]]:
    """Plain shards of each factor alone, over two devices or, if it is odd, over three."""
    for index, factor in enumerate(rule.factors):
        size = 2 if factor.size % 2 == 0 else 3
        if factor.size % size == 0:
            placements: list[DimSharding] = [()] * len(rule.factors)
            placements[index] = (Placement("a", size, factor.size // size),)
            yield Mesh(a=size), Cut(tuple(placements))
