"""One point of the joint space: a value for each dimension of how a step can be trained."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

MESH = ("data", "tensor", "stages")
"""Dimensions whose product is the number of devices; a change of one changes another."""


@dataclass(frozen=True)
class JointPoint:
    """How a step is trained. A further dimension is a field here and its values in `space`.

    data, tensor, stages: degrees, of which the product is the number of devices. zero: ZeRO stage.
    micro_batches: of a replica's share of the batch, one after another. sub_batches: of a
    micro-batch, interleaved. recompute, schedule: policies of `rematerialize` and
    `overlap-communication`. pipeline: the order of micro-batches, where there are stages or
    several micro-batches.
    """

    data: int = 1
    tensor: int = 1
    stages: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    recompute: str = "none"
    micro_batches: int = 1
    sub_batches: int = 1
    schedule: str = "in-order"
    pipeline: str = "1f1b"

    @property
    def pieces(self) -> int:
        """Into how many pieces the batch is cut, over devices and in time."""
        return self.data * self.micro_batches * self.sub_batches

    @property
    def is_staged(self) -> bool:
        """Whether a step runs functions of micro-batches by a table."""
        return self.stages > 1 or self.micro_batches > 1

    def value(self, dimension: str) -> str:
        """A dimension's value as a user writes it."""
        found = getattr(self, dimension)
        return str(found).lower() if isinstance(found, bool) else str(found)

    def with_value(self, **values: object) -> JointPoint:
        return replace(self, **values)  # pyright: ignore[reportArgumentType]  # checked by callers

    def __str__(self) -> str:
        """What differs from the least choice, after the degrees: `data=8, recompute layer`."""
        words = [",".join(f"{axis}={getattr(self, axis)}" for axis in MESH if self._is_told(axis))]
        words += ["sequence parallel"] if self.sequence_parallel else []
        words += [f"zero {self.zero}"] if self.zero else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        words += [f"{self.sub_batches} sub-batches"] if self.sub_batches > 1 else []
        words += [self.schedule]
        words += [self.pipeline] if self.stages > 1 else []
        return ", ".join(words)

    def _is_told(self, axis: str) -> bool:
        return axis != "stages" or self.stages > 1


DIMENSIONS = tuple(one.name for one in fields(JointPoint))
"""The dimensions' names, in order."""
