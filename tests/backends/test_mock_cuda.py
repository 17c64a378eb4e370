"""CUDA's dtype rules: the table agrees with torch's own account of them, and is complete."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.launch.launch import FusedCall
from shardweave.backends.triton.source.region import HALVES, dtype_on_gpu
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.kernel import FusedOp, fuse
from shardweave.ir.ops.fusible import role_of
from shardweave.ir.ops.registry import specs
from shardweave.tests.backends.kernel_cases import FAMILIES, KEPT, ROWS, region
from shardweave.tests.backends.mock_cuda import mock_cuda
from shardweave.tests.ir_text import step

BF16 = torch.bfloat16
TEXTS = [text for texts in FAMILIES.values() for text in texts.values()]


def types_on(device: str, op: AtenOp) -> list[torch.dtype]:
    """What torch infers for an op on fake tensors of a device, which need not be there."""
    from shardweave.ir.dialects.types import shape_of
    from shardweave.ir.ops.aten_args import arguments, overload_of

    with FakeTensorMode():
        args, kwargs = arguments(
            op, lambda v: torch.empty(shape_of(v), dtype=dtype_on_gpu(v), device=device)
        )
        if not op.operands:
            kwargs["device"] = device
        returned = overload_of(op)(*args, **kwargs)
    parts = returned if isinstance(returned, tuple | list) else (returned,)
    return [part.dtype for part in parts if part is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_dtypes_on_a_gpu_are_those_that_torch_infers(dtype: torch.dtype) -> None:
    seen: set[str] = set()
    for text in TEXTS:
        for op in region(text, 6, 4, 8, dtype).fused_ops:
            assert role_of(op) is not None or op.operands == ()
            found = [dtype_on_gpu(result) for result in op.results]
            if op.name != "aten.native_layer_norm_backward" or dtype not in HALVES:
                assert found == types_on("cuda", op), op.name
            seen.add(op.name)
    assert {spec.name for spec in specs() if spec.float32_on_gpu} <= seen


NORM_AND_GRADIENT = """
    input %x : tensor<4x8xbf16>
    input %w : tensor<8xbf16>
    input %g : tensor<4x8xbf16>
    %n, %mean, %rstd = aten.native_layer_norm(%x, %w, %w, eps = 1.0e-05) : tensor<4x8xbf16>, tensor<4x1xbf16>, tensor<4x1xbf16>
    %d, %dw, %db = aten.native_layer_norm_backward(%g, %x, %mean, %rstd, %w, %w, output_mask = [true, true, true]) : tensor<4x8xbf16>, tensor<8xbf16>, tensor<8xbf16>
    output %d
    grad w = %dw
    grad b = %db
    grad n = %n
"""


def two_regions() -> list[FusedOp]:
    program = step(NORM_AND_GRADIENT)
    KEPT.append(program)
    forward, backward = program.ops
    fuse([forward], backward, [0])
    fuse([backward], program.return_op, [1])
    return [op for op in program.ops if isinstance(op, FusedOp)]


def test_statistics_of_halves_go_between_regions_in_float32_on_a_gpu() -> None:
    forward, backward = two_regions()
    assert generate(forward).pointers[-3:] == ("*bf16", "*fp32", "*fp32")
    assert generate(backward).pointers.count("*fp32") == 4  # and two partial sums
    text = generate(forward).source
    assert text.count(".to(tl.bfloat16)") == 1


def test_gradient_of_a_norm_refuses_statistics_in_halves() -> None:
    _, backward = two_regions()
    x, w, s = torch.randn(4, 8).to(BF16), torch.ones(8).to(BF16), torch.ones(4, 1)
    with mock_cuda():
        call = FusedCall(backward)
        call(x, x, s, s, w)
        with pytest.raises(RuntimeError, match="expected scalar type Float but found"):
            call(x, x, s.to(BF16), s.to(BF16), w)


def test_mocked_norm_gives_statistics_in_float32() -> None:
    x, w = torch.randn(4, 8).to(BF16), torch.ones(8).to(BF16)
    with mock_cuda():
        found = torch.native_layer_norm(x, [8], w, w, 1e-5)
    assert [part.dtype for part in found] == [BF16, torch.float32, torch.float32]
    assert [part.dtype for part in torch.native_layer_norm(x, [8], w, w, 1e-5)] == [BF16] * 3
    assert "native_layer_norm" in ROWS["residual and layer norm"]
