"""Occupancy by the limits of the CUDA C++ programming guide, and what PTX loads and stores."""

from __future__ import annotations

import pytest

from shardweave.backends.triton.launch.ahead import (
    loaded_bytes,
    narrow_statements,
    resident_warps,
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


def test_narrow_accesses_are_those_along_the_contiguous_dim() -> None:
    source = """\
    a = tl.load(a_ptr + row * n_cols + col, mask=in_col)
    b = tl.load(b_ptr + (x % 48), mask=in_x)
    c = tl.load(c_ptr + (x // 48), mask=in_x)
    d = tl.load(d_ptr + col * n_cols + row)
    tl.store(e_ptr + part * n_cols + col, e)
    """
    narrow = "ld.global.b16 { %rs1 }, [ %rd1 + 0 ];\n"
    wide = "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];\n"
    last = "st.global.b32 [ %rd4 + 0 ], { %r5 };\n"
    groups = (narrow * 8, wide * 2, narrow * 8, narrow * 8, last)
    ptx = "".join(f".loc 1 {line} 7\n{text}" for line, text in enumerate(groups, 1))
    assert narrow_statements(ptx, source) == {
        "a = tl.load(a_ptr + row * n_cols + col, mask=in_col)": 16
    }
    # Triton 3.8 gives each line of inline assembly a place of its own.
    counted = f"// begin inline asm\n.loc 1 5 7\n{wide}// end inline asm\n"
    assert narrow_statements(ptx.replace(wide, counted), source) == narrow_statements(ptx, source)
    other = ptx.replace(wide * 2, narrow + wide)
    assert list(narrow_statements(other, source).values()) == [16, 16]
