"""Replays of a step, on a driver that records a function and runs it again in the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardweave.backends.distributed.cuda_graph import GraphedStep
from shardweave.backends.distributed.distributed import DistributedBackend
from shardweave.backends.distributed.emitted_runner import EmittedRunner
from shardweave.backends.programs import Key

RUNTIME = SimpleNamespace(device=torch.device("cuda"))
GRAD, LOSS, INPUT = ("grad", "w"), ("output", "0"), ("input", "x")


class MockGraph:
    """What a graph does: a replay writes the memory of the results that were captured."""

    def __init__(self) -> None:
        self.step: Any = None

    def replay(self) -> None:
        found = self.step._run(RUNTIME, self.step._given)
        for key, result in self.step._results.items():
            result.copy_(found[key])


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> GraphedStep:
    @contextmanager
    def scope(*args: object) -> Iterator[None]:
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", scope)
    monkeypatch.setattr(torch.cuda, "graph", scope)
    made = GraphedStep(run)

    def graph() -> MockGraph:
        found = MockGraph()
        found.step = made
        return found

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    return made


RUNS: list[int] = []


def run(runtime: Any, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    RUNS.append(1)
    x = given[INPUT]
    return {GRAD: x * 3, LOSS: x.sum()}


def call(step: GraphedStep, number: float) -> tuple[Tensor, Tensor]:
    results = step(RUNTIME, {INPUT: torch.full((2,), number)})
    return results[GRAD], results[LOSS]


def runs_of(step: GraphedStep, number: float) -> tuple[Tensor, int]:
    """The gradient of a call, and how often the function ran: once for a replay."""
    RUNS.clear()
    gradient, _ = call(step, number)
    return gradient, len(RUNS)


def test_gradients_that_are_dropped_are_never_copied(step: GraphedStep) -> None:
    place = step(RUNTIME, {INPUT: torch.ones(2)})[GRAD].data_ptr()
    for number in (2.0, 3.0):
        gradient, loss = call(step, number)
        assert gradient.data_ptr() == place
        assert gradient.tolist() == [3 * number] * 2
        assert loss.item() == 2 * number
        del gradient


def test_gradient_that_is_held_keeps_its_values(step: GraphedStep) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad, loss = call(step, 1.0)
    gradient, count = runs_of(step, 5.0)
    assert count == 1
    assert parameter.grad.tolist() == [3.0, 3.0]
    parameter.grad.add_(gradient)  # as a step accumulates
    assert parameter.grad.tolist() == [18.0, 18.0]
    assert gradient.tolist() == [15.0, 15.0]
    assert loss.item() == 2.0


def test_view_of_a_gradient_that_is_held_keeps_its_values(step: GraphedStep) -> None:
    view = call(step, 1.0)[0][:1]
    gradient, count = runs_of(step, 2.0)
    assert count > 1, "captured again, in other memory"
    assert view.tolist() == [3.0]
    assert gradient.tolist() == [6.0, 6.0]
    other = gradient[:1]
    _, count = runs_of(step, 4.0)
    assert count == 1, "copied from now on"
    assert other.tolist() == [6.0]


def test_graph_of_a_step_that_sends_messages_is_refused() -> None:
    runtime: Any = SimpleNamespace(
        mesh=SimpleNamespace(num_devices=2), device=torch.device("cuda"), mesh_at=None
    )
    backend = DistributedBackend(runtime, cuda_graph=True)
    program: Any = None
    with pytest.raises(ValueError, match="CUDA graphs with collectives are not supported"):
        backend.load(program)


def test_graph_gets_no_gradients_to_add_to(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = EmittedRunner.__new__(EmittedRunner)
    seen: list[Key] = []
    runner._parts = SimpleNamespace(pad=lambda given: None, unpad=lambda results: None)
    runner._graphed = lambda runtime, given: seen.extend(given) or {}
    monkeypatch.setattr(EmittedRunner, "runtime", None, raising=False)
    runner.results_of({GRAD: torch.ones(1), INPUT: torch.ones(1)})
    assert seen == [INPUT]
