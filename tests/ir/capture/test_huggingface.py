"""Outputs of inner modules of Hugging Face models (hidden states, router logits) are captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.backends.reference.reference import run_reference
from shardweave.driver.models.models import build_example
from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import assert_three_steps_equal_eager
from shardweave.tests.marks import slow
from shardweave.tests.zoo import assert_equals_eager, captured

MIXTRAL = (
    "hf:mixtral:num_hidden_layers=2,hidden_size=16,intermediate_size=16,num_attention_heads=4,"
    "num_key_value_heads=2,num_local_experts=4,vocab_size=32,batch=2,seq=4"
)
BERT = (
    "hf:bert:num_hidden_layers=2,hidden_size=16,intermediate_size=16,num_attention_heads=4,"
    "vocab_size=32,max_position_embeddings=8,batch=2,seq=4"
)


class OfAllLayers(nn.Module):
    """The mean of what all layers of an encoder give."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder: Any = build_example(BERT, dtype=torch.float64).module.bert

    def forward(self, ids: Tensor) -> Tensor:
        states = self.encoder(ids, output_hidden_states=True).hidden_states
        return torch.stack(states).square().mean()


def test_loss_that_balances_experts_is_a_part_of_the_program() -> None:
    balanced = f"{MIXTRAL},output_router_logits=true,router_aux_loss_coef=1.0"
    case, plain = captured(balanced), captured(MIXTRAL)
    # Its router computes in float32, and so does eager.
    assert run_reference(case.program, case.values)["output", "0"].item() == pytest.approx(
        case.loss, rel=1e-6
    )
    assert case.loss > plain.loss + 1


def test_model_that_asks_for_hidden_states_equals_eager() -> None:
    assert_three_steps_equal_eager(OfAllLayers(), lambda: (torch.randint(0, 32, (2, 4)),))


@pytest.mark.parametrize("is_hooked", [slow(False), True])
def test_hidden_states_are_returned_and_hooks_left_as_they_were(is_hooked: bool) -> None:
    example = build_example(f"{BERT},output_hidden_states=true", dtype=torch.float64)
    if is_hooked:
        example.module(**example.kwargs)
    before = [len(module._forward_hooks) for module in example.module.modules()]
    step = compile_copy(example.module, kwargs=example.kwargs, mesh="data=2", backend="reference")
    found = step(**example.kwargs).hidden_states
    assert [len(module._forward_hooks) for module in example.module.modules()] == before
    expected = example.module(**example.kwargs).hidden_states
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_speech_recognition_with_padded_labels_is_that_of_eager() -> None:
    """Its loss is in float32, and joins the labels of all samples in one row."""
    from transformers import Data2VecAudioConfig, Data2VecAudioForCTC

    torch.manual_seed(0)
    still = ("hidden", "attention", "activation", "feat_proj", "final")
    sizes: dict[str, Any] = {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 6,
        "conv_dim": [8], "conv_stride": [5], "conv_kernel": [10], "intermediate_size": 8,
        "num_conv_pos_embeddings": 1, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
        "apply_spec_augment": False,
    } | {f"{name}_dropout": 0.0 for name in still}  # fmt: skip
    config = Data2VecAudioConfig(**sizes)
    model = Data2VecAudioForCTC(config)
    labels = torch.tensor([[1, 1, 2], [3, -100, -100], [-100, 4, 5], [2, 3, 4]])
    inputs = {"input_values": torch.randn(4, 60), "labels": labels}
    step = compile_copy(model, kwargs=inputs, mesh="data=2,tensor=2", backend="reference")
    expected = model(**inputs)
    expected.loss.backward()
    torch.testing.assert_close(step(**inputs).loss, expected.loss.detach())
    for (name, parameter), own in zip(model.named_parameters(), step.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(own.grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longt5", "switch_transformers"])
def test_mask_that_is_only_made_where_nothing_is_traced_is_made(kind: str) -> None:
    case = captured(f"hf:{kind}:tiny")
    assert_equals_eager(case.program, case)
