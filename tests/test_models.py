"""Every model on every mesh equals eager: the acceptance test of the whole project."""

from __future__ import annotations

import pytest

from shardweave.planners.megatron import plan_megatron
from shardweave.passes.pipeline import as_mesh
from shardweave.tests.zoo import (
    IMAGE_SPECS,
    SPECS,
    TEXT_SPECS,
    assert_equals_eager,
    captured,
    megatron,
    partitioned,
)

MESHES = ("tensor=2", "data=2", "data=2,tensor=2", "tensor=4", "data=4,tensor=4", "data=8,tensor=8")
LARGEST = MESHES[-1]
FAST_ON_THE_LARGEST = ("gpt", "llama")


def cases(names: dict[str, str]) -> list[object]:
    """Every model on every mesh; most of those on 64 ranks are slow."""
    return [
        pytest.param(
            name,
            mesh,
            id=f"{name}-{mesh}",
            marks=[pytest.mark.slow] if mesh == LARGEST and name not in FAST_ON_THE_LARGEST else [],
        )
        for name in names
        for mesh in MESHES
    ]


@pytest.mark.parametrize("name", SPECS)
def test_captured_program_equals_eager(name: str) -> None:
    case = captured(SPECS[name])
    assert_equals_eager(case.program, case)


@pytest.mark.parametrize(("name", "mesh"), cases(SPECS))
def test_model_sharded_by_the_megatron_rule_equals_eager(name: str, mesh: str) -> None:
    plan = megatron(SPECS[name], mesh)
    assert bool(plan.parameters) == ("tensor" in mesh)
    assert_equals_eager(partitioned(SPECS[name], mesh, plan), captured(SPECS[name]))


@pytest.mark.parametrize(("name", "mesh"), cases(TEXT_SPECS))
def test_model_with_sequence_parallelism_equals_eager(name: str, mesh: str) -> None:
    plan = megatron(SPECS[name], mesh, sequence_parallel=True)
    assert bool(plan.activations) == ("tensor" in mesh)
    assert_equals_eager(partitioned(SPECS[name], mesh, plan), captured(SPECS[name]))


@pytest.mark.parametrize("name", IMAGE_SPECS)
def test_sequence_parallelism_changes_nothing_but_a_note_without_a_sequence(name: str) -> None:
    plain = megatron(SPECS[name], "data=2,tensor=2")
    sequence = megatron(SPECS[name], "data=2,tensor=2", sequence_parallel=True)
    assert (sequence.parameters, sequence.activations) == (plain.parameters, {})
    assert sequence.notes == (
        *plain.notes,
        "sequence_parallel has no effect: no embedding of inputs was found",
    )
