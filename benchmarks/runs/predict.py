"""What the simulator says of a measured run.

The run's program is a decoder of its sizes (`decoder`), lowered for one micro-batch on the
tensor degree by Megatron's rule and with the run's recomputation; its blocks are priced once, and
the step is that of `benchmarks/stages` for the run's stages, micro-batches and ZeRO stage,
with Adam behind it. Runs that differ in degrees of data and pipeline parallelism alone share all
but the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from xdsl.rewriter import Rewriter

from shardweave.benchmarks.runs.decoder import LAYERS, captured_decoder
from shardweave.benchmarks.runs.frameworks import framework_of
from shardweave.benchmarks.runs.memory import fullest, with_workspace
from shardweave.benchmarks.runs.policies import CHECKPOINT, POLICIES
from shardweave.benchmarks.runs.rows import MeasuredRun
from shardweave.benchmarks.runs.run_plan import chunks, dtype_of, plan_of, spec_of
from shardweave.benchmarks.runs.spec import DecoderSpec
from shardweave.benchmarks.stages.played import played_stages
from shardweave.benchmarks.stages.stages import Stage, pipeline_of, placed_stages
from shardweave.ir.dialects.dist import AllReduceOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.memory.rematerialize import recompute
from shardweave.planners.cost.cluster import Cluster, DeviceType, NodeType, PlacedCluster
from shardweave.planners.cost.workload import Workload, workload_of
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.megatron.planner import CONTEXT, plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import RECOMPUTE
from shardweave.planners.plan.zero import DATA_AXIS
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation

ADAM_BYTES = 32
"""That Adam moves for a parameter in mixed precision: its gradient, and three numbers of 32 bits
that are read and written, and the parameter."""

CAPTURED = 16
"""Samples of the batch that is captured, where micro-batches divide it."""

GUESSED_MICRO_BATCHES = 4
"""Times its stages: micro-batches of a run with stages that does not say how many."""


REACHED = 0.84
"""Of what an adapter is sold for, as those of `dgx-a100` and `dgx-h100` do."""

FLASH_SPEEDUPS = {1: 1.0, 2: 2.0, 3: 3.5}
"""Of a kernel of attention over the first FlashAttention, which the presets have: the second is
about twice as fast (Dao 2023), the third 1.5 to 2 times as fast as that (Shah et al. 2024)."""

FLASH_MOST = 0.75
"""Of the peak that any of them reaches (Shah et al. 2024)."""

FP8 = "float8_e4m3fn"

LEAST_PLAYED = 4
"""Micro-batches, and no fewer than stages, behind which each takes as long as the one before."""


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
    """As many of a cluster's nodes as a run used, with as many devices on each: of those of the
    run's kind of device, or where the cluster has none of that name of its first kind; of a run on
    several kinds (`A100+V100`) as many devices of each. Where the run does not say how many devices
    a node has, the cluster does, and so for adapters of a node.

    A run in TF32 has the rate `tfloat32` for products of 32 bits, and one in fp8 the rate
    `float8_e4m3fn` for those of 16, if the cluster says it. Attention is as fast as its kernel.
    """
    own = [node for node in cluster.nodes if node.device == run.gpu]
    kinds = run.gpu.count("+") + 1
    used = cluster.nodes if kinds == len(cluster.nodes) > 1 else (own or cluster.nodes)[:1]
    nodes = tuple(_used(node, run, run.gpus // len(used)) for node in used)
    devices = cluster.devices
    if run.precision == "tf32":
        devices = {name: _in_tf32(one) for name, one in devices.items()}
    devices = {name: _with_attention(one, run.flash) for name, one in devices.items()}
    if "fp8" in run.precision:
        devices = {name: _in_fp8(one) for name, one in devices.items()}
    return replace(cluster, nodes=nodes, devices=devices)


def _used(node: NodeType, run: MeasuredRun, count: int) -> NodeType:
    """The nodes of a type that have so many devices of a run."""
    per_node = run.per_node or min(count, node.devices)
    node = replace(node, devices=per_node, count=-(-count // per_node))
    adapters, sold = run.adapters
    if adapters:
        node = replace(node, nics=adapters, nic_bandwidth_bytes_s=REACHED * sold)
    return node


def _with_attention(device: DeviceType, version: int) -> DeviceType:
    """The third runs on devices that have a rate for 8 bits, as Hopper; others have the second."""
    speedup = FLASH_SPEEDUPS[version if FP8 in device.flops else min(2, version)]
    points = device.attention_efficiency
    faster = tuple((work, min(FLASH_MOST, share * speedup)) for work, share in points)
    return replace(device, attention_efficiency=faster if speedup > 1 else points)


def _in_fp8(device: DeviceType) -> DeviceType:
    """Products at the rate of 8 bits: one of as many more FLOPs as that is faster reaches the share
    of the peak that it reached in 16. Attention stays in 16 bits."""
    rate = device.flops.get(FP8)
    if rate is None:
        return device
    faster = rate / device.flops["bfloat16"]
    return replace(
        device,
        flops={**device.flops, "bfloat16": rate},
        efficiency=tuple((faster * work, share) for work, share in device.efficiency),
        attention_efficiency=tuple(
            (work, share / faster) for work, share in device.attention_efficiency
        ),
    )


def _casts(run: MeasuredRun, cluster: Cluster) -> bool:
    """Whether a run's linear maps are cast to 8 bits: on devices that have a rate for them."""
    return "fp8" in run.precision and all(FP8 in one.flops for one in cluster.devices.values())


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
                f"column 'gbs' is {run.batch}, no multiple of {run.data} replicas (dp) of {micro} "
                "samples (mbs); write counts that divide it"
            )
        _check_axes(run)
        plan = plan_of(run, count)
        work = self._work(run, cluster, micro)

        def read(placed: PlacedCluster, mesh: Mesh) -> Workload:
            return work

        stages = [
            replace(stage, gradient_scale=_gradient_scale(run), divided_over=(CONTEXT, DATA_AXIS))
            for stage in placed_stages(plan, cluster, read)
        ]
        found = _played(run, stages, plan, cluster)
        if not math.isfinite(found.time_s):
            raise ValueError(
                f"cluster '{cluster.name}' has no link for some of the messages of {run.gpus} "
                "devices; add 'bandwidth_bytes_s' within its nodes, and between them 'nics' with "
                "'nic_bandwidth_bytes_s'"
            )
        memory, capacity = fullest(run, found)
        later_s = _adam_s(run, cluster, stages) + count * _reported_s(run, cluster, micro)
        return PredictedRun(found.time_s + later_s, memory, capacity)

    def _work(self, run: MeasuredRun, cluster: Cluster, micro: int) -> Workload:
        spec = spec_of(run, micro, casts=_casts(run, cluster))
        batch = CAPTURED if CAPTURED % micro == 0 else 2 * micro
        cut = run.tensor, run.context, run.sequence_parallel
        share = _Share(spec, batch, micro, *cut, policy_of(run))
        node = cluster.nodes[0].device, cluster.nodes[0].devices
        regathers = framework_of(run.framework, run.source).regathers
        kernels = run.precision, run.flash
        key = (*(cluster.name, node, kernels, share, regathers, _priced_on(run)),)
        if key not in self.works:
            local = _local(share)
            work = workload_of(local, cluster, _priced_on(run), regathers=regathers)
            self.works[key] = with_workspace(work, local)
        return stacked(self.works[key], run.layers)


