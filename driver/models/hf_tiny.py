"""Sizes of a small model of any Hugging Face type: `hf:TYPE:tiny`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = 2
HEADS = 4
KEY_HEADS = 2
HEAD_SIZE = 8
HIDDEN = HEADS * HEAD_SIZE
VOCAB = 64

_SIZES: dict[str, int] = {
    name: size
    for size, names in (
        (LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"),
        (LAYERS, "layers num_encoder_layers num_decoder_layers num_hidden_groups depth"),
        (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads"),
        (HEADS, "decoder_attention_heads attention_heads encoder_num_attention_heads"),
        (KEY_HEADS, "num_key_value_heads num_kv_heads"),
        (HEAD_SIZE, "head_dim d_kv kv_channels attention_head_size"),
        (HEAD_SIZE, "rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim"),
        (HEAD_SIZE, "mamba_d_head mamba_head_dim mamba_d_state"),
        (2 * HEAD_SIZE, "kv_lora_rank q_lora_rank"),
        (HIDDEN, "hidden_size n_embd d_model dim embedding_size projection_dim hidden_dim"),
        (HIDDEN, "embed_dim adapter_in_dim adapter_out_dim adapter_input_size encoder_hidden_dim"),
        (HIDDEN, "audio_hidden_size entity_emb_size pronunciation_embed_dim shape_embed_dim"),
        (2 * HIDDEN, "intermediate_size n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim"),
        (
            2 * HIDDEN,
            "ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size d_inner",
        ),
        (VOCAB, "vocab_size text_vocab_size vocab_size_per_layer_input entity_vocab_size"),
        (VOCAB, "pronunciation_vocab_size shape_vocab_size"),
        (64, "max_position_embeddings n_positions n_ctx max_source_positions"),
        (64, "max_target_positions max_seq_len"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_top_k"),
        (1, "n_group topk_group mamba_n_groups"),
        (2 * HEADS, "mamba_n_heads mamba_num_heads"),
        (8, "attention_window num_queries patch_size"),
        (32, "image_size"),
    )
    for name in names.split()
}

_WIDTHS = [16, 32]
_STAGES: dict[str, Any] = {"depths": [1, 1], "hidden_sizes": _WIDTHS}
_PYRAMID: dict[str, Any] = {
    **_STAGES, "num_encoder_blocks": 2, "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
    "patch_sizes": [4, 2], "strides": [4, 2],
}  # fmt: skip
_WINDOWS: dict[str, Any] = {
    "depths": [2, 2], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "image_size": 32,
}  # fmt: skip
_SOUND: dict[str, Any] = {
    "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4],
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False, "classifier_proj_size": 16,
}  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_BYTES = {"vocab_size": 260}
"""Vocabulary of byte-level models: 256 bytes and special tokens; hashes of patches need it."""

_BY_TYPE: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"num_mel_bins": 16, "max_length": 32},
    "bit": {**_STAGES, "embedding_size": 16, "num_groups": 4},
    "blt": {**_BYTES, "patching_mode": "static", "encoder_hash_byte_group_vocab": VOCAB},
    "blt_local_decoder": {**_BYTES, "hidden_size_global": HIDDEN},
    "blt_local_encoder": {**_BYTES, "hidden_size_global": HIDDEN},
    "blt_patcher": _BYTES,
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "convnext": _STAGES | {"num_stages": 2},
    "convnextv2": _STAGES | {"num_stages": 2},
    "cvt": {"embed_dim": [16, 16, 32], "num_heads": [2, 2, 4], "depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": KEY_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_key_value_heads": HEADS, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": HEADS, "first_k_dense_replace": 1},
    "detr": {
        "backbone_config": {
            **_STAGES, "model_type": "resnet", "embedding_size": 16, "out_features": ["stage2"],
        },
    },
    "efficientnet": {
        "width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320, "image_size": 32,
    },
    "esmc": {"num_key_value_heads": HEADS},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 2, "pad_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 2 * HIDDEN},
    "focalnet": {
        **_STAGES, "embed_dim": 16, "focal_levels": [2, 2], "focal_windows": [3, 3],
        "image_size": 32,
    },
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "intermediate_size": 2 * HIDDEN,
        "activation_sparsity_pattern": [0.5, 0.0], "hidden_size_per_layer_input": HEAD_SIZE,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 8},
    "hiera": {
        "depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "num_query_pool": 1,
        "masked_unit_attention": [True, False], "image_size": [32, 32], "masked_unit_size": [4, 4],
    },
    "hubert": _SOUND,
    "levit": {
        "hidden_sizes": [16, 16, 32], "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1],
        "key_dim": [8, 8, 8], "image_size": 64,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lw_detr_vit": {
        "image_size": 128, "num_windows": 4, "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS, "window_block_indices": [0], "out_features": ["stage2"],
    },
    "mamba2": {"num_heads": 8, "head_dim": HEAD_SIZE, "state_size": 16, "n_groups": 2},
    "mobilevit": {"hidden_sizes": [16, 16, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
                  "image_size": 64},
    "mobilevitv2": {"width_multiplier": 0.25, "image_size": 64, "n_attn_blocks": [1, 1, 1]},
    "neomme": {"head_dim": 2 * HEAD_SIZE},
    "nemotron": {"num_key_value_heads": KEY_HEADS},
    "poolformer": {
        **_STAGES, "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
        "padding": [2, 1],
    },
    "pvt": {**_PYRAMID, "sequence_reduction_ratios": [2, 1], "image_size": 32},
    "pvt_v2": {**_PYRAMID, "sr_ratios": [2, 1], "image_size": [32, 32], "patch_sizes": [7, 3]},
    "reformer": {
        "attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16],
    },
    "regnet": {**_STAGES, "embedding_size": 16, "groups_width": 8},
    "resnet": {**_STAGES, "embedding_size": 16},
    "segformer": {**_PYRAMID, "sr_ratios": [2, 1], "patch_sizes": [7, 3],
                  "decoder_hidden_size": 16},
    "donut-swin": _WINDOWS,
    "dots1": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": HIDDEN,
    },
    "swin": _WINDOWS,
    "swinv2": _WINDOWS | {"pretrained_window_sizes": [0, 0]},
    "wav2vec2": _SOUND,
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
"""Sizes of types whose fields depend on one another."""


def tiny_fields(defaults: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Choose small values for the sizes among a config's fields; sub-configs as nested dicts.
    renamed: common names of fields, each with the name under which this model type stores it."""
    by_type = _BY_TYPE.get(str(defaults.get("model_type")), {})
    if isinstance(defaults.get("depths"), list):
        # In stages, whose widths depend on one another: one block in each.
        stages = {"depths": [1] * len(defaults["depths"])}
        return stages | ({"image_size": 64} if "image_size" in defaults else {}) | by_type
    names = {stored: name for name, stored in renamed.items()}
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        size = _SIZES.get(name, _SIZES.get(names.get(name, "")))
        if isinstance(value, Mapping) and name.endswith("_config"):
            kind = {key: value[key] for key in ("model_type",) if value.get(key)}
            fields[name] = kind | tiny_fields(value, {})
        elif type(value) is int and value > 0 and size is not None:
            fields[name] = min(value, size)
    if defaults.get("kv_lora_rank") and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = HEADS  # latent attention has keys for each head
    if "rope_parameters" in defaults and not defaults["rope_parameters"]:
        fields["rope_parameters"] = _ROPE
    if "head_dim" in defaults and defaults["head_dim"] is None:
        fields["head_dim"] = HEAD_SIZE
    if "apply_spec_augment" in defaults:
        fields["apply_spec_augment"] = False  # its masks are drawn by numpy
    return fields | by_type
