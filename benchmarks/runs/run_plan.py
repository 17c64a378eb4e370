"""What a measured run's row says of its decoder and of its plan."""

from __future__ import annotations

from itertools import accumulate, pairwise

from shardweave.benchmarks.runs.frameworks import framework_of
from shardweave.benchmarks.runs.rows import MeasuredRun
from shardweave.benchmarks.runs.spec import DecoderSpec
from shardweave.benchmarks.stages.events import INTERLEAVED
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline

DTYPES = {
    **{"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"},
    **{name: name for name in ("bfloat16", "float16", "float32")},
}


def dtype_of(run: MeasuredRun) -> str:
    """Of its parameters. Raises ValueError for a precision that is not known."""
    known = [name for key, name in DTYPES.items() if key in run.precision]
    if "fp8" in run.precision:
        return "bfloat16"
    if not known:
        raise ValueError(
            f"column 'precision' is '{run.precision}'; write one of {', '.join(DTYPES)}, fp8"
        )
    return known[0]


def spec_of(run: MeasuredRun, micro: int, *, casts: bool = False) -> DecoderSpec:
    """What a run's decoder is made of. casts: whether its linear maps compute in 8 bits.

    Megatron-LM's kernel of softmax takes 16 bits, and scores of four matrices at a time
    (`FusedScaleMaskSoftmax.is_kernel_available`)."""
    dtype = dtype_of(run)
    matrices = micro * run.heads // run.tensor
    has_kernel = dtype != "float32" and matrices % 4 == 0
    fuses_mask = has_kernel or "Megatron" not in run.framework
    framework = framework_of(run.framework, run.source)
    vocab = run.vocab if framework.pads_vocab else run.vocab // run.tensor * run.tensor
    kind = run.told.architecture
    return DecoderSpec(
        run.hidden, run.heads, run.ffn, vocab, run.seq, run.is_fused, fuses_mask, dtype,
        framework.drops_hidden, framework.drops_scores, framework.scales_scores,
        framework.masks_view, framework.heads.get(run.model, kind.head_of(run.hidden)),
        key_heads_on(run), kind, framework.joins, framework.fuses_gate or run.compiles,
        framework.loss, framework.fuses_norms or run.compiles, casts,
    )  # fmt: skip


def key_heads_on(run: MeasuredRun) -> int:
    """Heads of keys and values: as many on each device, and one at least, which then several have
    (Megatron-LM, `--num-query-groups`)."""
    keys = run.key_heads or run.heads
    return -(-keys // run.tensor) * run.tensor


def plan_of(run: MeasuredRun, count: int) -> Plan:
    """Its stages, degrees and ZeRO stage, for so many micro-batches."""
    pipeline = {"pipeline": run.pipeline} if run.pipeline > 1 else {}
    context = {"context": run.context} if run.context > 1 else {}
    layers = _layers_of_stages(run)
    stages = tuple(tuple(f"h.{index}" for index in part) for part in layers)
    overlaps = run.zero or framework_of(run.framework, run.source).overlaps
    return Plan(
        mesh={**pipeline, "data": run.data, **context, "tensor": run.tensor},
        zero=run.zero if run.data > 1 else 0,
        # FSDP sends beside its passes; Megatron-LM's data parallelism behind them.
        schedule="cross-pass" if overlaps else "",
        precision="fp32" if dtype_of(run) == "float32" else "bf16-mixed",
        pipeline=Pipeline(stages, count, schedule=INTERLEAVED if chunks(run) > 1 else "1f1b"),
    )


def chunks(run: MeasuredRun) -> int:
    """Stages that a device has (column 'vpp'), where there are stages at all."""
    return run.chunks if run.pipeline > 1 else 1


def _layers_of_stages(run: MeasuredRun) -> list[range]:
    """As the run says; else dealt evenly, as Megatron-LM does, the last stages taking one more."""
    count = run.pipeline * chunks(run)
    each, more = divmod(run.layers, count)
    even = [each + (stage >= count - more) for stage in range(count)]
    noted = run.stage_layers if count == run.pipeline else ()
    ends = [0, *accumulate(noted or even)]
    return [range(first, last) for first, last in pairwise(ends)]
