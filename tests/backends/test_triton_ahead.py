"""Generated kernels compile for chips that are not here."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.launch import tune
from shardweave.backends.triton.launch.ahead import SHARED_LIMIT_BYTES, build, parse_target
from shardweave.backends.triton.launch.launch import grid_of
from shardweave.backends.triton.source.joining import (
    finishing_grid,
    finishing_kernel,
    partial_results_of,
    with_joining,
)
from shardweave.backends.triton.source.source import KernelSource
from shardweave.driver.kernel_files import distinct_kernels
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.kernel import FusedOp, fuse
from shardweave.passes.pipeline import run_passes
from shardweave.tests.backends.kernel_cases import (
    COLUMNS,
    MATMUL,
    POINTWISE,
    ROWS,
    ROWS_AND_COLUMNS,
    region,
)
from shardweave.tests.ir_text import step
from shardweave.tests.marks import slow

TARGETS = ("sm_80", "sm_90", "gfx942")

ONE_OF_EACH = {
    "pointwise": POINTWISE["bias, gelu and residual"],
    "rows": ROWS["residual and layer norm"],
    "rows and columns": ROWS_AND_COLUMNS["gradient of layer norm, and of the residual's bias"],
    "columns": COLUMNS["gradient of a bias"],
    "matmul": MATMUL["bias and gelu after"],
}

TIED = """
    input %g : tensor<8x1024x1024xbf16>
    input %p : tensor<8x1024xi64>
    input %x : tensor<50304x8xbf16>
    input %y : tensor<8x1024xbf16>
    %t = aten.mm(%x, %y) : tensor<50304x1024xbf16>
    %d = aten.embedding_dense_backward(%g, %p, padding_idx = -1, scale_grad_by_freq = false) : tensor<50304x1024xbf16>
    %a = aten.add.Tensor(%t, %d) : tensor<50304x1024xbf16>
    output %a
