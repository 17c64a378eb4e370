# pyright: basic
"""The kernels that Inductor's Triton scheduling makes of a program, counted without a GPU.

The driver is mocked: torch is told of one H100, so that Inductor lowers, fuses and writes Triton as
it would there; nothing is compiled or run. It leans on private names of torch, tried with 2.13.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardweave.backends.emit.calls import prepared
from shardweave.benchmarks.kernel_counts import Counts, passes_over
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import AllReduceOp, ShardIndexOp, SliceOp, WaitOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.fusible import role_of
from shardweave.ir.program.program import Program

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    warp_size=32,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
"""What `torch.cuda.get_device_properties` says of it."""


class CountedError(Exception):
    """Ends a compilation of Inductor's once its kernels are written."""


@contextmanager
def mocked_driver() -> Iterator[None]:
    """torch takes one H100 to be there. Its caches are left filled: use a process of its own."""
    from torch._dynamo.device_interface import CudaInterface
    from torch.utils._triton import has_triton

    said: dict[str, Any] = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_tf32_supported": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: H100,
        "get_device_capability": lambda *_: (H100.major, H100.minor),
        "get_device_name": lambda *_: H100.name,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "exchange_device": lambda *_: 0,
        "maybe_exchange_device": lambda *_: 0,
        "get_raw_stream": lambda *_: 0,
    }
    with ExitStack() as stack:
        # These, unlike the functions, ask for a device guard that a CPU's torch lacks.
        inverted = lambda t: torch.bitwise_not(t)  # noqa: E731 - a builtin would not be bound
        stack.enter_context(mock.patch.object(torch.Tensor, "__invert__", inverted))
        stack.enter_context(mock.patch.object(torch.Tensor, "copy_", _copied))
        for name, answer in said.items():
            if hasattr(torch.cuda, name):
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            if name in vars(CudaInterface):
                stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        worker = CudaInterface.Worker
        properties = staticmethod(lambda *_: H100)
        stack.enter_context(mock.patch.object(worker, "get_device_properties", properties))
        stack.enter_context(mock.patch.object(worker, "current_device", staticmethod(lambda: 0)))
        has_triton.cache_clear()
        hashed = "torch.utils._triton.triton_hash_with_backend"
        stack.enter_context(mock.patch(hashed, return_value="no driver"))
        yield


_COPY = torch.Tensor.copy_


def _copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`Tensor.copy_`; between tensors without values what it checks of their shapes."""
    if self.device.type != "cuda":
        return _COPY(self, source, non_blocking)
    source.expand(self.shape)
    return self


class _OnCpu(TorchDispatchMode):
    """Constants that Inductor computes while it compiles are computed on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "device" in given:
            given["device"] = torch.device("cpu")
        return func(*args, **given)


def inductor_counts(program: Program) -> Counts:
    """Launches and bytes of a local program's step as Inductor's Triton scheduling fuses it.

    Collectives and what waits for them are not counted.
    """
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.graph import GraphLowering
    from torch.fx.experimental.proxy_tensor import make_fx

    if any(isinstance(op, AllReduceOp) for op in program.ops):
        _two_ranks()
    sources: dict[str, Any] = {}
    found: list[Counts] = []
    define, deduce = TritonScheduling.define_kernel, UniformValueConstantFolder._deduce_value

    def defined(self: Any, source: str, schedule: Any, kernel: Any) -> Any:
        for node in schedule:
            if hasattr(node, "get_name"):
                sources[node.get_name()] = (source, kernel)
        return define(self, source, schedule, kernel)

    def deduced(self: Any, node: Any) -> Any:
        with _OnCpu():
            return deduce(self, node)

    def compile_to_module(graph: Any) -> Any:
        text = graph.codegen()[0].value
        counts = _counts_of(graph, sources)
        _add_joined(counts, text)
        found.append(counts)
        raise CountedError

    fake = FakeTensorMode(allow_non_fake_inputs=True)  # sees that there is no device
    with fake, mocked_driver(), torch.no_grad():
        inputs = [
            torch.empty(shape_of(slot.value), dtype=dtype_of_value(slot.value), device="cuda")
            for slot in program.arguments
        ]
        graph = make_fx(_function_of(program))(*inputs)
        with (
            mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
            mock.patch.object(TritonScheduling, "define_kernel", defined),
            # Patterns of attention and of padded products are looked for on the device.
            mock.patch("torch._inductor.fx_passes.joint_graph.lazy_init"),
            mock.patch.object(UniformValueConstantFolder, "_deduce_value", deduced),
            config.patch(force_disable_caches=True, compile_threads=1),
        ):
            try:
                compile_fx(graph, inputs)
            except Exception:  # Inductor wraps CountedError in one of its own
                if not found:
                    raise
    (counts,) = found
    return counts


