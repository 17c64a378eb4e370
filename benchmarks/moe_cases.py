# pyright: reportMissingImports=false
# The packages are extras of the benchmark alone.
"""Cases of `moe_models.py`: mixtures of torchtitan and of Hugging Face, tiny, unedited."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.driver.models.hf_tiny import tiny_fields

Batches = Sequence[Mapping[str, Tensor]]
Build = Callable[[], tuple[nn.Module, Batches]]
NUM_STEPS = 2
BATCH, LENGTH, VOCABULARY, WIDTH, EXPERTS = 4, 8, 64, 32, 4


def _tokens() -> list[dict[str, Tensor]]:
    shape = (BATCH, LENGTH)
    return [
        {"tokens": torch.randint(VOCABULARY, shape), "labels": torch.randint(VOCABULARY, shape)}
        for _ in range(NUM_STEPS)
    ]


HF: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "deepseek_v3": {
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "num_key_value_heads": 4, "head_dim": 4,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "granitemoe": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
    },
    "dots1": {
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    },
}  # fmt: skip


HEADS = {"num_key_value_heads": 2, "head_dim": 8}
TINY: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "deepseek_v2": {},
    "flex_olmo": {},
    "hunyuan_v1_moe": {"num_experts": EXPERTS, "moe_topk": 2},
    "jamba": {},
    "llama4_text": {},
    "minimax": {},
    "minimax_m2": {},
    "phimoe": {},
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "glm4v_moe_text": {
        "head_dim": 16, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
        },
    },
    "qwen3_vl_moe_text": {},
}  # fmt: skip
"""Fields of models whose other sizes are those of `hf:TYPE:tiny`."""
DRAWS = ("phimoe",)
"""Types whose routers draw numbers while they train, so that no two steps are equal: routers alone
are evaluated."""


class HFLoss(nn.Module):
    """The loss of a causal model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels, use_cache=False).loss


