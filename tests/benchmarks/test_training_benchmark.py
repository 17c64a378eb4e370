"""benchmarks/training.py: what it compares, and how it measures."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardweave.benchmarks import training
from shardweave.benchmarks.training_cases import our_row
from shardweave.benchmarks.training_measure import TimedRow, sent_bytes, usage_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.memory import peak_memory
from shardweave.tests.spawn import run_ranks
from shardweave.tests.zoo import SPECS, captured

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_parameter_is_stored_over_the_data_axis_inside_what_computes_with_it() -> None:
    program = captured(SPECS["gpt"]).program
    (case,) = [case for case in training.CASES if case.name == "data x tensor"]
    plan = case.plan(program, Mesh(data=2, tensor=2))
    assert plan.parameters["h.0.mlp.fc_in.weight"] == '[{"tensor", "data"}, {}]'
    assert plan.parameters["h.0.mlp.fc_out.weight"] == '[{"data"}, {"tensor"}]'
    assert plan.parameters["ln_f.bias"] == '[{"data"}]'
    assert len(plan.parameters) == sum(s.kind == "param" for s in program.arguments)


def test_every_case_can_be_asked_for_by_its_name() -> None:
    assert not any("," in case.name for case in training.CASES)


def test_bytes_that_a_connection_has_sent_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            there, _ = server.accept()
            before = sent_bytes()
            client.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(there.recv(left))
            assert sent_bytes() - before >= 99_000
            there.close()


def peaks_of(case: str, model: str) -> tuple[int, int]:
    """The most bytes that a step makes on this rank at once: counted, and as planned."""
    (chosen,) = [one for one in training.CASES if one.name == case]
    row = our_row(chosen, model)
    row.run()
    counted = usage_of(row).peak_bytes
    assert row.program is not None
    planned = peak_memory(row.program)
    held = ("parameters", "buffers", "inputs")
    return counted, planned.peak_bytes - sum(planned.parts[part] for part in held)


WIDE = "gpt:layers=3,hidden=128,heads=2,vocab=64,seq=16,batch=4,tie=false"
"""Whose weights are most of its memory, so that none beside those of the plan is overlooked."""


@pytest.mark.slow
def test_step_that_gathers_its_weights_holds_no_more_than_is_planned() -> None:
    ranks = run_ranks(peaks_of, 2, "shards", WIDE)
    counted, planned = (min(peaks) for peaks in zip(*ranks, strict=True))
    assert counted == pytest.approx(planned, abs=64)  # a few scalars


def free_elsewhere() -> tuple[int, int]:
    """What is counted where another thread frees a tensor, and one like it is made again."""
    peaks: list[int] = []
    for lets_go in (False, True):
        kept: list[torch.Tensor] = []

        def run(lets_go: bool = lets_go, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(torch.ones(2**18))
            thread = threading.Thread(target=kept.clear if lets_go else kept.copy)
            thread.start()
            thread.join()
            again = torch.ones(2**18)
            kept.clear()
            return again

        peaks.append(usage_of(TimedRow("", run, [])).peak_bytes)
    dist.barrier()
    return peaks[0], peaks[1]


def test_what_another_thread_frees_is_seen_to_be_freed() -> None:
    assert run_ranks(free_elsewhere, 1) == [(2**21, 2**20)]


def test_line_of_the_table_compares_with_ours() -> None:
    ours: dict[str, Any] = {
        "name": "shardweave", "times_s": [0.3, 0.1, 0.2], "processor_s": [0.1], "messages": 3,
        "peak_bytes": 2**20, "sent_bytes": 1_250_000, "simulated_s": 0.16, "lower_bound_s": 0.1,
    }  # fmt: skip
    peer = ours | {"name": "DDP", "times_s": [0.4], "simulated_s": None, "lower_bound_s": None}
    assert training.cells("data", ours, ours, "100mbit") == [
        "data", "shardweave", "200.0 ms", "", "100.0 ms", "1.0 MiB", "1.2 MiB", "50%", "3", "1.25",
        "2.00",
    ]  # fmt: skip
    assert training.cells("data", ours, peer, "")[:4] == ["", "DDP", "400.0 ms", "0.50"]


@pytest.mark.parametrize(("name", "off"), [("training", 0.075), ("training_1gbit", 0.025)])
def test_two_runs_have_the_same_ratios_within_noise(name: str, off: float) -> None:
    first, second = (
        [
            statistics.median(ours["times_s"]) / statistics.median(peer["times_s"])
            for ours, peer, *_ in (case["rows"] for case in json.loads(path.read_text())["cases"])
        ]
        for path in (BENCHMARKS / "results" / f"{part}.json" for part in (name, f"{name}_2"))
    )
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) < off


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.name for case in training.CASES])
def test_quick_run_measures_ours_and_the_peer(case: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "training.py"), "--quick", "--cases", case]
    subprocess.run([*command, "--json", str(out)], check=True, timeout=600)
    for result in json.loads(out.read_text())["cases"]:
        ours, peer = result["rows"][:2]
        assert ours["name"] == "shardweave" != peer["name"]
        assert (ours["messages"] > 0) is (case != "one process")
        assert ours["peak_bytes"] > 0 < peer["peak_bytes"]
        assert ours["sent_bytes"] <= peer["sent_bytes"] * 1.01
