"""Run generated kernels on tensors."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.backends.emit.calls import prepared
from shardweave.backends.triton.installed import has_triton
from shardweave.backends.triton.kernels.generate import kernel_of
from shardweave.backends.triton.kernels.lookups import num_programs
from shardweave.backends.triton.launch.tune import ATEN, cache_folder, choose_config, write_file
from shardweave.backends.triton.source.alignment import num_column_blocks
from shardweave.backends.triton.source.joining import (
    PartialResult,
    finishing_grid,
    finishing_kernel,
    num_partial,
    partial_results_of,
    with_joining,
)
from shardweave.backends.triton.source.parts import (
    PartsQueue,
    Place,
    is_sum_in_memory,
    joins_others,
    sum_in_memory,
)
from shardweave.backends.triton.source.region import Region, region_of
from shardweave.backends.triton.source.source import Config, Kernel, KernelSource
from shardweave.backends.triton.source.writer import UnfitError
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import shape_of

Results = tuple[Tensor, ...]


@cache
def load_function(source: str, name: str, key: str) -> Any:
    """Import a generated module and return its Triton function. Triton reads the source file."""
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
    """A `kernel.fused` op as a function of tensors.

    A kernel is generated for each set of strides that the inputs have. A region that no template
    fits runs op by op; `reason` says why.

    op: the fused op. device: where it runs; on a GPU the first call measures all configurations.
    agreed: called once; returns one rank's choice on all ranks that run this op, so that all sum in
    the same order. queue: holds partial results until its owner joins them; without a queue the
    call joins them. kernels: the kernels made so far, with their configurations. failures:
    configurations that did not run, with reasons.
    """

    def __init__(
        self,
        op: FusedOp,
        device: torch.device | str = "cpu",
        *,
        agreed: Callable[[Callable[[], Config]], Config] = lambda choose_config: choose_config(),
        queue: PartsQueue | None = None,
    ) -> None:
        self.op = op
        self.device = torch.device(device)
        self.reason: str | None = None
        self.region: Region | None = None
        self.failures: list[str] = []
        self.kernels: list[tuple[Kernel, Config]] = []
        self._agreed = agreed
        self._queue = queue or PartsQueue(join_parts, at_once=True)
        self._config: Config | None = None
        self._ready: dict[tuple[Any, ...], Callable[[Sequence[Tensor]], Results]] = {}
        self._runs_kernels = _runs_kernels(self.device)
        try:
            self.region = region_of(op, on_gpu=has_gpu_types(self.device))
        except UnfitError as error:
            self.reason = str(error)

    def explain(self, device: torch.device) -> str:
        """Describe what computes the region on a device, in one line."""
        names = ", ".join(op.name.removeprefix("aten.") for op in self.op.fused_ops)
        if self.region is None:
            return f"ATen, op by op, since {self.reason}: {names}"
        if not _runs_kernels(device):
            lacks = "kernels need a GPU" if has_triton() else "Triton is not installed"
            return f"ATen, op by op, since {lacks}: {names}"
        space = self.region.space
        text = f"Triton, {space.family}, {space.rows} x {space.columns}: {names}"
        if is_sum_in_memory(self.op):
            return f"{text}; joined with other partial results"
        for kernel, config in self.kernels:
            text += f"; {kernel.name} " + ("is slower than ATen" if config == ATEN else f"{config}")
        for failure in self.failures:
            text += f"; left out: {failure}"
        return text

    def __call__(self, *tensors: Tensor) -> Results:
        key = tuple([tensor.stride() for tensor in tensors])
        run = self._ready.get(key)
        if run is None:
            run = self._ready[key] = self._prepared(tensors)
        return run(tensors)

    def _prepared(self, tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Results]:
        """Return a function that runs the region on tensors of these strides."""
        if self.region is None or not self._runs_kernels:
            return self._on_aten
        if is_sum_in_memory(self.op) and all(tensor.is_contiguous() for tensor in tensors):
            return JoinedSum(self.region, self.device, self._queue)
        kernel: Kernel | None = None
        try:
            strides = [tensor.stride() for tensor in tensors]
            kernel = kernel_of(self.region, strides, product_precision())
        except UnfitError as error:
            self.reason = str(error)
        config = self._chosen(kernel, tensors)
        if kernel is None:
            self.region = None
            return self._on_aten
        self.kernels.append((kernel, config))
        if config == ATEN:
            return self._on_aten
        return Launch(kernel, config, self.device, self._queue)

    def _on_aten(self, tensors: Sequence[Tensor]) -> Results:
        return run_on_aten(self.op, tensors, self.device)

    def _chosen(self, kernel: Kernel | None, tensors: Sequence[Tensor]) -> Config:
        """Return the configuration chosen for the first kernel, or this kernel's default if
        unfit."""
        if self._config is None:
            self._config = self._agreed(lambda: self._measured(kernel, tensors))
        if kernel is None or self._config in (*kernel.configs, ATEN):
            return self._config
        return kernel.configs[0]

    def _measured(self, kernel: Kernel | None, tensors: Sequence[Tensor]) -> Config:
        if kernel is None:
            return ATEN
        if self.device.type != "cuda":
            return kernel.configs[0]

        # An operand that the kernel overwrites is still needed after the measurement.
        copies = [t.clone() if n == kernel.overwrites else t for n, t in enumerate(tensors)]

        def runner(config: Config) -> Callable[[], object]:
            if config == ATEN:
                return lambda: self._on_aten(tensors)
            launch = Launch(kernel, config, self.device)
            return lambda: launch(copies)

        choice = choose_config(kernel, torch.cuda.get_device_name(self.device), runner)
        self.failures += choice.failures
        return choice.config


def has_gpu_types(device: torch.device) -> bool:
    """True if values on this device have GPU dtypes (`dtype_on_gpu`)."""
    return device.type == "cuda"


def product_precision() -> str:
    """Return the precision of float32 products in torch's settings: `tf32` or `ieee`."""
    matmul: Any = torch.backends.cuda.matmul
    setting = matmul.fp32_precision
    if setting == "none":
        setting = cast(Any, torch.backends).fp32_precision
    return "tf32" if setting == "tf32" else "ieee"


