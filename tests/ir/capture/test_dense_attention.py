"""Attention with kernels on GPUs alone becomes ops of the program, exact and cut by heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.tests.compiled import compile_copy
from shardweave.tests.marks import slow
from shardweave.tests.torch_versions import new_torch

F64 = torch.float64
LENGTH, WIDTH, HEADS = 8, 16, 4


class Attention(nn.Module):
    """Projections around an attention by `flex_attention`, or by hand."""

    def __init__(self, groups: int = HEADS, *, by_hand: bool = False, scored: bool = True) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, dtype=F64) for _ in "qo")
        self.k, self.v = (nn.Linear(WIDTH, 4 * groups, dtype=F64) for _ in "kv")
        self.slopes = nn.Parameter(torch.rand(HEADS, dtype=F64))
        self.by_hand, self.scored, self.groups = by_hand, scored, groups

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attend = self._by_hand if self.by_hand else self._flex
        return self.o(attend(q, k, v, documents).transpose(1, 2).flatten(2)).square().sum()

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (documents[b, i] == documents[b, j]) & (i != 5)

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return value + self.slopes[h] * (j - i)

        blocks = create_block_mask(mask, len(q), None, LENGTH, LENGTH, device="cpu")
        made: Any = flex_attention(
            q, k, v, score_mod=score if self.scored else None, block_mask=blocks,
            enable_gqa=self.groups < HEADS,
        )  # fmt: skip
        return made

    def _by_hand(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(HEADS // self.groups, 1) for part in (k, v))
        place = torch.arange(LENGTH)
        mask = (place[:, None] >= place) & (documents[:, :, None] == documents[:, None])
        scores = q @ k.mT / 2
        if self.scored:
            scores = scores + self.slopes[:, None, None] * (place - place[:, None])
        weights = scores.masked_fill(~mask[:, None], -math.inf).softmax(-1)
        return weights @ v * (place != 5)[:, None]  # query 5 sees no key


def batch() -> tuple[Tensor, Tensor]:
    documents = torch.randint(0, 3, (4, LENGTH)).sort(-1).values
    return torch.randn(4, LENGTH, WIDTH, dtype=F64), documents


def assert_equal(step: CompiledModule, by_hand: nn.Module, *inputs: Tensor) -> None:
    """The loss and all gradients."""
    by_hand.zero_grad()
    step.zero_grad()
    loss = by_hand(*inputs)
    loss.backward()
    torch.testing.assert_close(step(*inputs), loss.detach(), rtol=1e-12, atol=0)
    for (name, found), expected in zip(step.named_parameters(), by_hand.parameters(), strict=True):
        grad = torch.zeros_like(expected) if expected.grad is None else expected.grad
        grad_found = torch.zeros_like(grad) if found.grad is None else found.grad
        torch.testing.assert_close(grad_found, grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(("groups", "scored"), [slow(4, True), (2, True), slow(2, False)])
def test_flex_attention_is_exact_and_cut_by_heads(groups: int, scored: bool) -> None:
    model = Attention(groups, scored=scored)
    by_hand = Attention(groups, by_hand=True, scored=scored)
    by_hand.load_state_dict(model.state_dict())
    step = compile_copy(model, batch(), mesh="data=2,tensor=2", backend="reference")
    for _ in range(2):
        assert_equal(step, by_hand, *batch())
    weights = {s.name: s for s in step.program.arguments if s.name in ("q.weight", "k.weight")}
    assert all("tensor" in str(slot.sharding_attr) for slot in weights.values())


class Packed(nn.Module):
    """Sequences laid one after another, by `varlen_attn` or one by one."""

    def __init__(self, *, by_hand: bool = False, **options: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=F64)
        self.o = nn.Linear(WIDTH, WIDTH, dtype=F64)
        self.by_hand, self.options = by_hand, options

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)) for part in self.qkv(x).chunk(3, -1))
        if not self.by_hand:
            made: Any = varlen_attn(q, k, v, ends, ends, 8, 8, **self.options)
            return self.o(made.flatten(1)).square().sum()
        parts: list[Tensor] = []
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            place = torch.arange(end - start)
            ahead = place - place[:, None]
            left, right = self.options["window_size"]
            mask = (ahead <= right) & (ahead >= -left if left >= 0 else ahead < 99)
            own = [part[start:end].transpose(0, 1) for part in (q, k, v)]
            parts.append(F.scaled_dot_product_attention(*own, attn_mask=mask).transpose(0, 1))
        return self.o(torch.cat(parts).flatten(1)).square().sum()


@pytest.mark.parametrize("window", [(-1, 0), (2, 1)])
def test_attention_by_cumulative_lengths_is_exact(window: tuple[int, int]) -> None:
    model, by_hand = Packed(window_size=window), Packed(by_hand=True, window_size=window)
    by_hand.load_state_dict(model.state_dict())
    x = torch.randn(16, WIDTH, dtype=F64)
    step = compile_copy(
        model, (x, torch.tensor([0, 5, 9, 16])), mesh="tensor=2", backend="reference"
    )
    for ends in ([0, 5, 9, 16], [0, 2, 8, 16]):
        assert_equal(step, by_hand, x, torch.tensor(ends))


@new_torch("varlen_attn has no seqused_k")
def test_attention_of_inference_by_lengths_is_refused_with_its_line() -> None:
    model = Packed(seqused_k=torch.tensor([5, 4, 7], dtype=torch.int32))
    inputs = (torch.randn(16, WIDTH, dtype=F64), torch.tensor([0, 5, 9, 16], dtype=torch.int32))
    with pytest.raises(CaptureError, match=r"test_dense_attention\.py:\d+.*seqused_k"):
        capture(model, inputs)


class Decaying(nn.Module):
    """Blocks whose scores fall with the distance, each at a rate of its own that is a number."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=F64) for _ in range(4))
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        for layer, rate in zip(self.maps, (0.1, 0.5, 1.0, 2.0), strict=True):
            q = layer(x).unflatten(-1, (4, 4)).transpose(1, 2)
            x = x + self._attend(q, rate).transpose(1, 2).flatten(2)
        return x.square().mean()

    def _attend(self, q: Tensor, rate: float) -> Tensor:
        if self.by_hand:
            place = torch.arange(LENGTH)
            return (q @ q.mT / 2 - rate * (place - place[:, None]).abs()).softmax(-1) @ q
        made: Any = flex_attention(
            q, q, q, score_mod=lambda value, b, h, i, j: value - rate * (i - j).abs()
        )
        return made


def test_numbers_in_score_functions_are_those_of_each_layer() -> None:
    model, by_hand = Decaying(), Decaying(by_hand=True)
    by_hand.load_state_dict(model.state_dict())
    x = torch.randn(4, LENGTH, WIDTH, dtype=F64)
    step = compile_copy(model, (x,), mesh="data=2", backend="reference")
    assert_equal(step, by_hand, x)