def _played(
    run: MeasuredRun, stages: Sequence[Stage], plan: Plan, cluster: Cluster
) -> PipelineSimulation:
    """The step. Of many micro-batches few are played, and as many again, and the others take what
    the second take: a pipeline that is full does the same for each."""
    blocking = framework_of(run.framework, run.source).waits_for_sends

    def play(count: int) -> PipelineSimulation:
        few = replace(plan, pipeline=replace(pipeline_of(plan), micro_batches=count))
        own = [replace(stage, plan=few) for stage in stages]
        gathers = not run.sequence_parallel
        return played_stages(own, few, cluster, gathers=gathers, blocking=blocking)

    count = pipeline_of(plan).micro_batches
    few = -(-LEAST_PLAYED // run.pipeline) * run.pipeline
    if count <= 3 * few or (chunks(run) > 1 and count % run.pipeline):
        return play(count)
    first, second = play(few), play(2 * few)
    each_s = (second.time_s - first.time_s) / few
    return replace(second, micro_batches=count, time_s=first.time_s + (count - few) * each_s)


def _priced_on(run: MeasuredRun) -> Mesh:
    """The devices whose messages are priced with a micro-batch: of one replica; where sequences are
    cut, with those of data, for gradients are summed over both."""
    cut = {"data": run.data, "context": run.context} if run.context > 1 else {}
    return Mesh(**cut, tensor=run.tensor)


@dataclass(frozen=True)
class _Share:
    """What decides the program of a rank: a decoder, samples of the batch that is captured and of a
    micro-batch, how that is cut, and what is computed again."""

    spec: DecoderSpec
    batch: int
    micro: int
    tensor: int
    context: int
    sequence_parallel: bool
    policy: str


@lru_cache(maxsize=4)
def _local(share: _Share) -> Program:
    """The program of a rank. Micro-batches of several sizes are shares of one batch, which is
    captured once."""
    context = {"context": share.context} if share.context > 1 else {}
    mesh = Mesh(data=share.batch // share.micro, **context, tensor=share.tensor)
    lowerings = _lowerings(share.spec, share.batch)
    plan = plan_megatron(lowerings.program, mesh, sequence_parallel=share.sequence_parallel)
    is_planned = share.policy in RECOMPUTE
    base = replace(plan, recompute=share.policy) if is_planned else plan
    local = lowerings.blocking(base).clone()
    if not is_planned:
        recompute(local, lambda block: POLICIES[share.policy])
    if share.context == 1:
        _drop_sums(local)
    return local


def _drop_sums(program: Program) -> None:
    """Leave out sums over replicas, which a step has once and no micro-batch."""
    for op in list(program.ops):
        if isinstance(op, AllReduceOp) and DATA_AXIS in op.axes:
            Rewriter.replace_op(op, [], list(op.operands))


def _check_axes(run: MeasuredRun) -> None:
    if run.expert > 1:
        raise ValueError(
            f"column 'ep' is {run.expert}, and runs whose experts are cut are not predicted; leave "
            "the row out"
        )
    if run.context > 1 and (not run.is_fused or run.seq % run.context):
        raise ValueError(
            f"column 'cp' is {run.context}, and sequences of {run.seq} can be cut only with fused "
            "attention (column 'attention') and where it divides them; leave the row out"
        )


def _gradient_scale(run: MeasuredRun) -> float:
    """Bytes of a gradient that is sent, over those of its parameter."""
    framework = framework_of(run.framework, run.source)
    return 2.0 if framework.sends_float and dtype_of(run) == "bfloat16" else 1.0


def _adam_s(run: MeasuredRun, cluster: Cluster, stages: Sequence[Stage]) -> float:
    """Seconds of Adam behind all else, on the device with most parameters."""
    size = max(sum(stage.parameter_bytes) for stage in stages)
    shares = run.data * run.context if run.zero else 1
    bandwidth = min(one.memory_bandwidth_bytes_s for one in cluster.device_types(run.gpus))
    return ADAM_BYTES * size / stages[0].itemsize / shares / bandwidth


def _reported_s(run: MeasuredRun, cluster: Cluster, micro: int) -> float:
    """Seconds of what a framework reports of a micro-batch, behind its backward pass."""
    each = framework_of(run.framework, run.source).reported_bytes
    logits = micro * run.seq * run.vocab / (run.tensor * run.context)
    bandwidth = min(one.memory_bandwidth_bytes_s for one in cluster.device_types(run.gpus))
    return each * logits / bandwidth


@lru_cache(maxsize=4)
def _lowerings(spec: DecoderSpec, batch: int) -> Lowerings:
    return Lowerings(captured_decoder(spec, batch), most=2)


def in_order(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """Runs that share a program behind each other."""
    return sorted(runs, key=lambda r: (*of_program(r), r.framework, r.tensor, r.micro_batch or 0))


def of_program(run: MeasuredRun) -> tuple[object, ...]:
    """What runs that may share a program have in common."""
    return (
        *(run.gpu, run.hidden, run.heads, run.key_heads, run.ffn, run.seq, run.vocab),
        run.told.architecture.name,
    )


def policy_of(run: MeasuredRun) -> str:
    """The policy of `rematerialize`, or of `recompute`, of a run's recomputation."""
    if run.recompute.startswith("selective"):
        policy = framework_of(run.framework, run.source).selective
        return "none" if policy == "stored-scores" and run.is_fused else policy
    return CHECKPOINT if run.recompute.startswith("full") else "none"


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
