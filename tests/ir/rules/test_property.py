"""Every rule, proved by execution: cut the factors, run the shards, recombine, compare."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch

from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.ops.registry import specs
from shardweave.tests.ir.rules.cuts import PAIRS, random_cut, single_cuts
from shardweave.tests.ir.rules.samples_compute import COMPUTE
from shardweave.tests.ir.rules.samples_layout import LAYOUT
from shardweave.tests.ir.rules.samples_pointwise import POINTWISE
from shardweave.tests.ir.rules.sharded_op import (
    Cut,
    Instance,
    check_cut,
    check_equal,
    instance_of,
)
from shardweave.tests.ir.strategies import random_sharding
from shardweave.tests.marks import slow_where

SAMPLES = (*POINTWISE, *LAYOUT, *COMPUTE)
OPS = sorted({sample.op for sample in SAMPLES})

SOME_POINTWISE = {"aten.add.Tensor", "aten.gelu_backward", "aten.relu", "aten.where.self"}
ALIKE = {sample.op for sample in POINTWISE} - {
    *SOME_POINTWISE,
    *(s.op for s in (*LAYOUT, *COMPUTE)),
}
COMBINED = slow_where(ALIKE.__contains__, OPS)
"""The ops for tests of several cuts at once: most pointwise ones are slow, since they have one rule,
and what a rule allows together does not depend on the op."""

NEVER_CUT = {f"aten.{name}" for name in ("all", "any", "mean", "min", "prod")}
"""Ops that need the whole tensor. (Overloads of theirs that take dims do not.)"""


@cache
def instances(op: str) -> list[Instance]:
    """The samples of an op, computed."""
    return [instance_of(sample) for sample in SAMPLES if op == sample.op]


def test_every_rule_has_a_sample() -> None:
    assert {spec.name for spec in specs() if spec.has_rule} - set(OPS) == set()


@pytest.mark.parametrize("op", OPS)
def test_each_factor_can_be_cut_alone(op: str) -> None:
    done = 0
    for instance in instances(op):
        for mesh, cut in single_cuts(instance.rule):
            if cut.is_possible(instance.rule):
                check_cut(instance, mesh, cut)
                done += 1
    assert (done > 0) is (op not in NEVER_CUT)


@pytest.mark.parametrize("op", COMBINED)
def test_factors_can_be_cut_together(op: str) -> None:
    random = Random(op)
    for instance in instances(op):
        for mesh in PAIRS:
            cuts = {random_cut(instance.rule, mesh, random, mesh.names) for _ in range(3)}
            for cut in sorted(cuts, key=repr):
                if cut.is_possible(instance.rule):
                    check_cut(instance, mesh, cut)


@pytest.mark.parametrize("op", OPS)
def test_cuts_that_the_rule_forbids_are_undone(op: str) -> None:
    random = Random(op)
    for instance in instances(op):
        rule = instance.rule
        for mesh in (Mesh(a=2), Mesh(a=3), *PAIRS):
            cut = random_cut(rule, mesh, random, mesh.names)
            if not cut.is_possible(rule):
                wanted = [Sharding.replicated(r.dim()) for r in instance.results]
                check_equal(instance, mesh, cut.operand_shardings(rule), wanted)


LINEAR = [op for op in OPS if any(instance.rule.linear for instance in instances(op))]


@pytest.mark.parametrize("op", LINEAR)
def test_pending_sums_pass_through_linear_ops(op: str) -> None:
    for instance in instances(op):
        rule = instance.rule
        if all(instance.operands[i].dtype == torch.bool for i in rule.linear):
            continue
        whole = Cut(((),) * len(rule.factors), ("a", "b"))
        check_cut(instance, Mesh(a=2, b=3), whole)
        for mesh, cut in single_cuts(rule):
            carrying = Cut(cut.factors, ("b",))
            if carrying.is_possible(rule):
                check_cut(instance, Mesh((*mesh.axes, Axis("b", 2))), carrying)


@pytest.mark.parametrize("op", COMBINED)
def test_any_shardings_give_the_same_result(op: str) -> None:
    random = Random(op)
    for instance in instances(op):
        for mesh in (Mesh(a=2, b=3), Mesh(a=2, b=2, c=3)):
            operands = [
                random_sharding(tensor.shape, mesh, random, may_be_sum=_can_be_summed(tensor))
                for tensor in instance.operands
            ]
            results = [random_sharding(tensor.shape, mesh, random) for tensor in instance.results]
            check_equal(instance, mesh, operands, results)


def _can_be_summed(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float64, torch.int64)
