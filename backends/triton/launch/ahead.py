"""Compiling generated kernels ahead of time, without the device they are for."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardweave.backends.triton.installed import has_triton
from shardweave.backends.triton.launch.launch import launch_options, load_function
from shardweave.backends.triton.source.source import Config, KernelSource
from shardweave.backends.triton.source.writer import AT_AN_EDGE


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one SM (CUDA C++ programming guide, compute capabilities). reserved_bytes: shared
    memory of each block that CUDA reserves."""

    warps: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int = 1 << 10
    registers: int = 65536


MULTIPROCESSORS = {
    "sm_75": Multiprocessor(32, 16, 64 << 10, reserved_bytes=0),
    "sm_80": Multiprocessor(64, 32, 164 << 10),
    "sm_86": Multiprocessor(48, 16, 100 << 10),
    "sm_89": Multiprocessor(48, 24, 100 << 10),
    "sm_90": Multiprocessor(64, 32, 228 << 10),
    "sm_100": Multiprocessor(64, 32, 228 << 10),
}

_REGISTER_UNIT = 256
"""Granularity in which registers are allocated to a warp."""

VECTOR_BITS = 128
"""Bits of a thread's widest access on all these chips."""

_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)\b")
_STORE = re.compile(r"\bst\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)\b")

_PLACE = re.compile(r"\.loc\s+1\s+(\d+)")
"""A mark in PTX with the source line of the instructions after it."""

_ASSEMBLY = re.compile(r"// (begin|end) inline asm")
"""Marks around inline assembly of one source line. Triton 3.8 counts its own lines up from it."""

_ADDRESS = re.compile(r"tl\.(?:load|store)\(([^,]*)")
_FAST = re.compile(r"\(?(?:x|i|col|k_a|k_b|place)(?: % \d+)?\)?\)?")
"""A term of an address that grows by one from element to element."""


