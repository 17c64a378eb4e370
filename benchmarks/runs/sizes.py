"""Sizes of published models, for rows that have a model's name and leave its sizes out.

Sizes are those of the papers (Brown et al. 2020, Table 2.1; Narayanan et al. 2021, Table 1; Zhang
et al. 2022; Touvron et al. 2023) and of the models' own `config.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SIZED = ("layers", "hidden", "heads")
"""Columns that the name of a published model may stand for."""

COLUMNS = (*SIZED, "kv_heads", "ffn")

SIZES: Mapping[str, str] = {
    "gpt3 125m": "12 768 12",
    "gpt3 350m": "24 1024 16",
    "gpt3 760m": "24 1536 16",
    "gpt3 2.7b": "32 2560 32",
    "gpt3 6.7b": "32 4096 32",
    "gpt3 13b": "40 5120 40",
    "gpt3 175b": "96 12288 96",
    "gpt3": "96 12288 96",
    "gpt2 medium": "24 1024 16",
    "gpt2 large": "36 1280 20",
    "gpt2 xl": "48 1600 25",
    "gpt2": "12 768 12",
    "gpt 1.7b": "24 2304 24",
    "gpt 3.6b": "30 3072 32",
    "gpt 7.5b": "36 4096 32",
    "gpt 18.4b": "40 6144 48",
    "gpt 39.1b": "48 8192 64",
    "gpt 76.1b": "60 10240 80",
    "gpt 145.6b": "80 12288 96",
    "gpt 175b": "96 12288 96",
    "gpt 310.1b": "96 16384 128",
    "gpt 529.6b": "105 20480 128",
    "opt 125m": "12 768 12",
    "opt 1.3b": "24 2048 32",
    "opt 2.7b": "32 2560 32",
    "opt 6.7b": "32 4096 32",
    "opt 13b": "40 5120 40",
    "opt 30b": "48 7168 56",
    "opt 66b": "64 9216 72",
    "opt 175b": "96 12288 96",
    "bloom 560m": "24 1024 16",
    "bloom 7.1b": "30 4096 32",
    "bloom 176b": "70 14336 112",
    "llama3.2 1b": "16 2048 32 8 8192",
    "llama3.2 3b": "28 3072 24 8 8192",
    "llama3 8b": "32 4096 32 8 14336",
    "llama3 70b": "80 8192 64 8 28672",
    "llama3 405b": "126 16384 128 8 53248",
    "llama2 7b": "32 4096 32 32 11008",
    "llama2 13b": "40 5120 40 40 13824",
    "llama2 70b": "80 8192 64 8 28672",
    "llama 7b": "32 4096 32 32 11008",
    "llama 13b": "40 5120 40 40 13824",
    "llama 30b": "60 6656 52 52 17920",
    "llama 33b": "60 6656 52 52 17920",
    "llama 65b": "80 8192 64 64 22016",
    "llama 8b": "32 4096 32 8 14336",
    "llama 70b": "80 8192 64 8 28672",
    "llama 405b": "126 16384 128 8 53248",
    "mistral 7b": "32 4096 32 8 14336",
    "qwen2 0.5b": "24 896 14 2 4864",
    "qwen2 1.5b": "28 1536 12 2 8960",
    "qwen2 7b": "28 3584 28 4 18944",
    "qwen2 14b": "48 5120 40 8 13824",
    "qwen2 32b": "64 5120 40 8 27648",
    "qwen2 72b": "80 8192 64 8 29568",
}
"""By family and size: layers, hidden features, heads, heads of keys and width of the MLP."""

_VERSIONS: Mapping[str, str] = {"llama3.1": "llama3", "llama3.3": "llama3", "qwen2.5": "qwen2"}
"""Versions of a family whose models have the sizes of another's."""


def sizes_of(model: str) -> dict[str, str]:
    """The columns of a published model, by a name such as `meta-llama/Llama-3.1-8B`; none if it is
    not known."""
    plain = re.sub(r"[\s_-]+", "", model.lower().rpartition("/")[2])
    for version, like in _VERSIONS.items():
        plain = re.sub(f"^{re.escape(version)}", like, plain)
    for name, sizes in SIZES.items():
        family, _, size = name.partition(" ")
        rest = plain.removeprefix(family).lstrip("v")
        is_like = plain.startswith(family) and rest.startswith(size)
        if is_like and (size or not re.match(r"[\d.]", rest)):
            return dict(zip(COLUMNS, sizes.split(), strict=False))
    return {}
