"""Passes in any order: each order gives a program that is right, or is refused in plain words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
from xdsl.passes import ModulePass

from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassError, PassPipeline, run_passes
from shardweave.passes.registry import PASSES
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.overlap.overlap_communication import OverlapCommunicationPass
from shardweave.tests.zoo import GRADIENT_BOUND, assert_equals_eager, captured, megatron

SPECS = {
    "gpt": "gpt:layers=1,hidden=8,heads=2,vocab=16,seq=4,batch=4",
    "cnn": "cnn:depth=10,channels=4,size=8,batch=4",
}
MESH = "data=2,tensor=2"
STARTS = {"annotated": "", "partitioned": "preset:partition"}
"""By name the passes that run before the orders that are tried: none, the default pipeline."""

FLOAT32_BOUND = 1e-5
"""How far a gradient may be from eager's, in parts of its largest element, where reduce-in has
had it added up in float32; all else is float64."""

PRECONDITION = re.compile(r"run [a-z-]+ first|before [a-z-]+|already")
"""What a refusal says: the pass to run first or later, or what was done and cannot be done twice."""


@dataclass
class Orders:
    """Runs passes in many orders, each pass once on each distinct program that the orders reach."""

    passes: dict[str, ModulePass]
    programs: dict[str, Program] = field(default_factory=dict[str, Program])
    after: dict[tuple[str, str], str | PassError] = field(
        default_factory=dict[tuple[str, str], str | PassError]
    )
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """By sentence the first order that was refused with it."""
    count: int = 0

    def walk(self, text: str, before: tuple[str, ...], length: int) -> None:
        """Try every order of up to `length` passes that begins with those that ran before."""
        for name in self.passes:
            if name in before:
                continue
            order = (*before, name)
            self.count += 1
            result = self._run(text, name)
            if isinstance(result, PassError):
                self.refused.setdefault(str(result), order)
            elif len(order) < length:
                self.walk(result, order, length)

    def add(self, program: Program) -> str:
        text = str(program)
        self.programs.setdefault(text, program)
        return text

    def _run(self, text: str, name: str) -> str | PassError:
        if (text, name) not in self.after:
            pipeline = PassPipeline([self.passes[name]])
            try:
                self.after[text, name] = self.add(pipeline.run(self.programs[text]))
            except PassError as error:
                self.after[text, name] = error
        return self.after[text, name]


def orders_of(model: str, start: str, length: int) -> Orders:
    """All orders of up to `length` of the registered passes, on a small model."""
    spec = SPECS[model]
    plan = ApplyPlanPass.of(megatron(spec, MESH))
    passes: dict[str, ModulePass] = {name: PassPipeline(name).passes[0] for name in PASSES}
    passes["apply-plan"] = plan
    passes["overlap-communication"] = OverlapCommunicationPass(cluster="testbed:nodes=4")
    orders = Orders(passes)
    first = run_passes(captured(spec).program, [plan, STARTS[start]], mesh=MESH)
    orders.walk(orders.add(first), (), length)
    return orders


def assert_refusals_name_a_precondition(orders: Orders) -> None:
    assert orders.refused  # The registry has passes that exclude each other.
    unclear = {
        sentence: order
        for sentence, order in orders.refused.items()
        if "left an invalid program" in sentence or not PRECONDITION.search(sentence)
    }
    assert unclear == {}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("model", ["gpt", pytest.param("cnn", marks=pytest.mark.slow)])
def test_two_passes_in_any_order_verify_or_are_refused(model: str, start: str) -> None:
    orders = orders_of(model, start, 2)
    assert orders.count > len(PASSES)
    assert_refusals_name_a_precondition(orders)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("model", SPECS)
def test_three_passes_in_any_order_equal_eager_or_are_refused(model: str, start: str) -> None:
    orders = orders_of(model, start, 3)
    assert orders.count > len(PASSES) ** 2
    assert_refusals_name_a_precondition(orders)
    for text, program in orders.programs.items():
        bound = FLOAT32_BOUND if "xf32" in text else GRADIENT_BOUND
        assert_equals_eager(program, captured(SPECS[model]), bound)
