"""What the simulator says of a measured run.

The run's program is a decoder of its sizes (`decoder`), lowered for one micro-batch on the
tensor degree by Megatron's rule and with the run's recomputation; its blocks are priced once, and
the step is that of `planners/cost/pipeline` for the run's stages, micro-batches and ZeRO stage,
with Adam behind it. Runs that differ in degrees of data and pipeline parallelism alone share all
but the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from shardweave.driver.runs.decoder import LAYERS, DecoderSpec, captured_decoder
from shardweave.driver.runs.frameworks import framework_of
from shardweave.driver.runs.rows import MeasuredRun
from shardweave.ir.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster, DeviceType, PlacedCluster
from shardweave.planners.cost.pipeline.simulation import played_stages
from shardweave.planners.cost.pipeline.stages import placed_stages
from shardweave.planners.cost.workload import Workload, workload_of
from shardweave.planners.lower import Lowerings
from shardweave.planners.megatron import plan_megatron
from shardweave.planners.plan import Plan
from shardweave.planners.plan_parts import Pipeline

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"}
ADAM_BYTES = 32
"""That Adam moves for a parameter in mixed precision: its gradient, and three numbers of 32 bits
that are read and written, and the parameter."""

GUESSED_MICRO_BATCHES = 4
"""Times its stages: micro-batches of a run with stages that does not say how many."""


@dataclass(frozen=True)
class PredictedRun:
    """memory_bytes, capacity_bytes: of the fullest stage's devices."""

    step_s: float
    memory_bytes: float
    capacity_bytes: float

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.capacity_bytes


