"""Pipelines by name: in a spec, `preset:oases` stands for the passes listed below.

Each turns a global program with annotated arguments (by `apply-plan`, a planner or by hand) into
the program of one rank. `str(PassPipeline("preset:oases"))` lists its passes, to copy and change.
"""

from __future__ import annotations

import re

PREFIX = "preset:"

PRESETS: dict[str, str] = {
    "partition": (
        "split-addmm,split-axes,block-experts,add-pending-sums,propagate-shardings,"
        "insert-collectives,cse,dce,dispatch-experts,merge-collectives"
    ),
    "default": (
        "preset:partition,bucket-collectives,start-collectives,"
        'overlap-communication{schedule="in-order"}'
    ),
    "sub-batches": (
        "split-batch{n=2},split-addmm,split-axes,block-experts,add-pending-sums,"
        "propagate-shardings,insert-collectives,unroll-time-axes,cse,dce,dispatch-experts,merge-collectives"
    ),
    "kernels": ("sum-by-local-maxima,recompute-producers{matmul=false},fuse-kernels{matmul=false}"),
    "recompute": 'rematerialize{policy="layer"}',
    "megatron": (
        "preset:partition,preset:recompute,start-collectives,"
        'overlap-communication{schedule="blocking"}'
    ),
    "merak": (
        "preset:sub-batches,preset:recompute,start-collectives,"
        'overlap-communication{schedule="sub-batch"}'
    ),
    "axonn": (
        "preset:partition,preset:recompute,delete-redundant-collectives{kind=all_gather},"
        'start-collectives,overlap-communication{schedule="axonn-abc"}'
    ),
    "domino": ('preset:sub-batches,start-collectives,overlap-communication{schedule="sub-batch"}'),
    "oases": (
        "preset:sub-batches,preset:recompute,delete-redundant-collectives,start-collectives,"
        'overlap-communication{schedule="cross-pass"}'
    ),
}
"""`name` -> spec, which may name other presets."""

SUMMARIES: dict[str, str] = {
    "partition": "Shard the program; every collective blocks where it stands.",
    "default": "Shard the program, join collectives, overlap them with compute, as sw.compile.",
    "sub-batches": "Shard the program in two sub-batches, one after the other.",
    "kernels": "Fuse all ops but matrix products into kernels, as the Triton backend does.",
    "recompute": "Keep only the inputs of blocks, and recompute the rest (Megatron's default).",
    "megatron": "Shard, recompute blocks, wait for every collective at once.",
    "merak": "Two sub-batches; one computes while the other communicates, in each pass (Merak).",
    "domino": "As preset:merak, but without recomputation (Domino).",
    "axonn": "Recompute blocks, but keep gathered weights; order collectives as AxoNN does.",
    "oases": "As preset:merak, across passes, without recomputed collectives (Oases).",
}

_STRING_OR_PRESET = re.compile(r'"(?:[^"\\]|\\.)*"|\bpreset:')
_NAME_PREFIX = "preset-"


def readable_spec(spec: str) -> str:
    """Write `preset:x` as `preset-x`, which xDSL can parse as a name, at the same column."""
    return _STRING_OR_PRESET.sub(lambda m: _NAME_PREFIX if m[0] == PREFIX else m[0], spec)


def preset_of(name: str) -> str | None:
    """The passes of a preset, as text; None for a pass. Raises ValueError for an unknown preset."""
    if not name.startswith(_NAME_PREFIX):
        return None
    preset = name.removeprefix(_NAME_PREFIX)
    if preset not in PRESETS:
        raise ValueError(
            f"there is no preset '{preset}'; the presets are: {', '.join(sorted(PRESETS))}."
        )
    return PRESETS[preset]
