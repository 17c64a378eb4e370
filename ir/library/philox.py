# pyright: basic
# torch.library and unique_consecutive are only partly typed.
"""Random numbers as a function of (seed, draw, element index): Philox4x32-10, and `dist.random`.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Ten rounds map
a counter of 128 bits and a key of 64 to four words of 32 bits. Here the key is the seed, the
upper half of the counter is the number of the draw, and the lower half is the block's index in the
global tensor. So a number does not depend on which device computes it, together with
which others, or how often.

Each row (all dims but the last) begins with a new block: if an element takes w words, element k of
a row is in block k // (4 / w) of the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

Distribution = Literal["uniform", "normal", "bits"]
"""uniform: in [0, 1), of as many bits as the dtype has digits (24 of float32, 53 of float64).
normal: of mean 0 and variance 1 (Box and Muller). bits: of int64, 63 random ones."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_CHUNK = 1 << 15
"""Blocks that are computed at a time, so that they stay in a core's cache."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: tuple[Tensor, Tensor | int, int, int], key: tuple[int, int]) -> Words:
    """Compute four random 32-bit words, as int64, for each counter. counter, key: 32-bit words, the
    lowest first. Takes some 110 operations per block of four words."""
    low, second, third, fourth = counter
    words = [low, *(torch.as_tensor(w).expand_as(low) for w in (second, third, fourth))]
    for number in range(_ROUNDS):
        keys = [(k + number * w) & _MASK for k, w in zip(key, _WEYL, strict=True)]
        products = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        high = [(product >> 32).bitwise_and_(_MASK) for product in products]
        words = [
            high[1].bitwise_xor_(words[1]).bitwise_xor_(keys[0]),
            products[1].bitwise_and_(_MASK),
            high[0].bitwise_xor_(words[3]).bitwise_xor_(keys[1]),
            products[0].bitwise_and_(_MASK),
        ]
    return cast("Words", tuple(words))


def words_of(distribution: str, dtype: torch.dtype) -> int:
    """The number of 32-bit words that a random number takes."""
    wide = 2 if dtype in (torch.float64, torch.int64) else 1
    return wide * 2 if distribution == "normal" else wide


def digits_of(dtype: torch.dtype) -> int:
    """Number of binary digits of a floating-point dtype, including the leading digit."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def position_steps(shape: Sequence[int], distribution: str, dtype: torch.dtype) -> list[int]:
    """The step between neighbouring positions along each dim of a global tensor. A position counts
    Philox blocks, except in the last dim, where it counts numbers."""
    if not shape:
        return []
    per_block = 4 // words_of(distribution, dtype)
    blocks = -(-shape[-1] // per_block)
    return [*(blocks * math.prod(shape[dim + 1 : -1]) for dim in range(len(shape) - 1)), 1]


def positions_of(
    shape: Sequence[int],
    distribution: str,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """The int64 positions of all indices along each dim of a global tensor (`position_steps`)."""
    steps = position_steps(shape, distribution, dtype)
    return [torch.arange(n, device=device) * step for n, step in zip(shape, steps, strict=True)]


def rows_and_last(positions: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each tensor row's first Philox block, and the positions in the last dim."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    *rows, last = positions or [zero]
    starts = zero
    for row in rows:
        starts = (starts[:, None] + row).flatten()
    return starts, last


def numbers_at(
    state: Tensor,
    positions: Sequence[Tensor],
    *,
    draw: int,
    distribution: str = "uniform",
    dtype: torch.dtype,
) -> Tensor:
    """Compute the random numbers of a global tensor at the given positions.

    state: (2,) int64, the seed and the number of earlier draws. positions: for each dim an int64
    tensor of all its positions (`positions_of`) or some of them. draw: index of the draw within the
    program. Shapes: (2), (n0), (n1), .. -> n0 x n1 x ...
    """
    seed, before = (int(number) for number in state.tolist())
    number = before + draw
    key = seed & _MASK, (seed >> 32) & _MASK
    upper = number & _MASK, (number >> 32) & _MASK
    per_block = 4 // words_of(distribution, dtype)
    starts, last = rows_and_last(positions, positions[-1].device if positions else state.device)
    blocks, inverse = torch.unique_consecutive(last // per_block, return_inverse=True)
    picks = inverse * per_block + last % per_block
    is_run = picks.numel() == 0 or bool((picks.diff() == 1).all())
    result = torch.empty((starts.numel(), last.numel()), dtype=dtype, device=last.device)
    for part in _chunks(starts.numel(), blocks.numel()):
        counters = starts[part, None] + blocks
        words = philox((counters & _MASK, (counters >> 32) & _MASK, *upper), key)
        numbers = _FORMS[distribution](words, dtype).flatten(1)
        first = int(picks[0]) if picks.numel() else 0
        chosen = numbers.narrow(1, first, last.numel()) if is_run else numbers[:, picks]
        result[part] = chosen
    return result.view([position.numel() for position in positions])


def _chunks(num_rows: int, row_blocks: int) -> list[slice]:
    size = max(_CHUNK // max(row_blocks, 1), 1)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _uniform(words: Words, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1), one after another along a new last dim."""
    if dtype == torch.float64:
        pairs = [_unit(a, b) for a, b in (words[:2], words[2:])]
        return torch.stack(pairs, -1)
    digits = digits_of(dtype)
    parts = torch.stack([word >> (32 - digits) for word in words], -1)
    return parts.to(dtype).mul_(2.0**-digits)


def _unit(high: Tensor, low: Tensor) -> Tensor:
    """A number in [0, 1) from 53 bits of two words."""
    return ((high << 21) | (low >> 11)).to(torch.float64).mul_(2.0**-53)


def _normal(words: Words, dtype: torch.dtype) -> Tensor:
    """Make a normal number from two uniform ones (the cosine of Box and Muller)."""
    if dtype == torch.float64:
        radii, angles = _unit(*words[:2])[..., None], _unit(*words[2:])[..., None]
    else:
        radii = torch.stack([words[0], words[2]], -1).to(torch.float64).mul_(2.0**-32)
        angles = torch.stack([words[1], words[3]], -1).to(torch.float64).mul_(2.0**-32)
    # 1 - u lies in (0, 1], so that its logarithm is finite.
    return (-2 * torch.log(1 - radii)).sqrt_().mul_(torch.cos(2 * math.pi * angles)).to(dtype)


def _bits(words: Words, dtype: torch.dtype) -> Tensor:
    del dtype
    return torch.stack([(a >> 1 << 32) | b for a, b in (words[:2], words[2:])], -1)


_FORMS: dict[str, Any] = {"uniform": _uniform, "normal": _normal, "bits": _bits}

# The schema, from which the op `dist.random` is made as those of ATen are.

_LIBRARY = torch.library.Library("shardweave", "FRAGMENT")
_LIBRARY.define(
    "random(Tensor state, Tensor[] positions, *, int draw, str distribution='uniform', "
    "ScalarType dtype) -> Tensor"
)


def _meta(
    state: Tensor,
    positions: Sequence[Tensor],
    *,
    draw: int,
    distribution: str = "uniform",
    dtype: torch.dtype,
) -> Tensor:
    del draw
    if distribution not in _FORMS:
        raise ValueError(f"distribution is {distribution!r}, expected one of {', '.join(_FORMS)}")
    if state.shape != (2,) or state.dtype != torch.int64:
        raise ValueError("state must be two int64 elements: seed and number of earlier draws")
    for position in positions:
        if position.ndim != 1 or position.dtype != torch.int64:
            raise ValueError("each tensor of positions must be 1-d and int64")
    if (dtype == torch.int64) != (distribution == "bits"):
        raise ValueError("use dtype int64 for 'bits', a floating-point one for other distributions")
    return state.new_empty([position.shape[0] for position in positions], dtype=dtype)


_LIBRARY.impl("random", _meta, "Meta")
_LIBRARY.impl("random", numbers_at, "CompositeExplicitAutograd")

RANDOM = "dist.random"
"""The op's name in programs."""

STATE = "random_state"
"""The name of the buffer that holds [seed, draws so far]."""


def random_state(seed: int) -> Tensor:
    """Make the state [seed, 0], as before the first draw."""
    return torch.tensor([seed, 0], dtype=torch.int64)
