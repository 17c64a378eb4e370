"""Layers of torch.nn that are written out or have rules: equal to eager, and cut with the batch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import shardweave as sw
from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import after_call, assert_step_equals_eager

F64 = torch.float64

OF_ROWS = (
    nn.GLU(),
    nn.LogSigmoid(),
    nn.CELU(0.7),
    nn.PReLU(8, dtype=F64),
    nn.Threshold(0.1, 0.2),
    lambda x: F.pairwise_distance(x, x.roll(1, 1), p=1.5),
)
OF_IMAGES = (
    nn.InstanceNorm2d(4, affine=True, dtype=F64),
    nn.PixelShuffle(2),
    nn.PixelUnshuffle(2),
    nn.ChannelShuffle(2),
    nn.Unfold(2),
    nn.AdaptiveMaxPool2d(2),
    lambda x: F.fold(F.unfold(x, 2), (4, 4), 2),
    lambda x: F.pad(x.flatten(2), (1, 2), mode="reflect"),
    lambda x: F.pad(x.flatten(2), (1, 2), mode="replicate"),
)


class WithLayers(nn.Module):
    """The sum of what each layer makes of mapped rows, or of these as images of 4 x 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.images = nn.Linear(4, 8, dtype=F64), nn.Linear(4, 64, dtype=F64)
        self.layers = nn.ModuleList(x for x in OF_ROWS + OF_IMAGES if isinstance(x, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        rows, images = self.rows(x), self.images(x).view(-1, 4, 4, 4)
        results = [layer(rows) for layer in OF_ROWS] + [layer(images) for layer in OF_IMAGES]
        return torch.stack([(y.cos() * y).sum() for y in results]).sum()


def assert_equal_without_gathers(model: nn.Module, *inputs: Tensor) -> None:
    expected = after_call(model, inputs)  # the layers are those of the module, too
    step = sw.compile(model, inputs, mesh="data=2", backend="reference", backward="in_call")
    assert_step_equals_eager(step, expected, *inputs)
    assert {message.kind for message in step.program.stats().collectives} == {"all_reduce"}


def test_layers_equal_eager_and_gather_no_batch() -> None:
    assert_equal_without_gathers(WithLayers(), torch.randn(4, 4, dtype=F64))


class Bags(nn.Module):
    """Bags of four words under every choice of mode, padding and weights, of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3, dtype=F64))

    def forward(self, words: Tensor, weights: Tensor) -> Tensor:
        bags = [
            F.embedding_bag(words, self.table, mode=mode, padding_idx=padding)
            for mode, padding in product(("sum", "mean"), (None, 0, -1))
        ]
        bags += [
            F.embedding_bag(
                words, self.table, mode="sum", per_sample_weights=weights, padding_idx=padding
            )
            for padding in (None, 2)
        ]
        return torch.stack([(bag.cos() * (1 + n)).sum() for n, bag in enumerate(bags)]).sum()


def test_bags_of_one_length_equal_eager_and_gather_no_batch() -> None:
    words = torch.tensor([[0, 0, 0, 0], [4, 1, 0, 4], [2, 2, 2, 2], [1, 2, 3, 4]])
    assert_equal_without_gathers(Bags(), words, torch.randn(4, 4, dtype=F64))


class BagOfLayer(nn.Module):
    """A bag and a lookup, each in a layer that returns something else than its lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 4, dtype=F64)
        self.linear = nn.Linear(4, 4, dtype=F64)

    def forward(self, words: Tensor) -> Tensor:
        looked_up = F.embedding(words, self.linear.weight).sum(1)
        return (self.linear(self.bag(words)) * looked_up).square().mean()


def test_lookup_that_its_layer_does_not_return_is_not_cut_along_the_sequence() -> None:
    model, words = BagOfLayer(), torch.tensor([[0, 1, 2, 3], [3, 3, 1, 0]])
    program = sw.capture(model, (words,))
    plan = sw.plan(program, "tensor=2", "megatron", sequence_parallel=True)
    assert [note for note in plan.notes if "from 'bag': its output is not its lookup" in note]
    step = compile_copy(model, (words,), plan=plan, backend="reference")
    torch.testing.assert_close(step(words), model(words), rtol=1e-12, atol=0)


class Packing(nn.Module):
    """A recurrent layer over rows of different lengths; the last output of each."""

    def __init__(self, *, packs: bool) -> None:
        super().__init__()
        self.cell, self.packs = nn.GRU(4, 4, batch_first=True), packs

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.packs:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.cell(packed)[1].square().sum()
        out, _ = self.cell(x)
        return out[torch.arange(len(lengths)), lengths - 1].square().sum()


def test_packed_sequences_are_refused_with_what_computes_the_same() -> None:
    torch.manual_seed(0)
    model, batch = Packing(packs=True), (torch.randn(4, 3, 4), torch.tensor([3, 1, 2, 3]))
    with pytest.raises(
        sw.CaptureError, match=r"last output .*: out\[torch\.arange\(len\(lengths\)\),"
    ):
        compile_copy(model, batch, backend="reference")
    written = Packing(packs=False)
    written.load_state_dict(model.state_dict())
    step = compile_copy(written, batch, mesh="data=2", backend="reference")
    torch.testing.assert_close(step(*batch), model(*batch).detach())
