"""The kernels of a program as files: their sources, and what they compile to for named targets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console

from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.launch.ahead import Built, build, parse_target
from shardweave.backends.triton.launch.launch import grid_of
from shardweave.backends.triton.source.joining import finishing_kernel, with_joining
from shardweave.backends.triton.source.parts import Joining, is_sum_in_memory, joined_together
from shardweave.backends.triton.source.source import Kernel, KernelSource
from shardweave.backends.triton.source.writer import UnfitError
from shardweave.driver.report.text import plain_table, status
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts, parts_of
from shardweave.ir.verify.program import check
from shardweave.passes.kernels.unfuse_kernels import has_regions
from shardweave.passes.notes import unheard
from shardweave.passes.pipeline import run_passes


def parse_targets(text: str) -> list[str]:
    """Parse `sm_80,gfx942` to a list. Raises ValueError for an unknown chip."""
    targets = [word for word in text.split(",") if word]
    for target in targets:
        parse_target(target)
    return targets


def write_kernels(program: Program, targets: Sequence[str], folder: Path) -> bool:
    """Write and compile the kernels of a program, which is fused first if it has no regions; return
    whether all of them run on every target."""
    check(program)
    if not has_regions(program):
        with unheard():
            program = run_passes(program, "preset:kernels")
    kernels, uses, unfit = distinct_kernels(program)
    folder.mkdir(parents=True, exist_ok=True)
    for name, kernel in kernels.items():
        (folder / f"{name}.py").write_text(kernel.source)
    built: dict[str, list[Built]] = {}
    with status(f"compiling {len(kernels)} kernels for {', '.join(targets)}"):
        for name, kernel in kernels.items():
            built[name] = [_write(folder, name, build(kernel, target)) for target in targets]
    _print_table(built, uses)
    for reason in unfit:
        print(f"on ATen: {reason}")
    records = [_record(name, x) for name, group in built.items() for x in group]
    (folder / "kernels.json").write_text(json.dumps(records, indent=1) + "\n")
    regions = sum(count for name, count in uses.items() if isinstance(kernels[name], Kernel))
    print(f"wrote {len(kernels)} kernels of {regions} regions to {folder}")
    problems = [
        f"{name}: {x.problem} (--target {x.target})"
        for name, group in built.items()
        for x in group
        if x.problem is not None
    ]
    for problem in problems:
        print(f"problem: {problem}")
    return not problems


def distinct_kernels(program: Program) -> tuple[dict[str, KernelSource], dict[str, int], list[str]]:
    """Return a program's kernels by name, the number of regions that use each, and the reasons why
    other regions have none. Includes the kernels of all stages, and kernels that combine partial
    results of others."""
    generated: dict[FusedOp, Kernel] = {}
    unfit: list[str] = []
    for op in ops_of_parts(program):
        if not isinstance(op, FusedOp) or is_sum_in_memory(op):
            continue
        try:
            generated[op] = generate(op)
        except UnfitError as error:
            unfit.append(f"{', '.join(inner.name for inner in op.fused_ops)}: {error}")
    joining: list[KernelSource] = []
    launches = (joined_together(part, generated) for part in parts_of(program))
    for together in chain.from_iterable(launches):
        if together.beside is None:
            joining.append(finishing_kernel(together.results))
        else:
            generated[together.beside] = _joining_others(generated[together.beside], together)
    names: dict[tuple[object, ...], str] = {}
    kernels: dict[str, KernelSource] = {}
    uses: dict[str, int] = {}
    for kernel in (*generated.values(), *joining):
        key = (kernel.source, kernel.pointers, *kernel.fixed.values())
        if key not in names:
            names[key] = f"{len(names):02}_{kernel.name}"
            kernels[names[key]] = kernel
        uses[names[key]] = uses.get(names[key], 0) + 1
    return kernels, uses, unfit


def _joining_others(kernel: Kernel, together: Joining) -> Kernel:
    """Return a kernel in its default configuration, which also combines partial results."""
    config = kernel.configs[0]
    return with_joining(kernel, config, grid_of(kernel, config)[0], together.results)[0]


def _write(folder: Path, name: str, built: Built) -> Built:
    for kind, content in built.files.items():
        if kind != "ttir":
            (folder / f"{name}.{built.target}.{kind}").write_bytes(content)
    return built


def _record(name: str, built: Built) -> dict[str, object]:
    kept = ("target", "config", "registers", "shared_bytes", "spilled_bytes", "access_bits",
            "occupancy", "bytes_in_flight", "problem")  # fmt: skip
    values = {key: getattr(built, key) for key in kept}
    family = built.kernel.family if isinstance(built.kernel, Kernel) else "finish"
    return {"kernel": name, "family": family, **values}


def _print_table(built: dict[str, list[Built]], uses: dict[str, int]) -> None:
    heads = ["regions", "registers", "shared bytes", "spilled bytes", "access bits"]
    table = plain_table(["kernel", "target"], [*heads, "occupancy", "KiB in flight per SM"])
    for name, group in built.items():
        for kernel in group:
            numbers = (uses[name], kernel.registers, kernel.shared_bytes, kernel.spilled_bytes)
            bits, part, flight = kernel.access_bits, kernel.occupancy, kernel.bytes_in_flight
            table.add_row(
                name,
                kernel.target,
                *map(str, numbers),
                "-" if bits is None else str(bits),
                "-" if part is None else f"{part:.0%}",
                "-" if flight is None else f"{flight / 1024:.0f}",
            )
    Console(width=140).print(table)
