"""Measured runs of models of Llama's kind: parameters as published, states by framework, and that
what a row says of stages, recomputation and cut sequences is what is predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.runs import predict
from shardweave.benchmarks.runs.architectures import architecture_of
from shardweave.benchmarks.runs.cells import RowError
from shardweave.benchmarks.runs.decoder import Decoder
from shardweave.benchmarks.runs.predict import PredictedRun, RunPredictor, placed
from shardweave.benchmarks.runs.rows import MeasuredRun, run_of
from shardweave.benchmarks.runs.run_plan import spec_of
from shardweave.planners.cost.presets import find_cluster

PREDICTOR = RunPredictor()
CLUSTER = find_cluster("dgx-h100")


def row(**cells: object) -> MeasuredRun:
    """A small model of Llama's kind, with some cells else."""
    base = {
        **{"gpu": "H100", "gpus": 8, "model": "llama", "layers": 8, "hidden": 64, "heads": 8},
        **{"kv_heads": 4, "ffn": 192, "vocab": 256, "seq": 64, "gbs": 64, "mbs": 2},
        **{"precision": "bf16", "framework": "Megatron-Core"},
    }
    return run_of({name: str(cell) for name, cell in {**base, **cells}.items()}, "here:2", "here")


def predicted(run: MeasuredRun) -> PredictedRun:
    return PREDICTOR.predict(run, placed(run, CLUSTER))


def num_parameters(run: MeasuredRun) -> int:
    with FakeTensorMode(), torch.device("meta"):
        model = Decoder(spec_of(run, 1))
    block = sum(one.numel() for one in model.h[1].parameters())
    own = sum(one.numel() for one in model.parameters()) - len(model.h) * block
    return own + run.layers * block


