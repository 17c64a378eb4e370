"""Random numbers as a function of seed, draw and position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardweave.ir.library.philox import (
    Distribution,
    numbers_at,
    philox,
    positions_of,
    random_state,
)

KINDS: list[tuple[Distribution, torch.dtype]] = [
    ("uniform", torch.float32),
    ("uniform", torch.float64),
    ("uniform", torch.bfloat16),
    ("uniform", torch.float16),
    ("normal", torch.float32),
    ("normal", torch.float64),
    ("bits", torch.int64),
]
ONES = 0xFFFFFFFF


def numbers(
    positions: Sequence[Tensor],
    kind: tuple[Distribution, torch.dtype] = KINDS[0],
    seed: int = 1,
    draw: int = 0,
) -> Tensor:
    return numbers_at(random_state(seed), positions, draw=draw, distribution=kind[0], dtype=kind[1])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_words_of_its_authors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """kat_vectors of Random123, philox4x32 with 10 rounds."""
    words = philox((torch.tensor([counter[0]]), *counter[1:]), key)
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_part_of_a_tensor_has_the_numbers_of_the_whole(
    kind: tuple[Distribution, torch.dtype],
) -> None:
    rows, columns, last = positions_of((4, 6, 11), *kind)
    whole = numbers([rows, columns, last], kind)
    picks = torch.tensor([0, 3, 4, 9])
    for some, chosen in ((last[3:9], slice(3, 9)), (last[picks], picks)):
        part = numbers([rows[2:], columns[1::2], some], kind)
        torch.testing.assert_close(part, whole[2:, 1::2][:, :, chosen], rtol=0, atol=0)


def test_rows_longer_than_a_chunk_have_the_numbers_of_their_parts() -> None:
    rows, last = positions_of((2, 150_000), *KINDS[0])
    whole = numbers([rows, last])
    assert torch.equal(numbers([rows[1:], last[140_000:]]), whole[1:, 140_000:])


def test_no_number_comes_twice_in_a_tensor_or_in_two_draws_or_seeds() -> None:
    positions = positions_of((5, 7, 9), *("bits", torch.int64))
    parts = [numbers(positions, ("bits", torch.int64), seed, d) for seed in (1, 2) for d in (0, 1)]
    everything = torch.cat([part.flatten() for part in parts])
    assert everything.unique().numel() == everything.numel()


def test_draws_are_counted_from_the_state() -> None:
    positions = positions_of((8,), *KINDS[0])
    later = numbers_at(torch.tensor([1, 5]), positions, draw=2, dtype=torch.float32)
    assert torch.equal(later, numbers(positions, draw=7))


def test_scalars_and_empty_tensors_are_drawn() -> None:
    assert numbers([]).shape == ()
    assert numbers(positions_of((3, 0), *KINDS[0])).shape == (3, 0)
    assert numbers(positions_of((0, 3), *KINDS[0])).shape == (0, 3)


def test_moments_are_those_of_the_distribution() -> None:
    size = (1000, 1000)
    for dtype in (torch.float32, torch.float64):
        uniform = numbers(positions_of(size, *("uniform", dtype)), ("uniform", dtype)).double()
        assert abs(uniform.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 1e6)
        assert abs(uniform.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / 1e6)
        assert 0 <= uniform.min() < uniform.max() < 1
        normal = numbers(positions_of(size, *("normal", dtype)), ("normal", dtype)).double()
        assert abs(normal.mean()) < 4e-3
        assert abs(normal.var() - 1) < 4 * math.sqrt(2 / 1e6)
        assert abs((normal**3).mean()) < 4 * math.sqrt(15 / 1e6)


def test_ten_million_draws_keep_what_they_should() -> None:
    for p in (0.1, 0.5):
        kept = numbers(positions_of((2500, 4000), *KINDS[0])) < 1 - p
        expected, sigma = 1e7 * (1 - p), math.sqrt(1e7 * p * (1 - p))
        assert abs(kept.sum().item() - expected) < 4 * sigma


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distribution": "gamma"}, "distribution is 'gamma', expected one of"),
        ({"state": torch.zeros(3, dtype=torch.int64, device="meta")}, "two int64"),
        (
            {"positions": [torch.zeros(2, 2, dtype=torch.int64, device="meta")]},
            "each tensor of positions must be 1-d",
        ),
        ({"dtype": torch.int64}, "use dtype int64 for 'bits'"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, object], message: str) -> None:
    given = {
        "state": torch.zeros(2, dtype=torch.int64, device="meta"),
        "positions": [],
        "draw": 0,
        "dtype": torch.float32,
    }
    with pytest.raises(ValueError, match=message):
        torch.ops.shardweave.random(**(given | arguments))
