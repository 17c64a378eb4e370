"""Occupancy by the limits of the CUDA C++ programming guide, and what PTX loads and stores."""

from __future__ import annotations

import pytest

from shardweave.backends.triton.occupancy import (
    loaded_bytes,
    occupancy,
    resident_warps,
    widest_access_bits,
)


@pytest.mark.parametrize(
    ("target", "num_warps", "registers", "shared_bytes", "warps"),
    [
        ("sm_90", 4, 32, 0, 64),  # 16 programs of 4 warps: all warps
        ("sm_90", 4, 128, 0, 16),  # 65,536 registers / (128 x 32) for a warp
        ("sm_90", 4, 255, 0, 8),  # 255 are given as 256
        ("sm_80", 8, 32, 80 << 10, 16),  # two programs of 81 KiB in 164
        ("sm_80", 8, 32, 90 << 10, 8),
        ("sm_86", 16, 32, 0, 48),
        ("sm_80", 1, 16, 0, 32),  # no more than 32 programs
        ("sm_75", 4, 32, 65 << 10, 0),  # none fits
    ],
)
def test_registers_memory_and_programs_limit_the_warps(
    target: str, num_warps: int, registers: int, shared_bytes: int, warps: int
) -> None:
    found = resident_warps(
        target, num_warps=num_warps, registers=registers, shared_bytes=shared_bytes
    )
    assert found == warps


def test_occupancy_is_a_part_of_the_warps() -> None:
    assert occupancy("sm_90", 16) == 0.25
    assert occupancy("sm_86", 48) == 1


def test_widths_are_read_off_machine_code() -> None:
    ptx = """
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.L1::evict_last.v2.b32 { %r5, %r6 }, [ %rd2 + 0 ];
        ld.global.b16 { %rs1 }, [ %rd3 + 0 ];
        ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r9 ];
        ld.param.u64 %rd1, [x_param_0];
        st.global.v2.b64 [ %rd4 + 0 ], { %rd5, %rd6 };
    """
    assert loaded_bytes(ptx) == 16 + 8 + 2
    assert widest_access_bits(ptx) == 128
    assert widest_access_bits("ret;") == 0
