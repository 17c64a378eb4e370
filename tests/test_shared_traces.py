"""Traces that tests share: the program made from a trace in a file is the one captured."""

from pathlib import Path

import pytest
import torch

from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.capture.outputs import Kind
from shardweave.ir.program.text import print_module
from shardweave.tests.shared_traces import SharedTraces
from shardweave.tests.zoo import SPECS


@pytest.mark.parametrize("name", SPECS)
def test_a_trace_of_another_process_gives_the_same_program(
    traces_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    example = build_example(SPECS[name], dtype=torch.float64)
    first = capture(example.module, kwargs=example.kwargs)
    # Another process has no traces of its own: it reads what the first wrote, and traces nothing.
    monkeypatch.setattr("shardweave.tests.shared_traces.trace", None)
    monkeypatch.setattr("shardweave.ir.capture.capture.trace", SharedTraces(traces_folder).trace)
    second = capture(example.module, kwargs=example.kwargs)
    texts = [print_module(program.module, locations=True) for program in (first, second)]
    assert texts[0] == texts[1]


def test_models_of_other_sizes_share_no_trace(tmp_path: Path) -> None:
    traces = SharedTraces(tmp_path)
    for size in (4, 8, 4):
        traces.trace(torch.nn.Linear(size, 2), [torch.ones(3, size)], {}, Kind(train=False))
    assert len(list(tmp_path.iterdir())) == 2