def placed(run: MeasuredRun, cluster: Cluster) -> Cluster:
    """As many of a cluster's first nodes as a run used, with as many devices on each.

    A run in TF32 has the rate `tfloat32` for products of 32 bits, if the cluster says it.
    """
    count = max(1, -(-run.gpus // run.per_node))
    node = replace(cluster.nodes[0], devices=run.per_node, count=count)
    devices = cluster.devices
    if run.precision == "tf32":
        devices = {name: _in_tf32(one) for name, one in devices.items()}
    return replace(cluster, nodes=(node,), devices=devices)


def _in_tf32(device: DeviceType) -> DeviceType:
    rate = device.flops.get("tfloat32", device.flops.get("float32", 0.0))
    return replace(device, flops={**device.flops, "float32": rate})


@dataclass(eq=False)
class RunPredictor:
    """Predicts runs on clusters. Programs and blocks are kept: runs should come `in_order`, and
    clusters of one name be equal but for their nodes' numbers."""

    works: dict[tuple[object, ...], Workload] = field(
        default_factory=dict[tuple[object, ...], Workload]
    )

    def predict(self, run: MeasuredRun, cluster: Cluster) -> PredictedRun:
        """Raises ValueError for a run that cannot be made, as a batch that does not divide, and for
        one whose note contradicts its row."""
        if run.contradiction:
            raise ValueError(run.contradiction)
        micro = micro_batch_of(run)
        count, rest = divmod(run.batch, run.data * micro)
        if rest or not count:
            raise ValueError(
                f"batch {run.batch} is no multiple of {run.data} replicas of {micro} samples"
            )
        plan = _plan_of(run, count)
        work = self._work(run, cluster, micro)

        def read(placed: PlacedCluster, mesh: Mesh) -> Workload:
            return work

        stages = placed_stages(plan, cluster, read)
        found = played_stages(stages, plan, cluster, gathers=not run.sequence_parallel)
        state = max(sum(stage.parameter_bytes) for stage in stages) / work.itemsize
        shares = run.data if run.zero else 1
        bandwidth = min(d.memory_bandwidth_bytes_s for d in cluster.device_types(run.gpus))
        optimizer_s = ADAM_BYTES * state / shares / bandwidth
        return PredictedRun(
            found.time_s + optimizer_s,
            found.peak_bytes + framework_of(run.framework, run.source).held_bytes,
            float(found.memory_bytes),
        )

    def _work(self, run: MeasuredRun, cluster: Cluster, micro: int) -> Workload:
        spec = _spec_of(run, micro)
        policy = policy_of(run)
        key = cluster.name, run.precision, spec, micro, run.tensor, run.sequence_parallel, policy
        if key not in self.works:
            lowerings = _lowerings(spec, micro)
            mesh = Mesh(data=1, tensor=run.tensor)
            base = plan_megatron(lowerings.program, mesh, sequence_parallel=run.sequence_parallel)
            local = lowerings.blocking(replace(base, recompute=policy))
            self.works[key] = workload_of(local, cluster, mesh)
        return stacked(self.works[key], run.layers)


def _spec_of(run: MeasuredRun, micro: int) -> DecoderSpec:
    """Megatron-LM's kernel of softmax takes 16 bits, and scores of four matrices at a time
    (`FusedScaleMaskSoftmax.is_kernel_available`)."""
    dtype = _dtype_of(run)
    matrices = micro * run.heads // run.tensor
    has_kernel = dtype != "float32" and matrices % 4 == 0
    fuses_mask = has_kernel or "Megatron" not in run.framework
    framework = framework_of(run.framework, run.source)
    vocab = run.vocab if framework.pads_vocab else run.vocab // run.tensor * run.tensor
    return DecoderSpec(
        run.hidden, run.heads, run.ffn, vocab, run.seq, run.is_fused, fuses_mask, dtype,
        framework.drops_hidden, framework.drops_scores, framework.scales_scores,
        framework.heads.get(run.model, "tied"),
    )  # fmt: skip


@lru_cache(maxsize=2)
def _lowerings(spec: DecoderSpec, batch: int) -> Lowerings:
    return Lowerings(captured_decoder(spec, batch), most=2)


def _dtype_of(run: MeasuredRun) -> str:
    known = [name for key, name in DTYPES.items() if key in run.precision]
    if "fp8" in run.precision:
        return "bfloat16"
    if not known:
        raise ValueError(f"precision '{run.precision}' is none of {', '.join(DTYPES)}, fp8")
    return known[0]


def in_order(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """Runs that share a program behind each other."""
    return sorted(
        runs, key=lambda r: (r.gpu, r.hidden, r.heads, r.seq, r.vocab, r.micro_batch or 0, r.tensor)
    )


def policy_of(run: MeasuredRun) -> str:
    """The policy of `rematerialize` of a run's recomputation."""
    return "layer" if run.recompute.startswith("full") else "none"


def micro_batch_of(run: MeasuredRun) -> int:
    """Samples of a micro-batch; where a run does not say, as few as fill its pipeline."""
    if run.micro_batch is not None:
        return run.micro_batch
    rows = run.batch // run.data
    count = 1 if run.pipeline == 1 else math.gcd(rows, GUESSED_MICRO_BATCHES * run.pipeline)
    return max(1, rows // count)


def stacked(work: Workload, layers: int) -> Workload:
    """The blocks of a model of so many layers, of which those of one with `LAYERS` are known."""
    places = [index for index, block in enumerate(work.blocks) if block.is_repeated]
    assert len(places) == LAYERS, "a decoder has its layers as blocks"
    chosen = [0] * min(1, layers) + [1] * max(0, layers - 2) + [2] * min(1, max(0, layers - 1))
    inner = [
        replace(work.blocks[places[one]], name=f"h.{index}", layers=(f"h.{index}",))
        for index, one in enumerate(chosen)
    ]
    blocks = (*work.blocks[: places[0]], *inner, *work.blocks[places[-1] + 1 :])
    shift = layers - LAYERS
    shared = tuple(
        replace(
            one,
            first=one.first + shift * (one.first > places[-1]),
            second=one.second + shift * (one.second > places[-1]),
        )
        for one in work.shared
    )
    return replace(work, blocks=blocks, shared=shared)


def _plan_of(run: MeasuredRun, count: int) -> Plan:
    mesh = {"pipeline": run.pipeline} if run.pipeline > 1 else {}
    layers = _layers_of_stages(run)
    stages = tuple(tuple(f"h.{index}" for index in part) for part in layers)
    return Plan(
        mesh={**mesh, "data": run.data, "tensor": run.tensor},
        zero=run.zero if run.data > 1 else 0,
        # FSDP sends beside its passes; Megatron-LM's data parallelism behind them.
        schedule="cross-pass" if run.zero else "",
        precision="fp32" if _dtype_of(run) == "float32" else "bf16-mixed",
        pipeline=Pipeline(stages, count, schedule="1f1b"),
    )


def _layers_of_stages(run: MeasuredRun) -> list[range]:
    """As the run says; else dealt evenly, as Megatron-LM does, the last stages taking one more."""
    each, more = divmod(run.layers, run.pipeline)
    even = [each + (stage >= run.pipeline - more) for stage in range(run.pipeline)]
    ends = [0, *accumulate(run.stage_layers or even)]
    return [range(first, last) for first, last in pairwise(ends)]
