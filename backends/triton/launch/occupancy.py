"""How full a kernel keeps a chip, estimated from what it was compiled to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardweave.backends.triton.source.writer import AT_AN_EDGE


@dataclass(frozen=True)
class Multiprocessor:
    """The limits of one SM (CUDA C++ programming guide, compute capabilities)."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 65536


MULTIPROCESSORS = {
    "sm_75": Multiprocessor(32, 16, 64 << 10),
    "sm_80": Multiprocessor(64, 32, 164 << 10),
    "sm_86": Multiprocessor(48, 16, 100 << 10),
    "sm_89": Multiprocessor(48, 24, 100 << 10),
    "sm_90": Multiprocessor(64, 32, 228 << 10),
    "sm_100": Multiprocessor(64, 32, 228 << 10),
}

_REGISTER_UNIT = 256
"""Registers are given to a warp in such units."""

_RESERVED_SHARED_BYTES = 1 << 10
"""Of each block, for the system, from sm_80 on."""

VECTOR_BITS = 128
"""The widest access of a thread that all these chips have."""

_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)\b")
_STORE = re.compile(r"\bst\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)\b")

_PLACE = re.compile(r"\.loc\s+1\s+(\d+)")
"""The line of the source that the instructions after it come from."""

_ASSEMBLY = re.compile(r"// (begin|end) inline asm")
"""Around instructions of one line of the source. Triton 3.8 counts their own lines up from it."""

_ADDRESS = re.compile(r"tl\.(?:load|store)\(([^,]*)")
_FAST = re.compile(r"\(?(?:x|i|col|k_a|k_b|place)(?: % \d+)?\)?\)?")
"""A part of an address that grows by one from element to element."""


def resident_warps(target: str, *, num_warps: int, registers: int, shared_bytes: int) -> int:
    """Warps of a kernel that one SM holds at once; 0 if not one program fits.

    registers: of a thread. shared_bytes: of a program, of `num_warps` warps.
    """
    limits = MULTIPROCESSORS[target]
    per_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    programs = min(limits.blocks, limits.warps // num_warps)
    programs = min(programs, limits.registers // max(1, per_warp) // num_warps)
    if shared_bytes:
        programs = min(programs, limits.shared_bytes // (shared_bytes + _RESERVED_SHARED_BYTES))
    return programs * num_warps


def occupancy(target: str, warps: int) -> float:
    return warps / MULTIPROCESSORS[target].warps


def loaded_bytes(ptx: str) -> int:
    """Bytes that a thread asks memory for in one pass over the text: a loop's body once."""
    return sum(_width(match) for match in _LOAD.finditer(ptx)) // 8


def narrow_statements(ptx: str, source: str) -> dict[str, int]:
    """The statements of a kernel that read or write along the contiguous dim in narrow accesses.

    Gives the bits of each one's narrowest access. A statement with less than 128 bits for each
    thread (a sum for each column) is not among them, nor one that gathers or is for an edge alone.
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
    """Whether neighbouring elements of a statement's block lie side by side in memory."""
    match = None if AT_AN_EDGE in statement else _ADDRESS.search(statement)
    return match is not None and any(_FAST.fullmatch(part) for part in match[1].split(" + ")[1:])


def _width(match: re.Match[str]) -> int:
    return int(match[1] or 1) * int(match[2])