"""

MODELS = {
    "gpt": "gpt:layers=1,hidden=768,heads=12,vocab=50304,seq=256,batch=2",
    "llama": (
        "hf:llama:num_hidden_layers=1,hidden_size=1024,num_attention_heads=16,"
        "num_key_value_heads=4,intermediate_size=2816,vocab_size=32000,batch=2,seq=256"
    ),
    "bert": (
        "hf:bert:num_hidden_layers=1,hidden_size=768,num_attention_heads=12,"
        "intermediate_size=3072,vocab_size=30522,max_position_embeddings=128,batch=2,seq=128"
    ),
    "vit": (
        "hf:vit:num_hidden_layers=1,hidden_size=768,num_attention_heads=12,"
        "intermediate_size=3072,image_size=64,patch_size=16,num_labels=1000,batch=2"
    ),
    "unet": "unet:channels=64,size=16,batch=2,levels=2,groups=8,heads=4",
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tune.VARIABLE, str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def assert_builds(kernel: KernelSource, target: str) -> None:
    built = build(kernel, target)
    assert built.problem is None, f"{kernel.name}: {built.problem}"
    assert built.registers > 0
    binary = "cubin" if target.startswith("sm_") else "hsaco"
    assert len(built.files[binary]) > 0


@pytest.mark.parametrize(
    ("family", "target"),
    [
        (family, target) if target == "sm_90" or family == "pointwise" else slow(family, target)
        for family, target in product(ONE_OF_EACH, TARGETS)
    ],
)
def test_each_family_compiles_without_spills(family: str, target: str) -> None:
    assert_builds(generate(region(ONE_OF_EACH[family], 512, 256, 128, torch.float16)), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sums_over_wide_rows_fit_the_registers(dtype: torch.dtype) -> None:
    text = ROWS_AND_COLUMNS["gradient of layer norm, and of the residual's bias"]
    kernel = generate(region(text, 8192, 16384, 1, dtype))
    built = build(kernel, "sm_90", kernel.configs[0])
    assert built.problem is None
    assert built.access_bits == 128


def test_rows_that_begin_anywhere_are_read_and_written_in_vectors() -> None:
    text = ROWS["cross-entropy"]
    kernel = generate(region(text, 8192, 50257, 1, torch.bfloat16))
    built = build(kernel, "sm_90")
    assert built.narrow == {}
    ptx = built.files["ptx"].decode()
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


def test_sums_over_rows_that_begin_anywhere_read_and_write_in_vectors() -> None:
    """Each program takes rows that begin at the same place of 16 bytes; parts are padded to it."""
    kernel = generate(region(COLUMNS["gradient of a bias"], 8192, 50257, 1, torch.bfloat16))
    built = build(kernel, "sm_90")
    assert built.problem is None
    assert built.narrow == {}
    ptx = built.files["ptx"].decode()
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    joining = finishing_kernel(partial_results_of(kernel, built.config))
    assert build(joining, "sm_90").narrow == {}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_gradient_of_a_tied_lookup_compiles_without_spills_in_vectors(target: str) -> None:
    program = run_passes(step(TIED), "fuse-kernels{matmul=false}")
    (op,) = (op for op in program.ops if isinstance(op, FusedOp))
    kernel = generate(op)
    assert kernel.overwrites is not None
    built = build(kernel, target)
    assert built.problem is None
    assert built.narrow == {}


def test_lookup_that_joins_parts_beside_compiles_without_spills_in_vectors() -> None:
    program = run_passes(
        step(TIED.replace("output %a", "output %d")), "dce,fuse-kernels{matmul=false}"
    )
    (op,) = (op for op in program.ops if isinstance(op, FusedOp))
    kernel = generate(op)
    assert kernel.overwrites is None
    norm = generate(region(COLUMNS["gradient of a bias"], 8192, 1001, 1, torch.bfloat16))
    results = partial_results_of(norm, norm.configs[0])
    config = kernel.configs[0]
    both, count = with_joining(kernel, config, grid_of(kernel, config)[0], results)
    assert count == both.sizes["num_before"] + finishing_grid(results)[0]
    built = build(both, "sm_90")
    assert built.problem is None
    assert built.narrow == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_every_kernel_of_a_step_compiles_without_spills(model: str, dtype: torch.dtype) -> None:
    example = build_example(model, dtype=dtype)
    program = run_passes(capture(example.module, kwargs=example.kwargs), "cse,dce,fuse-kernels")
    kernels, _, unfit = distinct_kernels(program)
    assert unfit == []
    assert kernels
    for kernel in kernels.values():
        for target in TARGETS:
            assert_builds(kernel, target)


def test_extremes_keep_nan_in_machine_code() -> None:
    """PTX's max and min pass over NaN unless told not to, which the interpreter hides."""
    program = step("""
        input %x : tensor<64x32xf32>
        input %y : tensor<64x32xf32>
        %a = aten.maximum(%x, %y) : tensor<64x32xf32>
        %b = aten.minimum(%a, %y) : tensor<64x32xf32>
        %c = aten.neg(%b) : tensor<64x32xf32>
        output %c
    """)
    ops = list(program.ops)
    kernel = generate(fuse(ops, program.return_op, [0, 1, 2]))
    ptx = build(kernel, "sm_90").files["ptx"].decode()
    assert "max.NaN.f32" in ptx
    assert "min.NaN.f32" in ptx
    assert not re.search(r"\b(max|min)\.f32", ptx)
    assert not re.search(r"\bsub(\.rn)?\.f32", ptx)  # 0 - x makes 0 of 0


def test_kernel_with_lookups_traps_in_machine_code() -> None:
    kernel = generate(region(ROWS["cross-entropy"], 64, 32, 1, torch.float32))
    assert "assertfail" in build(kernel, "sm_90").files["ptx"].decode()


def test_too_much_shared_memory_is_said() -> None:
    kernel = generate(region(MATMUL["bias and gelu after"], 512, 512, 512, torch.float16))
    wide = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8}
    built = build(kernel, "sm_89", {**wide, "num_stages": 4})
    assert built.shared_bytes > SHARED_LIMIT_BYTES["sm_89"]
    assert built.problem is not None
    assert "bytes of shared memory, sm_89 has" in built.problem


def test_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target 'sm_1' is unknown; use some of sm_75"):
        parse_target("sm_1")


def test_targets_name_the_maker_the_chip_and_the_threads_that_run_together() -> None:
    from triton.backends.compiler import GPUTarget

    assert parse_target("sm_90") == GPUTarget("cuda", 90, 32)
    assert parse_target("gfx942") == GPUTarget("hip", "gfx942", 64)
