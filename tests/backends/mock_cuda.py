"""CUDA's dtype rules on the CPU: ops give and take the dtypes that they have on a GPU.

Inside `mock_cuda()` ATen's ops compute on CPU tensors, but results have the dtypes of CUDA's kernels
(`backends.triton.source.region`), operands of other dtypes are refused with CUDA's words, and generated kernels
store what a GPU's would. So a step that mixes both rules up fails here as it would there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardweave.backends.triton.launch import launch
from shardweave.backends.triton.source.region import HALVES
from shardweave.ir.ops.registry import spec_named

FLOAT32_OPERANDS = {"aten.native_layer_norm_backward": (3, 4)}
"""By op, the operands that CUDA's kernel reads as float32 when the first is a half: the statistics.
torch/csrc reads `mean.data_ptr<T_ACC>()`, which checks the dtype."""


class CudaTypes(TorchDispatchMode):
    """Gives the ops of the table and of records the dtypes of CUDA; they compute in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        kept = spec_named(name).float32_on_gpu
        if not kept and name not in FLOAT32_OPERANDS:
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        if dtype not in HALVES:
            return func(*args, **(kwargs or {}))
        for place in FLOAT32_OPERANDS.get(name, ()):
            if args[place].dtype != torch.float32:
                raise RuntimeError(
                    f"{name}: expected scalar type Float but found {args[place].dtype}"
                )
        results = func(*map(_wide, args), **(kwargs or {}))
        return tuple(
            r if r is None or index in kept else r.to(dtype) for index, r in enumerate(results)
        )


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


@contextmanager
def mock_cuda() -> Iterator[None]:
    with patch.object(launch, "has_gpu_types", lambda device: True), CudaTypes():
        yield