@pytest.mark.parametrize(
    ("name", "sizes", "published"),
    [
        ("Llama-3-8B", (32, 4096, 32, 8, 14336, 128256), 8_030_261_248),
        ("llama3-70b", (80, 8192, 64, 8, 28672, 128256), 70_553_706_496),
        ("Llama-2-7b", (32, 4096, 32, 32, 11008, 32000), 6_738_415_616),
        ("Llama-3.2-1B", (16, 2048, 32, 8, 8192, 128256), 1_235_814_400),
        ("Mistral-7B", (32, 4096, 32, 8, 14336, 32000), 7_241_732_096),
        ("Qwen2-7B", (28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
        ("Qwen3-8B", (36, 4096, 32, 8, 12288, 151936), 8_190_735_360),
        ("gemma-7b", (28, 3072, 16, 16, 24576, 256000), 8_537_680_896),
        ("SmolLM-135M", (30, 576, 9, 3, 1536, 49152), 134_515_008),
        ("gpt2", (12, 768, 12, 12, 3072, 50257), 124_439_808),
    ],
)
def test_models_have_as_many_parameters_as_published(
    name: str, sizes: tuple[int, ...], published: int
) -> None:
    """As Hugging Face's Hub counts them."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    run = row(model=name, seq=1024, framework="", **dict(zip(names, sizes, strict=True)))
    assert num_parameters(run) == published


@pytest.mark.parametrize(
    ("cells", "name", "reason"),
    [
        ({"model": "TinyLlama_1.1B"}, "llama", "the model's name"),
        ({"model": "8B"}, "llama", "4 heads of keys"),
        ({"model": "8B", "kv_heads": "", "framework": "nanotron"}, "llama", "the framework"),
        ({"model": "8B", "kv_heads": ""}, "llama", "an MLP of 192 features"),
        ({"model": "8B", "kv_heads": "", "ffn": ""}, "gpt", "nothing that says otherwise"),
        ({"model": "GPT-3 1.3B", "kv_heads": "", "framework": "nanotron"}, "gpt", "the model's"),
    ],
)
def test_row_tells_its_architecture(cells: dict[str, object], name: str, reason: str) -> None:
    told = row(**cells).told
    assert told.architecture.name == name
    assert told.reason.startswith(reason)


def test_width_and_vocabulary_that_a_row_does_not_say_are_its_familys() -> None:
    run = row(hidden=4096, heads=32, model="llama-2", ffn="", vocab="")
    assert (run.ffn, run.vocab) == (11008, 32000)
    assert architecture_of(
        "gpt", hidden=64, ffn=0, heads=8, key_heads=8, is_gated=False
    ).architecture.vocab == 51200  # fmt: skip


def test_keys_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(RowError, match="'kv_heads' is 3, which does not divide column 'heads', 8"):
        row(kv_heads=3)


def test_each_device_has_a_head_of_keys_where_there_are_fewer_than_devices() -> None:
    """Of four heads of keys eight devices hold one each; of twice the devices more is held."""
    run = row(tp=8, dp=1)
    assert spec_of(run, 2).num_key_heads == 8
    assert spec_of(replace(run, tensor=2), 2).num_key_heads == 4


STATES = {
    # Bytes of a parameter that each of d devices has whole, and that they share.
    "Megatron-Core": {0: (18, 0), 1: (6, 12)},
    "nanotron": {0: (20, 0), 1: (8, 12)},
    "DeepSpeed": {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)},
}


@pytest.mark.parametrize(
    "framework",
    [
        "Megatron-Core",
        pytest.param("nanotron", marks=pytest.mark.slow),
        pytest.param("DeepSpeed", marks=pytest.mark.slow),
    ],
)
def test_states_take_the_bytes_that_frameworks_say(framework: str) -> None:
    """What stages of ZeRO differ by, beside a block's parameters and gradients that are whole for a
    while."""
    run = row(framework=framework, model="llama", gpus=8, gbs=16, vocab=1024)
    count, stages = num_parameters(run), STATES[framework]
    found = {zero: predicted(replace(run, zero=zero)).memory_bytes for zero in stages}
    each = {zero: whole + shared / 8 for zero, (whole, shared) in stages.items()}
    largest = 2 * (1024 * 64 + 64)
    for zero in stages:
        more = 2 * max(0, zero - 1) * largest
        assert found[zero] - more - found[0] == pytest.approx(count * (each[zero] - each[0]))
    assert found[0] > count * each[0]


def test_several_stages_a_device_wait_less_for_each_other() -> None:
    base = row(pp=4, dp=2, gbs=32)
    plain, chunks = predicted(base), predicted(replace(base, chunks=2))
    assert chunks.step_s < plain.step_s
    assert chunks.memory_bytes > plain.memory_bytes


@pytest.mark.slow
def test_selective_recomputation_is_that_of_the_framework() -> None:
    """Megatron's runs the scores again where they are stored, torchtitan's every second product."""
    stored = row(attention="unfused", seq=256, gpus=1, gbs=2)
    ways = ("none", "selective", "full")
    none, some, full = (predicted(replace(stored, recompute=way)) for way in ways)
    assert full.memory_bytes < some.memory_bytes < none.memory_bytes
    assert none.step_s < some.step_s < full.step_s
    fused = replace(stored, is_fused=True)
    none, some = (predicted(replace(fused, recompute=way)) for way in ways[:2])
    assert none == some
    titan = replace(fused, framework="torchtitan")
    none, some, full = (predicted(replace(titan, recompute=way)) for way in ways)
    assert full.memory_bytes < some.memory_bytes < none.memory_bytes
    assert none.step_s < some.step_s


@pytest.mark.parametrize("word", ["op", "minimal", "save_qkv_proj"])
def test_other_words_for_recomputation_are_read(word: str) -> None:
    assert row(recompute=word).recompute == "selective"
    assert row(recompute="true").recompute == "full"
    assert row(recompute="No").recompute == "none"


@pytest.mark.slow
def test_cut_sequences_take_less_memory_and_no_more_parameters() -> None:
    whole = row(gpus=2, dp=2, seq=512, gbs=8)
    cut = replace(whole, data=1, context=2)
    assert predicted(cut).memory_bytes < predicted(whole).memory_bytes
    with pytest.raises(ValueError, match=r"'cp' is 2.*fused attention"):
        predicted(replace(cut, is_fused=False))


@pytest.mark.parametrize(
    "cells",
    [
        {"pp": 4, "dp": 2, "gbs": 240},
        pytest.param(
            {"pp": 2, "vpp": 2, "tp": 2, "dp": 2, "gbs": 240, "zero": 1, "sp": "true"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"zero": 3, "gbs": 1024, "framework": "torchtitan"}, marks=pytest.mark.slow),
        pytest.param(
            {"zero": 2, "pp": 2, "gbs": 480, "framework": "DeepSpeed"}, marks=pytest.mark.slow
        ),
    ],
)
def test_micro_batches_that_are_not_played_take_what_those_played_do(
    cells: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = predicted(row(**cells))
    monkeypatch.setattr(predict, "LEAST_PLAYED", 10**6)
    assert few.step_s == pytest.approx(predicted(row(**cells)).step_s, rel=1e-9)
    assert few.memory_bytes == predicted(row(**cells)).memory_bytes


@pytest.mark.slow
def test_micro_batch_costs_the_same_as_a_share_of_a_larger_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = row(gpus=1, gbs=6, mbs=2)
    shared = predicted(run)
    monkeypatch.setattr(predict, "CAPTURED", 2)
    alone = RunPredictor().predict(run, placed(run, CLUSTER))
    assert shared.step_s == pytest.approx(alone.step_s)
    assert shared.memory_bytes == alone.memory_bytes
