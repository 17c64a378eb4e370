"""Layers of a program: what each has, and which are equal."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.inspect.outline import fold, layers_of, part_of, select
from shardweave.ir.ops.registry import flops_of
from shardweave.ir.program.blocks import Blocks
from shardweave.ir.program.program import Program
from shardweave.tests import zoo
from shardweave.tests.marks import slow
from shardweave.tests.real_step import PROPAGATION, captured, local


@pytest.mark.parametrize("is_local", [False, True], ids=["global", "local"])
def test_every_op_and_parameter_is_in_one_layer(is_local: bool) -> None:
    program = local("preset:oases") if is_local else captured()
    layers = layers_of(program)
    members = [op for layer in layers for op in layer.members]
    assert sorted(map(id, members)) == sorted(map(id, program.ops))
    stats = program.stats()
    assert sum(layer.parameter_bytes for layer in layers) == stats.parameter_bytes
    assert sum(sum(layer.collectives.values()) for layer in layers) == stats.count()
    assert sum(sum(one.flops.values()) for one in layers) == sum(map(flops_of, program.ops))
    for phase, count in stats.ops.items():
        assert sum(layer.ops.get(phase, 0) for layer in layers) == count


def test_equal_layers_fold_and_others_do_not() -> None:
    names = [one.name for one in fold(layers_of(captured()))]
    assert "h.0 .. h.1 (2 equal)" in names
    assert {"wte", "wpe", "ln_f", "head"} <= set(names)


def test_equal_layers_of_a_propagated_program_fold_and_count_their_reshards() -> None:
    program = local(PROPAGATION)  # A reshard's words name the gradient that it is for.
    (layer,) = [one for one in fold(layers_of(program)) if one.name.startswith("h.")]
    assert layer.name == "h.0 .. h.1 (2 equal)"
    placed = [op for op in layer.first.members if op.name == "dist.reshard"]
    assert layer.first.reshards == len(placed) > 2
    assert layer.first.moves == f"{len(placed)} reshard"


def test_layer_with_another_sharding_is_not_equal() -> None:
    text = str(local())
    line = next(line for line in text.splitlines() if 'layer = "h.1.mlp"' in line)
    changed = line.replace(', sharding = [#dist.sharding<[{"data"}, {}, {"tensor"}]>]', "")
    assert changed != line
    folds = fold(layers_of(Program.parse(text.replace(line, changed))))
    assert [one.name for one in folds if one.name.startswith("h.")] == ["h.0", "h.1"]


@pytest.mark.parametrize("name", ["llama", slow("unet")])
def test_layers_of_other_models_cover_them(name: str) -> None:
    program = zoo.captured(zoo.SPECS[name]).program
    assert sum(len(layer.members) for layer in layers_of(program)) == sum(1 for _ in program.ops)


def test_parts_are_blocks_and_first_words() -> None:
    blocks = Blocks(("transformer.h.3",))
    assert part_of("transformer.h.3.mlp.c_fc", blocks) == "transformer.h.3"
    assert part_of("head.proj", blocks) == "head"
    assert part_of("", blocks) == "(outside layers)"


def test_selection_is_of_a_layer_and_what_is_in_it() -> None:
    chosen = {layer_of(op) for op in select(captured(), layer="h.1.mlp")}
    assert chosen == {"h.1.mlp", "h.1.mlp.fc_in", "h.1.mlp.fc_out"}
    assert list(select(captured(), layer="h.1", phase="recompute")) == []
