"""Kernels of measured runs: which attention, products in 8 bits, norms and losses that nothing
fuses, and gradients that a framework adds up in 32 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.benchmarks.runs.decoder import captured_decoder
from shardweave.benchmarks.runs.frameworks import framework_of
from shardweave.benchmarks.runs.predict import FLASH_MOST, PredictedRun, RunPredictor, placed
from shardweave.benchmarks.runs.rows import MeasuredRun, run_of
from shardweave.benchmarks.runs.run_plan import spec_of
from shardweave.benchmarks.scoreboard_predict import preset_of
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.presets import find_cluster

CLUSTER = find_cluster("dgx-h100")
PREDICTOR = RunPredictor()


def row(**cells: object) -> MeasuredRun:
    """A small model of Llama's kind on one device, with some cells else."""
    base = {
        **{"gpu": "H100", "gpus": 1, "model": "llama", "layers": 8, "hidden": 64, "heads": 8},
        **{"kv_heads": 4, "ffn": 192, "vocab": 256, "seq": 64, "gbs": 4, "mbs": 2},
        **{"precision": "bf16", "framework": "Megatron-Core"},
    }
    return run_of({name: str(cell) for name, cell in {**base, **cells}.items()}, "here:2", "here")


def large(**cells: object) -> MeasuredRun:
    """One that arithmetic takes longer for than the host."""
    return row(layers=2, hidden=4096, heads=32, kv_heads=8, ffn=14336, seq=4096, **cells)


def predicted(run: MeasuredRun, cluster: str = "dgx-h100") -> PredictedRun:
    return PREDICTOR.predict(run, placed(run, find_cluster(cluster)))


@pytest.mark.parametrize(
    ("attention", "framework", "version"),
    [
        ("", "nanotron", 2),
        ("", "NeMo", 3),
        ("flash-2", "NeMo", 2),
        ("", "Megatron-LM", 1),
        ("flash", "Megatron-LM", 1),
        ("flash/triton", "Composer FSDP", 1),
        ("flash-2", "Megatron-LM", 2),
        ("flash_attention_2", "DeepSpeed", 2),
        ("FA3", "torchtitan", 3),
        ("flash-1", "torchtitan", 1),
    ],
)
def test_attention_is_the_one_that_cell_or_framework_says(
    attention: str, framework: str, version: int
) -> None:
    assert row(attention=attention, framework=framework).flash == version


def test_attention_is_as_much_faster_as_its_kernel_and_reaches_no_more_than_any_does() -> None:
    shares = [
        placed(replace(row(), flash=version), CLUSTER).devices["H100-SXM"].attention_efficiency
        for version in (1, 2, 3)
    ]
    (first, second, third) = (points[-1][1] for points in shares)
    assert second == 2 * first
    assert third == min(FLASH_MOST, 3.5 * first)
    a100 = find_cluster("dgx-a100")
    (device,) = placed(replace(row(), flash=3), a100).devices.values()
    (second,) = placed(replace(row(), flash=2), a100).devices.values()
    assert device == second


def test_products_in_8_bits_are_faster_but_not_twice_where_a_device_has_a_rate() -> None:
    plain, cast = (predicted(large(precision=name)).step_s for name in ("bf16", "fp8"))
    assert plain / 2 < cast < plain / 1.2
    plain, cast = (predicted(large(precision=name), "dgx-a100").step_s for name in ("bf16", "fp8"))
    assert cast == plain


def test_attention_takes_as_long_beside_products_in_8_bits() -> None:
    (device,) = placed(row(precision="fp8"), CLUSTER).devices.values()
    (plain,) = placed(row(), CLUSTER).devices.values()
    rates = [one.flops["bfloat16"] * one.attention_efficiency[-1][1] for one in (device, plain)]
    assert rates[0] == pytest.approx(rates[1])
    assert device.flops["bfloat16"] == plain.flops["float8_e4m3fn"]


def test_pytorchs_loss_holds_three_values_of_the_logits_size_in_32_bits() -> None:
    """Megatron-LM's holds two."""
    spec = spec_of(row(vocab=65536, seq=256), 1)
    three, two = (
        peak_memory(captured_decoder(replace(spec, loss=way), 1)).peak_bytes
        for way in ("torch", "sharded")
    )
    assert three - two == pytest.approx(4 * 256 * 65536, rel=0.05)


def test_norms_that_nothing_fuses_take_longer_and_keep_more_unless_it_is_compiled() -> None:
    eager = predicted(large(framework="torchtitan"))
    compiled = predicted(large(framework="torchtitan", note="torch.compile"))
    assert eager.step_s > 1.02 * compiled.step_s
    assert eager.memory_bytes > compiled.memory_bytes


def test_megatron_deepspeed_adds_gradients_up_in_32_bits_in_bf16_alone() -> None:
    half, other = (
        predicted(row(framework="Megatron-DeepSpeed", precision=name)).memory_bytes
        for name in ("fp16", "bf16")
    )
    parameters = 8 * (64 * 64 * 3 + 3 * 64 * 192 + 2 * 64) + 2 * 256 * 64 + 64
    assert other - half == 4 * parameters
    assert framework_of("Megatron-DeepSpeed", "vtrain_single").gradient_bytes == 2


@pytest.mark.parametrize(
    ("cluster", "count", "gbit"),
    [
        ("8 A100-SXM4-80GB a node, 4 x 100 Gb RoCE", 4, 84),
        ("Alps, 4x200Gb/s Slingshot", 4, 168),
        ("Jean Zay, 4 OmniPath links of 100 Gb/s", 4, 84),
        ("4 nodes x 8 V100-SXM2-16GB, 100Gb IB", 8, 336),
        ("2 x 80GB", 8, 336),
    ],
)
def test_nodes_have_the_adapters_that_the_clusters_cell_counts(
    cluster: str, count: int, gbit: float
) -> None:
    """They reach as much of what they are sold for as the preset's."""
    (node,) = placed(row(cluster=cluster), CLUSTER).nodes
    assert (node.nics, node.nic_bandwidth_bytes_s) == (count, pytest.approx(gbit * 1e9 / 8))


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA_A800-SXM4-80GB", "hgx-a800"),
        ("H800", "hgx-h800"),
        ("H100-96", "grand-teton"),
        ("A100 80G", "dgx-a100"),
        ("Tesla V100-SXM2-32GB", "dgx-v100-32"),
        ("B200", "dgx-b200"),
        ("GH200-96GB", "clariden"),
    ],
)
def test_kinds_of_device_have_presets_however_rows_write_them(gpu: str, preset: str) -> None:
    assert preset_of(row(gpu=gpu), None).name == preset
