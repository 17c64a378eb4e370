"""What measured runs keep and hold for a while: full recomputation, and the loss of frameworks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.benchmarks.runs import predict
from shardweave.benchmarks.runs.decoder import captured_decoder
from shardweave.benchmarks.runs.frameworks import COMPOSER, Framework
from shardweave.benchmarks.runs.predict import PredictedRun, RunPredictor, placed
from shardweave.benchmarks.runs.rows import MeasuredRun, run_of
from shardweave.benchmarks.runs.run_plan import spec_of
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.presets import find_cluster

CLUSTER = find_cluster("dgx-a100")
PREDICTOR = RunPredictor()


def row(**cells: object) -> MeasuredRun:
    """A small MPT that is trained on one device."""
    base = {
        **{"gpu": "a100_80gb", "gpus": 1, "model": "mpt", "layers": 8, "hidden": 64, "heads": 4},
        **{"vocab": 512, "seq": 256, "gbs": 8, "mbs": 4, "precision": "amp_bf16"},
        **{"attention": "flash", "framework": "Composer FSDP"},
    }
    return run_of({name: str(cell) for name, cell in {**base, **cells}.items()}, "here:2", "here")


def predicted(run: MeasuredRun) -> PredictedRun:
    return PREDICTOR.predict(run, placed(run, CLUSTER))


def test_layers_that_are_computed_again_each_keep_their_input_alone() -> None:
    """Ten layers more take their states and ten inputs of 16 bits; their attention runs again."""
    each = 16 * (12 * 64**2 + 11 * 64) + 2 * 4 * 256 * 64
    few = row(recompute="full")
    many = predicted(replace(few, layers=18)).memory_bytes
    assert many - predicted(few).memory_bytes == pytest.approx(10 * each, rel=1e-9)


def test_fused_loss_holds_logits_and_their_gradient_in_16_bits() -> None:
    """Megatron's holds two values of 32 bits, of which one is kept for the backward pass."""
    spec = replace(spec_of(row(vocab=65536), 1), drops_hidden=False)
    assert spec.loss == "fused"
    fused, plain = (
        peak_memory(captured_decoder(replace(spec, loss=way), 1)).peak_bytes
        for way in ("fused", "sharded")
    )
    logits = 256 * 65536
    assert plain - fused == pytest.approx(4 * logits, rel=0.02)


def test_fused_loss_takes_less_time_and_memory_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = row(vocab=8192)
    fused = predicted(run)

    def other(name: str, source: str = "") -> Framework:
        return replace(COMPOSER, loss="sharded")

    monkeypatch.setattr("shardweave.benchmarks.runs.run_plan.framework_of", other)
    plain = predicted(run)
    logits = 4 * 256 * 8192
    assert plain.memory_bytes - fused.memory_bytes == pytest.approx(4 * logits, rel=0.02)
    assert plain.step_s > fused.step_s


def test_what_is_reported_takes_the_traffic_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tokens of a step, behind the passes: it holds nothing beside activations."""
    run = row(vocab=8192)
    found = predicted(run)

    def silent(name: str, source: str = "") -> Framework:
        return replace(COMPOSER, reported_bytes=0.0)

    monkeypatch.setattr(predict, "framework_of", silent)
    alone = predicted(run)
    moved = COMPOSER.reported_bytes * run.batch * run.seq * run.vocab
    bandwidth = CLUSTER.device_types(1)[0].memory_bandwidth_bytes_s
    assert found.step_s - alone.step_s == pytest.approx(moved / bandwidth)
    assert found.memory_bytes == alone.memory_bytes