def hf_mixture(name: str) -> Build:
    """A model of Hugging Face with its default experts."""

    def build() -> tuple[nn.Module, Batches]:
        import transformers

        config = transformers.AutoConfig.for_model(
            name, vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, **HEADS | HF[name],
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        return HFLoss(model).train(), _tokens()

    return build


class HiddenLoss(nn.Module):
    """The loss of a model without a head: the distance of its hidden states from embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        return (hidden - self.model.get_input_embeddings()(labels)).square().mean()


def tiny_mixture(name: str) -> Build:
    """A tiny model of Hugging Face, its text part alone where it reads images too."""

    def build() -> tuple[nn.Module, Batches]:
        import transformers

        made = transformers.CONFIG_MAPPING[name]
        default = made()
        fields = tiny_fields(default.to_dict(), default.attribute_map) | TINY[name]
        fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        fields.pop("model_type", None)
        config = made(**fields)
        models = transformers.AutoModelForCausalLM
        has_head = type(config) in models._model_mapping
        models = models if has_head else transformers.AutoModel
        model = models.from_config(config, dtype=torch.float64)
        loss = HFLoss(model) if has_head else HiddenLoss(model)
        for part in loss.train().modules():
            part.training = name not in DRAWS or "Router" not in type(part).__name__
        return loss, _tokens()

    return build


class TitanLoss(nn.Module):
    """The loss of a torchtitan decoder, with the masks that it makes of its positions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(LENGTH)
        positions = positions.repeat(BATCH) if tokens.dim() == 1 else positions.expand(tokens.shape)
        masks = self.model.get_attention_masks(positions)
        logits = self.model(tokens, positions=positions, attention_masks=masks)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class TitanMoE(nn.Module):
    """The loss of one MoE module of torchtitan, of embedded tokens."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.moe = moe

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return (self.moe(self.embed(tokens)) - self.embed(labels)).square().mean()


def attention_by_hand(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, scale: float | None,
    return_aux: Any = None, **_: Any,
) -> Any:  # fmt: skip
    """What flex_attention computes, whose gradient does not run on CPUs."""
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, 1) for part in (key, value))
    b, q, k = (torch.arange(n) for n in (query.shape[0], query.shape[2], key.shape[2]))
    mask = block_mask.mask_mod(b[:, None, None], None, q[None, :, None], k[None, None, :])
    factor = scale or query.shape[-1] ** -0.5
    scores = (query @ key.mT * factor).masked_fill(~mask[:, None], -math.inf)
    aux = type(return_aux)(lse=scores.logsumexp(-1)) if return_aux is not None else None
    return scores.softmax(-1) @ value, aux


@cache
def _is_packed() -> bool:
    """Whether torchtitan's models take streams of tokens, as after 0.3, in place of rows."""
    from torchtitan.models.common.rope import RoPE

    return "max_context_length" in {field.name for field in dataclasses.fields(RoPE.Config)}


def _titan_tokens() -> list[dict[str, Tensor]]:
    """Rows of tokens, or streams in which each row is a document."""
    steps = _tokens()
    if not _is_packed():
        return steps
    return [{name: value.flatten() for name, value in step.items()} for step in steps]


@cache
def _titan() -> Any:
    """torchtitan, with attention that runs on CPUs."""
    import torchtitan.models.common.attention as attention

    attention.FlexAttention._compiled_flex_attn = staticmethod(attention_by_hand)
    import torchtitan.models.deepseek_v3 as deepseek_v3
    import torchtitan.models.gpt_oss as gpt_oss
    import torchtitan.models.kimi_k2_7 as kimi
    import torchtitan.models.qwen3 as qwen3

    return {"deepseek_v3": deepseek_v3, "qwen3": qwen3, "gpt_oss": gpt_oss, "kimi_k2": kimi}


def _titan_layers(name: str, module: Any, layers: int) -> list[Any]:
    length = "max_context_length" if _is_packed() else "max_seq_len"
    rope: dict[str, Any] = {"dim": 8, length: 64, "theta": 10000.0}
    ways = {"attn_backend": "flex", "moe_comm_backend": "standard"}
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    if name == "qwen3":
        return module._build_qwen3_moe_layers(
            n_layers=layers, dim=WIDTH, moe_hidden_dim=24, num_experts=EXPERTS, top_k=2,
            rope=module.CosSinRoPE.Config(**rope), **heads, **ways,
        )  # fmt: skip
    if name == "gpt_oss":
        return module._build_gptoss_layers(
            n_layers=layers, dim=WIDTH, hidden_dim=24, num_experts=EXPERTS, top_k=2, fuse_qkv=True,
            load_balance_coeff=1e-3, rope=module.CosSinRoPE.Config(**rope | {"dim": 64}), **ways,
        )  # fmt: skip
    build = module._build_dsv3_layers if name == "deepseek_v3" else module._build_kimi_layers
    return build(
        n_layers=layers, n_dense_layers=1, dim=WIDTH, n_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, mscale=0.7, dense_hidden_dim=48,
        moe_hidden_dim=24, num_experts=EXPERTS, num_shared_experts=2, router_top_k=2,
        router_score_func="sigmoid", router_route_norm=True, router_num_expert_groups=2,
        router_num_limited_groups=1, non_blocking_capacity_factor=None,
        rope=module.ComplexRoPE.Config(**rope), **ways,
    )  # fmt: skip


def _dtype(name: str) -> torch.dtype:
    """Of weights; gpt_oss's experts give bfloat16, to which no other dtype is added."""
    return torch.bfloat16 if name == "gpt_oss" else torch.float64


def titan_mixture(name: str, *, whole: bool) -> Build:
    """A model of torchtitan, or its MoE module alone."""

    def build() -> tuple[nn.Module, Batches]:
        module = _titan()[name]
        layers = _titan_layers(name, module, 2)
        if not whole:
            moe = layers[-1].moe.build()
            moe.init_states()
            return TitanMoE(moe).to(_dtype(name)).train(), _titan_tokens()
        normal = {"weight": nn.init.ones_}
        head = {"weight": lambda weight: nn.init.normal_(weight, std=0.2)}
        config = {"deepseek_v3": "DeepSeekV3Model", "qwen3": "Qwen3Model", "gpt_oss": "GptOssModel"}
        made = getattr(module, config[name]).Config(
            vocab_size=VOCABULARY, dim=WIDTH, layers=layers,
            tok_embeddings=module.Embedding.Config(
                num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=module._EMBEDDING_INIT
            ),
            norm=module.RMSNorm.Config(normalized_shape=WIDTH, param_init=normal),
            lm_head=module.Linear.Config(
                in_features=WIDTH, out_features=VOCABULARY, param_init=head
            ),
            **({"mtp_layers": []} if name == "deepseek_v3" else {}),
        ).build()  # fmt: skip
        made.init_states()
        return TitanLoss(made).to(_dtype(name)).train(), _titan_tokens()

    return build


CASES: dict[str, Build] = {
    **{f"hf/{name}": hf_mixture(name) for name in HF},
    **{f"hf/{name}": tiny_mixture(name) for name in TINY},
    **{
        f"torchtitan/{name}-moe": titan_mixture(name, whole=False)
        for name in ("deepseek_v3", "qwen3", "gpt_oss", "kimi_k2")
    },
    **{
        f"torchtitan/{name}": titan_mixture(name, whole=True)
        for name in ("deepseek_v3", "qwen3", "gpt_oss")
    },
}
