"""Running generated kernels on tensors."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.backends.calls import prepared
from shardweave.backends.triton.cache import cache_folder, write_file
from shardweave.backends.triton.generate import kernel_of
from shardweave.backends.triton.region import Region, region_of
from shardweave.backends.triton.source import Config, Kernel
from shardweave.backends.triton.tune import ATEN, choose
from shardweave.backends.triton.writer import UnfitError
from shardweave.ir.kernel import FusedOp
from shardweave.ir.types import dtype_of_value, shape_of

Results = tuple[Tensor, ...]


@cache
def load_function(source: str, name: str, key: str) -> Any:
    """The Triton function of a generated module. Triton reads it from its file."""
    path = cache_folder() / "kernels" / f"{name}_{key}.py"
    if not path.exists() or path.read_text() != source:
        write_file(path, source)
    spec = importlib.util.spec_from_file_location(f"shardweave_kernel_{key}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


class FusedCall:
    """A `kernel.fused` as a function of tensors.

    The kernel is generated for the strides that the inputs have, once for each set of strides.
    A region that no template fits runs op by op; `reason` says why.

    op: the fused op. tunes: whether configurations are measured, on a GPU, the first time; else
    the default one is used.
    """

    def __init__(self, op: FusedOp, *, tunes: bool = True) -> None:
        self.op = op
        self.tunes = tunes
        self.reason: str | None = None
        self.region: Region | None = None
        self._kernels: dict[tuple[Any, ...], tuple[Kernel, Config]] = {}
        try:
            self.region = region_of(op)
        except UnfitError as error:
            self.reason = str(error)

    @property
    def kernels(self) -> list[tuple[Kernel, Config]]:
        """The kernels made so far, with their configurations."""
        return list(self._kernels.values())

    def explain(self, device: torch.device) -> str:
        """What computes the region on a device, in one line."""
        names = ", ".join(op.name.removeprefix("aten.") for op in self.op.fused_ops)
        if self.region is None:
            return f"ATen, op by op, since {self.reason}: {names}"
        if not _runs_kernels(device):
            return f"ATen, op by op, since kernels need a GPU: {names}"
        space = self.region.space
        text = f"Triton, {space.family}, {space.rows} x {space.columns}: {names}"
        for kernel, config in self.kernels:
            text += f"; {kernel.name} " + ("is slower than ATen" if config == ATEN else f"{config}")
        return text

    def __call__(self, *tensors: Tensor) -> Results:
        if self.region is None or not _runs_kernels(tensors[0].device):
            return run_on_aten(self.op, tensors)
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        key = (precision, *(tensor.stride() for tensor in tensors))
        if key not in self._kernels:
            strides = [tensor.stride() for tensor in tensors]
            try:
                kernel = kernel_of(self.region, strides, precision)
            except UnfitError as error:
                self.reason, self.region = str(error), None
                return run_on_aten(self.op, tensors)
            self._kernels[key] = kernel, self._chosen(kernel, tensors)
        kernel, config = self._kernels[key]
        return self._run(kernel, config, tensors)

    def _run(self, kernel: Kernel, config: Config, tensors: Sequence[Tensor]) -> Results:
        if config == ATEN:
            return run_on_aten(self.op, tensors)
        return launch(kernel, config, tensors)

    def _chosen(self, kernel: Kernel, tensors: Sequence[Tensor]) -> Config:
        if not self.tunes or tensors[0].device.type != "cuda":
            return kernel.configs[0]
        return choose(kernel, tensors[0].device, lambda c: self._run(kernel, c, tensors))


def explain_calls(calls: Sequence[FusedCall], device: torch.device) -> str:
    """What computes each region of a program, a line for each."""
    if not calls:
        return "no fused regions: every op runs on ATen"
    lines = [call.explain(device) for call in calls]
    return "\n".join(f"kernels[{number}]: {line}" for number, line in enumerate(lines))


def _runs_kernels(device: torch.device) -> bool:
    """Whether Triton runs on tensors of a device: on a GPU, or in its interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def launch(kernel: Kernel, config: Config, tensors: Sequence[Tensor]) -> Results:
    """Run a kernel with a configuration; returns the results of its region."""
    region = kernel.region
    device = tensors[0].device
    grid = grid_of(kernel, config)
    made: list[Tensor] = []
    for number, value in enumerate(region.stored):
        shape, dtype = shape_of(value), dtype_of_value(value)
        if number in kernel.partial:
            shape = (grid[0], region.space.columns)
            dtype = torch.float32 if dtype.itemsize == 2 else dtype
        made.append(torch.empty(shape, dtype=dtype, device=device))
    function = load_function(kernel.source, kernel.name, kernel.key)
    options = {k: v for k, v in config.items() if k in ("num_warps", "num_stages")}
    constants = {k: (kernel.fixed | config)[k] for k in kernel.constants}
    function[grid](*tensors, *made, *kernel.sizes.values(), **constants, **options)
    for number in kernel.partial:
        value = region.stored[number]
        made[number] = made[number].sum(0).to(dtype_of_value(value)).view(shape_of(value))
    return tuple(
        output.of(tensors[output.given] if output.stored is None else made[output.stored])
        for output in region.outputs
    )


def grid_of(kernel: Kernel, config: Config) -> tuple[int, ...]:
    """How many programs run, along each dim of the grid."""
    space = kernel.region.space
    if kernel.family == "pointwise":
        return (_blocks(space.columns, config["BLOCK"]),)
    if kernel.family == "matmul":
        return (_blocks(space.rows, config["BLOCK_M"]) * _blocks(space.columns, config["BLOCK_N"]),)
    rows = _blocks(space.rows, config["BLOCK_R"])
    if not space.reduces_columns:
        return (rows,)
    rows = min(rows, config["programs"])
    return (rows,) if space.reduces_rows else (rows, _blocks(space.columns, config["BLOCK_C"]))


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def run_on_aten(op: FusedOp, tensors: Sequence[Tensor]) -> Results:
    """The results of a region, computed by its ops one after another."""
    values: dict[SSAValue, Tensor] = dict(zip(op.block.args, tensors, strict=True))
    device = tensors[0].device if tensors else torch.device("cpu")
    for inner in op.fused_ops:
        values.update(
            zip(inner.results, prepared(inner, values.__getitem__, device)(), strict=True)
        )
    return tuple(values[value] for value in op.yielded)
