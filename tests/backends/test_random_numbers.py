"""`dist.random` as a Triton kernel: in Triton's interpreter, and compiled for chips elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from shardweave.backends.triton.kernels.philox import _numbers
from shardweave.backends.triton.launch.ahead import ALIGNED, parse_target
from shardweave.tests.backends.test_triton_interpreter import run_interpreted

INTERPRETED = """
import torch
from shardweave.backends.triton.kernels.philox import numbers
from shardweave.ir.library.philox import numbers_at, positions_of
state = torch.tensor([0x1234567890ABCDEF, 2**33 + 5])
for distribution, dtype in (
    ("uniform", torch.float32), ("uniform", torch.float64), ("uniform", torch.bfloat16),
    ("normal", torch.float32), ("normal", torch.float64), ("bits", torch.int64),
):
    first, second, last = positions_of((3, 5, 37), distribution, dtype)
    for positions in ([first + 2**40, second[::2], last[3:]], [last[1:30:3]], []):
        arguments = dict(draw=1, distribution=distribution, dtype=dtype)
        ours = numbers(state, positions, **arguments)
        expected = numbers_at(state, positions, **arguments)
        if distribution == "normal":
            torch.testing.assert_close(ours, expected)
        else:
            assert torch.equal(ours, expected), (distribution, dtype)
print("equal")
"""


def test_kernel_gives_the_same_bits_in_the_interpreter(tmp_path: Path) -> None:
    done = run_interpreted(["-c", INTERPRETED], tmp_path)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("distribution", "words", "dtype"),
    [("uniform", 1, "fp32"), ("normal", 2, "fp32"), ("normal", 4, "fp64"), ("bits", 2, "i64")],
)
def test_kernel_compiles_for_gpus(target: str, distribution: str, words: int, dtype: str) -> None:
    import triton
    from triton.compiler import ASTSource

    function: Any = _numbers
    constants = {"WORDS": words, "DISTRIBUTION": distribution, "DIGITS": 24, "BLOCK": 512}
    types = {"state": "*i64", "starts": "*i64", "last": "*i64", "out": f"*{dtype}"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(function.arg_names.index(name),): v for name, v in constants.items()},
        attrs={(index,): ALIGNED for index in range(len(types))},
    )
    options = {"enable_fp_fusion": True}
    built: Any = triton.compile(source, target=parse_target(target), options=options)
    assert "mul.hi.u32" in built.asm["ptx"] or "mul.wide.u32" in built.asm["ptx"]