def resident_warps(target: str, *, num_warps: int, registers: int, shared_bytes: int) -> int:
    """Number of a kernel's warps that one SM holds at once; 0 if not even one program instance
    fits. registers: per thread. num_warps, shared_bytes: per program instance."""
    limits = MULTIPROCESSORS[target]
    per_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    programs = min(limits.blocks, limits.warps // num_warps)
    programs = min(programs, limits.registers // max(1, per_warp) // num_warps)
    if shared_bytes:
        programs = min(programs, limits.shared_bytes // (shared_bytes + limits.reserved_bytes))
    return programs * num_warps


def loaded_bytes(ptx: str) -> int:
    """Bytes that the loads of a thread request, with the body of each loop counted once."""
    return sum(_width(match) for match in _LOAD.finditer(ptx)) // 8


def narrow_statements(ptx: str, source: str) -> dict[str, int]:
    """Find loads and stores along the contiguous dim with accesses of less than 128 bits.

    Returns the bits of the narrowest access, by statement. Leaves out statements with less than 128
    bits for each thread (one sum per column), gathers, and statements for edges of rows.
    """
    accesses: dict[int, list[int]] = {}
    line, is_assembly = 0, False
    for text in ptx.splitlines():
        mark, place = _ASSEMBLY.search(text), _PLACE.search(text)
        if mark is not None:
            is_assembly = mark[1] == "begin"
        if place is not None and not is_assembly:
            line = int(place[1])
        match = _LOAD.search(text) or _STORE.search(text)
        if match is not None:
            accesses.setdefault(line, []).append(_width(match))
    statements = source.splitlines()
    return {
        statements[line - 1].strip(): min(bits)
        for line, bits in accesses.items()
        if min(bits) < VECTOR_BITS <= sum(bits) and _is_contiguous(statements[line - 1])
    }


def _is_contiguous(statement: str) -> bool:
    """True if a statement accesses adjacent elements of memory, and is not only for an edge."""
    match = None if AT_AN_EDGE in statement else _ADDRESS.search(statement)
    return match is not None and any(_FAST.fullmatch(part) for part in match[1].split(" + ")[1:])


def _width(match: re.Match[str]) -> int:
    return int(match[1] or 1) * int(match[2])


if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

SHARED_LIMIT_BYTES = {
    **{name: sm.shared_bytes - sm.reserved_bytes for name, sm in MULTIPROCESSORS.items()},
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
}
"""Limit on the shared memory of a program (LDS on AMD)."""

ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Built:
    """One kernel compiled for one target.

    files: compiler outputs by extension (ptx, cubin, hsaco, ..). registers: per thread; on AMD
    vector registers. spilled_bytes: per thread, stored to memory for lack of registers.
    """

    kernel: KernelSource
    target: str
    config: Config
    files: dict[str, bytes]
    registers: int
    shared_bytes: int
    spilled_bytes: int

    @property
    def problem(self) -> str | None:
        """Reason why the kernel cannot run, or spills, on its target; None if there is none."""
        limit = SHARED_LIMIT_BYTES[self.target]
        if self.shared_bytes > limit:
            return f"needs {self.shared_bytes} bytes of shared memory, {self.target} has {limit}"
        return f"spills {self.spilled_bytes} bytes a thread" if self.spilled_bytes else None

    @property
    def occupancy(self) -> float | None:
        """Fraction of an SM's warps that registers and shared memory allow; None on AMD."""
        warps = self._warps
        return None if warps is None else warps / MULTIPROCESSORS[self.target].warps

    @property
    def bytes_in_flight(self) -> int | None:
        """Upper bound on the bytes that an SM's threads request at once; None on AMD."""
        warps = self._warps
        return None if warps is None else 32 * warps * loaded_bytes(self.files["ptx"].decode())

    @property
    def narrow(self) -> dict[str, int]:
        """Contiguous statements with accesses under 128 bits (`narrow_statements`); {} on AMD."""
        ptx = self.files.get("ptx")
        return {} if ptx is None else narrow_statements(ptx.decode(), self.kernel.source)

    @property
    def access_bits(self) -> int | None:
        """Bits of the narrowest access along the contiguous dim, up to 128; None on AMD."""
        return min(self.narrow.values(), default=VECTOR_BITS) if "ptx" in self.files else None

    @property
    def _warps(self) -> int | None:
        if not self.target.startswith("sm_"):
            return None
        return resident_warps(
            self.target,
            num_warps=self.config.get("num_warps", 4),
            registers=self.registers,
            shared_bytes=self.shared_bytes,
        )


def parse_target(text: str) -> GPUTarget:
    """Return Triton's target for `sm_90`, `gfx942`, .. ValueError if unknown or without Triton."""
    if text not in SHARED_LIMIT_BYTES:
        raise ValueError(
            f"target '{text}' is unknown; use some of {', '.join(SHARED_LIMIT_BYTES)}."
        )
    if not has_triton():
        raise ValueError(
            f"compiling kernels for '{text}' needs Triton, which is not installed; compile on "
            "Linux, or write only the kernels' sources (--target '')."
        )
    from triton.backends.compiler import GPUTarget

    if text.startswith("sm_"):
        return GPUTarget("cuda", int(text.removeprefix("sm_")), 32)
    return GPUTarget("hip", text, 64)


def build(kernel: KernelSource, target: str, config: Config | None = None) -> Built:
    """Compile a kernel for a target.

    config: None chooses the first of its configurations without a problem on the target, or the
    first if all have one. Pointers are assumed to be aligned to 16 bytes.
    """
    if config is not None:
        return _build(kernel, target, config)
    first = _build(kernel, target, kernel.configs[0])
    if first.problem is None:
        return first
    others = (_build(kernel, target, other) for other in kernel.configs[1:])
    return next((other for other in others if other.problem is None), first)


def _build(kernel: KernelSource, target: str, config: Config) -> Built:
    import triton
    from triton.compiler import ASTSource

    goal = parse_target(target)
    # Pipelines no deeper than the target's memory for them.
    is_shallow = goal.backend == "hip" and config.get("num_stages", 0) > 2
    chosen = {**config, "num_stages": 2} if is_shallow else config
    function = load_function(kernel.source, kernel.name, kernel.key)
    names: Sequence[str] = function.arg_names
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    values = kernel.fixed | chosen
    for position, name in enumerate(names):
        if position < len(kernel.pointers):
            signature[name] = kernel.pointers[position]
            attributes[position,] = ALIGNED
        elif name in kernel.sizes:
            signature[name] = "i32"
            if kernel.sizes[name] % 16 == 0:
                attributes[position,] = ALIGNED
        else:
            signature[name] = "constexpr"
    constants = {(names.index(name),): values[name] for name in kernel.constants}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = launch_options(kernel, chosen)
    made: Any = triton.compile(source, target=goal, options=options)
    files = {
        kind: text.encode() if isinstance(text, str) else text
        for kind, text in made.asm.items()
        if kind in ("ttir", "ptx", "cubin", "amdgcn", "hsaco")
    }
    shared = int(made.metadata.shared)
    if goal.backend == "cuda":
        registers, on_stack = _resources_of_cubin(files["cubin"])
        # A stack may also hold an array, such as that of a sine's argument reduction.
        spilled = _spilled_by_ptxas(files["ptx"], target) if on_stack else 0
    else:
        registers, spilled = _resources_of_amdgcn(files["amdgcn"].decode())
    return Built(kernel, target, chosen, files, registers, shared, spilled)


def _tools() -> Path:
    """Return the folder of the NVIDIA tools that Triton includes."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _resources_of_cubin(cubin: bytes) -> tuple[int, int]:
    """Return a thread's registers and bytes of stack and local memory, read by cuobjdump."""
    tool = _tools() / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
    if "REG" not in usage:
        raise ValueError(f"cuobjdump reported no register count: {said.strip()}")
    return int(usage["REG"]), int(usage.get("STACK", 0)) + int(usage.get("LOCAL", 0))


def _spilled_by_ptxas(ptx: bytes, target: str) -> int:
    """Return the bytes that each thread spills, as the ptxas that Triton uses for it reports."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(int(target.removeprefix("sm_"))).path
    suffix = "a" if target in ("sm_90", "sm_100") else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_bytes(ptx)
        command = [tool, "-v", f"--gpu-name={target}{suffix}", str(path), "-o", f"{path}.o"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))


def _resources_of_amdgcn(text: str) -> tuple[int, int]:
    """Return a thread's vector registers and bytes of scratch memory, from the AMD assembly."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    scratch = re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)
    if registers is None or scratch is None:
        raise ValueError("the AMD compiler's assembly has no register count.")
    return int(registers[1]), int(scratch[1])
