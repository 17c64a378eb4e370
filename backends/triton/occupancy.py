"""How full a kernel keeps a chip, estimated from what it was compiled to."""

from __future__ import annotations

import re
from dataclasses import dataclass


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

_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)\b")
_STORE = re.compile(r"\bst\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)\b")


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
    """The part of an SM's warps that is resident."""
    return warps / MULTIPROCESSORS[target].warps


def loaded_bytes(ptx: str) -> int:
    """Bytes that a thread asks memory for in one pass over the text: a loop's body once."""
    return sum(_width(match) for match in _LOAD.finditer(ptx)) // 8


def widest_access_bits(ptx: str) -> int:
    """Bits of the widest load or store of a thread; 0 if there is none."""
    matches = [*_LOAD.finditer(ptx), *_STORE.finditer(ptx)]
    return max(map(_width, matches), default=0)


def _width(match: re.Match[str]) -> int:
    return int(match[1] or 1) * int(match[2])
