"""A small model of the same structure as a large one, on which its passes can be validated.

Sizes shrink, but whatever divides a size and the devices divides the small size too, so that
planners and passes do to the twin what they do to the model.
"""

from __future__ import annotations

import dataclasses
from math import gcd
from typing import Any

from shardweave.driver.models.hf import DEFAULT_BATCH, DEFAULT_SEQ, default_fields
from shardweave.driver.models.models import FAMILIES, Option, parse_options

MAX_LAYERS = 2
MAX_HEAD_SIZE = 8

LAYERS = ("layers", "num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
LAYERS += ("encoder_layers", "decoder_layers")
HEADS = ("heads", "num_attention_heads", "n_head", "num_heads", "num_key_value_heads")
HEADS += ("encoder_attention_heads", "decoder_attention_heads")
HIDDEN = ("hidden", "hidden_size", "n_embd", "d_model")
HEAD_SIZE = ("d_kv", "head_dim")
FFN = ("ffn", "intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
SEQ = ("seq", "n_positions", "max_position_embeddings")
GOALS = dict.fromkeys((*FFN, *SEQ), 16) | dict.fromkeys(("vocab", "vocab_size"), 32)
"""Target values of shrunk sizes, by name of the option."""


def twin_spec(spec: str, parts: int) -> str:
    """Make a smaller model's spec, whose sizes `parts` divides. ValueError without sizes."""
    scheme, _, rest = spec.partition(":")
    head, options, sizes = scheme, rest, {}
    if scheme == "hf":
        model_type, _, options = rest.partition(":")
        head, sizes = f"hf:{model_type}", default_fields(model_type)
        sizes = {"batch": DEFAULT_BATCH, "seq": DEFAULT_SEQ} | sizes
    elif scheme in FAMILIES:
        sizes = {f.name: f.default for f in dataclasses.fields(FAMILIES[scheme][0])}
    else:
        raise ValueError(
            f"model '{spec}' has no sizes that validation could shrink; validate with a factory "
            "that makes a smaller model."
        )
    given = parse_options(options)
    small = shrunk({**sizes, **given}, parts)
    chosen = {key: value for key, value in {**given, **small}.items() if value is not None}
    return f"{head}:" + ",".join(f"{key}={_word(value)}" for key, value in chosen.items())


def shrunk(sizes: dict[str, Any], parts: int) -> dict[str, Option]:
    """Return those sizes among a config's fields that can shrink, with their smaller values."""
    small: dict[str, Option] = {}
    heads = next((sizes[key] for key in HEADS if _is_size(sizes.get(key))), 1)
    for key, value in sizes.items():
        if not _is_size(value):
            continue
        if key in LAYERS:
            small[key] = min(value, MAX_LAYERS)
        elif key in HEADS or key == "batch":
            small[key] = gcd(value, parts)
        elif key in HIDDEN:
            small[key] = gcd(heads, parts) * min(value // heads, MAX_HEAD_SIZE)
        elif key in HEAD_SIZE:
            small[key] = min(value, MAX_HEAD_SIZE)
        elif key in GOALS:  # what divides both the size and the parts divides the small size too
            unit = gcd(value, parts)
            small[key] = min(value, unit * max(1, GOALS[key] // unit))
    return small


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _word(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
