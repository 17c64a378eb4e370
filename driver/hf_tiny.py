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
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers layers "
        "num_encoder_layers num_decoder_layers num_hidden_groups depth".split(),
        LAYERS,
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads attention_heads encoder_num_attention_heads".split(),
        HEADS,
    ),
    **dict.fromkeys("num_key_value_heads num_kv_heads".split(), KEY_HEADS),
    **dict.fromkeys("head_dim d_kv kv_channels attention_head_size".split(), HEAD_SIZE),
    **dict.fromkeys(
        "hidden_size n_embd d_model dim embedding_size projection_dim hidden_dim embed_dim".split(),
        HIDDEN,
    ),
    **dict.fromkeys(
        "intermediate_size n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim ffn_hidden_size "
        "moe_intermediate_size shared_expert_intermediate_size d_inner".split(),
        2 * HIDDEN,
    ),
    **dict.fromkeys("vocab_size text_vocab_size".split(), VOCAB),
    **dict.fromkeys(
        "max_position_embeddings n_positions n_ctx max_source_positions "
        "max_target_positions max_seq_len".split(),
        64,
    ),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 4),
    **dict.fromkeys("num_experts_per_tok num_experts_per_token moe_top_k".split(), 2),
    "image_size": 32,
    "patch_size": 8,
}


def tiny_fields(defaults: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Small values for the sizes among a config's fields, those of its parts in dicts of their own.

    renamed: other names of fields, by which a type calls what it stores under a common one.
    """
    if isinstance(defaults.get("depths"), list):
        # In stages, whose widths depend on one another: one block in each.
        stages = {"depths": [1] * len(defaults["depths"])}
        return stages | ({"image_size": 64} if "image_size" in defaults else {})
    names = {stored: name for name, stored in renamed.items()}
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        size = _SIZES.get(name, _SIZES.get(names.get(name, "")))
        if isinstance(value, Mapping) and name.endswith("_config"):
            fields[name] = tiny_fields(value, {})
        elif type(value) is int and value > 0 and size is not None:
            fields[name] = min(value, size)
    return fields
