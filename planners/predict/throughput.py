"""Samples, tokens and FLOPs per second of a predicted step."""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import flops_of, is_attention
from shardweave.ir.ops.seen_keys import seen_share
from shardweave.ir.program.blocks import split_at_backward
from shardweave.ir.program.program import Program
from shardweave.passes.memory.rematerialize import RematerializePass
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.quantity import seconds_text
from shardweave.planners.cost.workload import batch_of, parameter_dtype
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError, Predicted


def model_flops(program: Program) -> float:
    """Count the model's FLOPs in a captured step: three times the forward pass's. Attention
    counts only unmasked keys, and recomputation does not count."""
    forward, _ = split_at_backward(program)
    return 3.0 * sum(
        flops_of(op) * (seen_share(op, Mesh()) if is_attention(op) else 1.0) for op in forward
    )


def recomputed_flops(program: Program, plan: Plan) -> float:
    """Count the FLOPs that a plan's recomputation adds to a captured step."""
    if plan.recompute == "none":
        return 0.0
    target = program.clone()
    RematerializePass(plan.recompute, blocks=",".join(plan.recompute_in)).recompute(target)
    return float(sum(flops_of(op) for op in target.ops if phase_of(op) == "recompute"))


@dataclass(frozen=True)
class Throughput:
    """Throughput of a step of a captured program on some devices.

    seq: tokens of a sample; 0 for a model without tokens. flops: the model's, in a step; again:
    those of recomputation. peak_flops_s: of the slowest device in the parameters' dtype; 0 if
    unknown. update_s: seconds of the optimizer's update within `time_s`, which MFU leaves out.
    """

    batch: int
    seq: int
    time_s: float
    devices: int
    flops: float
    peak_flops_s: float
    again: float = 0.0
    update_s: float = 0.0

    @staticmethod
    def of(
        program: Program, cluster: Cluster, plan: Plan, predicted: Predicted
    ) -> Throughput | None:
        """Throughput of a step under a plan; None if inputs have no batch, or time is 0."""
        try:
            batch = batch_of(program)
        except PlanError:
            return None
        if not predicted.time_s:
            return None
        tokens = [
            shape_of(slot.value)[1]
            for slot in program.arguments
            if slot.kind == "input"
            and len(shape_of(slot.value)) == 2
            and not dtype_of_value(slot.value).is_floating_point
        ]
        name = str(parameter_dtype(program)).removeprefix("torch.")
        devices = Mesh(**plan.mesh).num_devices
        peaks = [device.flops.get(name, 0.0) for device in cluster.device_types(devices)]
        return Throughput(
            batch,
            max(tokens, default=0),
            predicted.time_s,
            devices,
            model_flops(program),
            min(peaks),
            recomputed_flops(program, plan),
            predicted.update_s,
        )

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the model's own FLOPs take (Chowdhery et al. 2022)."""
        return self._share(self.flops)

    @property
    def hfu(self) -> float:
        """MFU that also counts recomputation (hardware FLOPs utilization)."""
        return self._share(self.flops + self.again)

    def _share(self, flops: float) -> float:
        peak = (self.time_s - self.update_s) * self.devices * self.peak_flops_s
        return flops / peak if peak else 0.0

    def __str__(self) -> str:
        what, each = ("tokens", self.seq) if self.seq else ("samples", 1)
        rate = self.batch * each / self.time_s
        assumed = f"a batch of {self.batch:,}" + (f" x {self.seq:,} tokens" if self.seq else "")
        words = f"{rate:,.0f} {what}/s, {rate / self.devices:,.0f} a device, with {assumed}"
        if not self.mfu:
            return words
        tera = self.peak_flops_s / 1e12
        peak = f"{self.devices} x {f'{tera:,.0f}' if tera >= 10 else f'{tera:.2g}'} TFLOP/s"
        words += (
            f"; MFU {self.mfu:.1%} = {self.flops:.3g} FLOPs of the model / "
            f"({seconds_text(self.time_s - self.update_s)} x {peak})"
        )
        words += ", without the update" if self.update_s else ""
        if self.again:
            words += f"; HFU {self.hfu:.1%}, with {self.again:.3g} FLOPs that are computed again"
        return words
