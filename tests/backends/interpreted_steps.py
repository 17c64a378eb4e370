"""bfloat16 steps with CUDA's dtype rules in Triton's interpreter; run by test_triton_interpreter.py.

Matrix products stay on ATen, as they do by default on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.ops.registry import spec_of
from shardweave.passes.pipeline import run_passes
from shardweave.tests.backends import interpreter as _  # noqa: F401
from shardweave.tests.backends.mock_cuda import mock_cuda
from shardweave.tests.compiled import step_of_copy

# Lanes beyond the end of a row compute on zeros, which NumPy warns of; they are not written.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MODELS = {
    "gpt": "gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=2",
    "llama": (
        "hf:llama:num_hidden_layers=1,hidden_size=16,num_attention_heads=2,"
        "num_key_value_heads=1,intermediate_size=32,vocab_size=32,batch=2,seq=8"
    ),
    "bert": (
        "hf:bert:num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=32,"
        "vocab_size=32,max_position_embeddings=16,batch=2,seq=8"
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_step_with_cuda_s_dtypes(name: str) -> None:
    example = build_example(MODELS[name], dtype=torch.bfloat16)
    program = capture(example.module, kwargs=example.kwargs)
    fused = run_passes(program, "cse,dce,preset:kernels")
    wide = build_example(MODELS[name], dtype=torch.float32)
    wide.module.load_state_dict(example.module.state_dict())
    batch = {key: t.float() if t.is_floating_point() else t for key, t in example.kwargs.items()}
    exact = step_of_copy(capture(wide.module, kwargs=batch), wide.module)
    step = step_of_copy(fused, example.module, backend="triton")
    with mock_cuda():
        loss = step(**example.kwargs)
        gradients = {name: p.grad for name, p in step.named_parameters()}
        plain = step_of_copy(program, example.module)
        plain_loss = plain(**example.kwargs)
    exact_loss = exact(**batch)
    assert any(call.kernels for call in step.kernels)
    normed = [c for c in step.kernels if any(spec_of(o).float32_on_gpu for o in c.op.fused_ops)]
    assert normed or name == "llama"
    assert all(call.kernels for call in normed), [call.reason for call in normed]
    _assert_near(loss, plain_loss, exact_loss, "loss")
    plain_gradients = dict(plain.named_parameters())
    norms = {key: _norm(parameter.grad) for key, parameter in exact.named_parameters()}
    largest = max(norms.values())
    for key, parameter in exact.named_parameters():
        if norms[key] <= torch.finfo(torch.float32).eps * largest:
            # It is zero but for rounding, as that of keys' biases: of terms of the others' size.
            assert _norm(gradients[key]) <= torch.finfo(torch.bfloat16).eps * largest, key
            continue
        _assert_near(gradients[key], plain_gradients[key].grad, parameter.grad, key)


def _norm(gradient: torch.Tensor | None) -> float:
    assert gradient is not None
    return gradient.float().norm().item()


def _assert_near(
    found: torch.Tensor | None,
    plain: torch.Tensor | None,
    exact: torch.Tensor | None,
    name: str,
) -> None:
    """Assert that kernels are about as near to float32 as bfloat16 op by op is."""
    assert found is not None
    assert plain is not None
    assert exact is not None
    error = (found.float() - exact).norm().item()
    allowed = (plain.float() - exact).norm().item()
    unit = torch.finfo(torch.bfloat16).eps * exact.norm().item()
    assert error <= 1.5 * allowed + unit / 2, (name, error, allowed, unit)