def _two_ranks() -> None:
    """A process group of two in which nothing is sent, for the functional collectives to name."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())


def _function_of(program: Program) -> Any:
    """The program as a function of tensors, for tracing."""
    device = torch.device("cuda", 0)

    def step(*tensors: Tensor) -> list[Tensor]:
        values = dict(zip((slot.value for slot in program.arguments), tensors, strict=True))
        for op in program.ops:
            if op.name == "aten.scatter_add" and role_of(op) is not None:
                results = [_scattered(*[values[v] for v in op.operands])]
            elif isinstance(op, AtenOp):
                results = prepared(op, values.__getitem__, device)()
            else:
                results = _communicated(op, [values[v] for v in op.operands])
            values.update(zip(op.results, results, strict=True))
        return [values[slot.value] for slot in program.results]

    return step


def _scattered(into: Tensor, places: Tensor, source: Tensor) -> Tensor:
    """A `scatter_add` of one element a row, as Inductor writes that of a loss: pointwise."""
    columns = torch.arange(into.shape[-1], device=into.device)
    return into + torch.where(columns == places, source, 0)


def _communicated(op: Any, tensors: list[Tensor]) -> list[Tensor]:
    """A collective as the functional one of two ranks."""
    functional = torch.ops._c10d_functional
    if isinstance(op, AllReduceOp):
        world: Any = torch.distributed.group.WORLD
        group = world.group_name
        return [
            functional.wait_tensor(functional.all_reduce(t, op.reduction, group)) for t in tensors
        ]
    if isinstance(op, SliceOp):
        (shape,) = (shape_of(r) for r in op.results)
        return [tensors[0].narrow(op.dim, 0, shape[op.dim])]
    if isinstance(op, ShardIndexOp):
        return [torch.zeros((), dtype=torch.int64, device="cuda")]
    if isinstance(op, WaitOp):
        return tensors
    raise ValueError(f"no form for Inductor: {op.name}")


def _counts_of(graph: Any, sources: dict[str, Any]) -> Counts:
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    counts = Counts()
    for node in graph.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode):
            continue
        is_extern = isinstance(node, ExternKernelSchedulerNode)
        if is_extern and isinstance(
            node.node, (ir._CollectiveKernel, ir._WaitKernel, ir.MultiOutput)
        ):
            continue
        reads = node.get_read_write_buffer_accesses(include_reads=True, include_writes=False)
        writes = node.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
        if is_extern:
            moved = sum(reads.values()) + sum(writes.values())
            counts.add("library", str(getattr(node.node, "python_kernel_name", None)), moved)
            continue
        for sizes in (reads, writes):
            sizes.update({name: _taken(graph, node, name, size) for name, size in sizes.items()})
        names = [n.get_name() for n in node.get_nodes()]
        if graph.scheduler.removed_ops.intersection(names):
            continue  # what joins parts is written into the wrapper: `_add_joined`
        source, kernel = next(sources[n] for n in names if n in sources)
        pointers = {**kernel.args.input_buffers, **kernel.args.output_buffers}
        moved = sum(writes.values())
        for name, size in reads.items():
            pointer = pointers.get(name)
            moved += size * (passes_over(source, pointer) if isinstance(pointer, str) else 1)
        counts.add("kernel", "triton", moved)
    return counts


def _taken(graph: Any, node: Any, name: str, size: int) -> int:
    """Bytes of a buffer that a kernel touches: of one found by indices alone, no more than it has
    elements to compute, where Inductor counts all of the buffer."""
    from torch._inductor.dependencies import MemoryDep

    most = 0
    for one in node.get_nodes():
        rules = one.read_writes
        deps = [dep for dep in (*rules.reads, *rules.writes) if dep.name == name]
        if any(isinstance(dep, MemoryDep) and not dep.is_indirect() for dep in deps):
            return size
        if any(isinstance(dep, MemoryDep) for dep in deps):
            most = max(most, math.prod(int(n) for group in one.get_ranges() for n in group))
    itemsize = graph.get_dtype(name).itemsize
    return min(size, most * itemsize) if most else size


def _add_joined(counts: Counts, text: str) -> None:
    """What joins parts that kernels of rows and columns leave: torch's ops in the wrapper."""
    pattern = r"\.view\((\d+), (\d+)\)\.(?:sum|amax|amin)\(dim=0\)(.*)"
    for parts, columns, rest in re.findall(pattern, text):
        size = 4 * int(columns)
        counts.add("kernel", "join", (int(parts) + 1) * size)
        if ".to(" in rest:
            counts.add("kernel", "cast", size + size // 2)