def _runs_kernels(device: torch.device) -> bool:
    """True if Triton runs on tensors of a device: on a GPU, or in its interpreter."""
    is_run = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return is_run and has_triton()


Start = Callable[..., object]


def starter(source: KernelSource, config: Config, grid: tuple[int, ...]) -> Start:
    """Return a function that starts a kernel, given its pointers; all else is prepared here."""
    function = load_function(source.source, source.name, source.key)[grid]
    sizes = tuple(source.sizes.values())
    constants = source.fixed | config
    keywords: dict[str, Any] = {name: constants[name] for name in source.constants}
    keywords |= launch_options(source, config)
    return lambda *pointers: function(*pointers, *sizes, **keywords)


class Launch:
    """A kernel at a configuration, ready to call. Prepares all that does not depend on tensors."""

    def __init__(
        self,
        kernel: Kernel,
        config: Config,
        device: torch.device | str,
        queue: PartsQueue | None = None,
    ) -> None:
        region = kernel.region
        self._grid = grid_of(kernel, config)
        self._start = starter(kernel, config, self._grid)
        self._kernel, self._config = kernel, config
        self._device = torch.device(device)
        self._made = [(shape_of(value), region.dtype_of(value)) for value in region.stored]
        self._partial = tuple(kernel.partial)
        self._parts = partial_results_of(kernel, config)
        self._queue = queue or PartsQueue(join_parts, at_once=True)
        self._joins_others = joins_others(kernel)
        self._joining: dict[tuple[PartialResult, ...], Start] = {}
        self._outputs = region.outputs
        self._overwrites = kernel.overwrites

    def __call__(self, tensors: Sequence[Tensor]) -> Results:
        """Run the kernel; returns the results of its region."""
        device = self._device
        if self._overwrites is None:
            made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._made]
        else:
            made = [tensors[self._overwrites]]
        if self._parts:
            written = list(made)
            places: list[Place] = []
            for number, parts in zip(self._partial, self._parts, strict=True):
                written[number] = torch.empty(parts.shape, dtype=parts.dtype, device=device)
                places.append((written[number], made[number]))
            self._start(*tensors, *written)
            self._queue.add(self._parts, places)
        elif self._joins_others:
            self._start_and_join([*tensors, *made])
        else:
            self._start(*tensors, *made)
        return tuple(
            [
                output.of(tensors[output.given] if output.stored is None else made[output.stored])
                for output in self._outputs
            ]
        )

    def _start_and_join(self, pointers: Sequence[Tensor]) -> None:
        """Start the kernel, with extra programs that join the queued partial results."""
        results, places = self._queue.take()
        if not results:
            self._start(*pointers)
            return
        key = tuple(results)
        start = self._joining.get(key)
        if start is None:
            both, count = with_joining(self._kernel, self._config, self._grid[0], results)
            start = self._joining[key] = starter(both, both.configs[0], (count,))
        start(*pointers, *_pointers_of(places))


class JoinedSum:
    """A sum of a few rows, which needs no kernel of its own: the rows wait in the queue to be
    joined."""

    def __init__(self, region: Region, device: torch.device, queue: PartsQueue) -> None:
        self._shape, self._device = shape_of(region.stored[0]), device
        self._rows, self._parts = sum_in_memory(region)
        self._queue = queue
        self._outputs = region.outputs

    def __call__(self, tensors: Sequence[Tensor]) -> Results:
        made = torch.empty(self._shape, dtype=self._parts.target, device=self._device)
        self._queue.add([self._parts], [(tensors[self._rows], made)])
        return tuple([output.of(made) for output in self._outputs])


def join_parts(results: Sequence[PartialResult], places: Sequence[Place]) -> None:
    """Start the kernel that joins partial results. places: the tensors of each result."""
    _joiner(tuple(results))(*_pointers_of(places))


def _pointers_of(places: Sequence[Place]) -> list[Tensor]:
    return [*(parts for parts, _ in places), *(made for _, made in places)]


@cache
def _joiner(results: tuple[PartialResult, ...]) -> Start:
    source = finishing_kernel(results)
    return starter(source, source.configs[0], finishing_grid(results))


def launch_options(kernel: KernelSource, config: Config) -> dict[str, int | bool]:
    """Return Triton's compiler options for a kernel, with assertions enabled if it has any."""
    options: dict[str, int | bool] = {
        k: config[k] for k in ("num_warps", "num_stages") if k in config
    }
    options["enable_fp_fusion"] = True  # its default, which Triton 3.10 is to change
    return options | ({"debug": True, "sanitize_overflow": False} if kernel.asserts else {})


def grid_of(kernel: Kernel, config: Config) -> tuple[int, ...]:
    """Return the number of programs along each dim of the grid."""
    space = kernel.region.space
    if kernel.family == "pointwise":
        return (_blocks(space.columns, config["BLOCK"]),)
    if kernel.family == "lookups":
        return (num_programs(kernel, config),)
    if kernel.family == "matmul":
        return (_blocks(space.rows, config["BLOCK_M"]) * _blocks(space.columns, config["BLOCK_N"]),)
    if not space.reduces_columns:
        beside = _blocks(space.aside, kernel.fixed["BLOCK_A"]) if space.aside else 0
        return (max(_blocks(space.rows, config["BLOCK_R"]), beside),)
    parts = num_partial(space, config)
    # Not in two dims, of which the second ends at 65,535.
    blocks = 1 if space.reduces_rows else num_column_blocks(space, config["BLOCK_C"])
    return (parts * blocks,)


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def run_on_aten(
    op: FusedOp, tensors: Sequence[Tensor], device: torch.device | None = None
) -> Results:
    """Run a region's ops one by one; returns its results. device: used if there are no inputs."""
    values: dict[SSAValue, Tensor] = dict(zip(op.block.args, tensors, strict=True))
    device = device or (tensors[0].device if tensors else torch.device("cpu"))
    for inner in op.fused_ops:
        values.update(
            zip(inner.results, prepared(inner, values.__getitem__, device)(), strict=True)
        )
    return tuple(values[value] for value in op.yielded)
