"""Blocks that differ, or share something with others, captured as if every block were traced."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.tests.ir.capture.stacks import Net, both_ways, subclass
from shardweave.tests.marks import slow
from shardweave.tests.torch_versions import copied_blocks

pytestmark = copied_blocks()


def _other_epsilon(net: Any) -> None:
    net.layers[5].norm = nn.LayerNorm(8, eps=1e-3)


def _other_class(net: Any) -> None:
    net.layers[5] = subclass(forward=lambda self, x: x - self.change(x))()


def _frozen(net: Any) -> None:
    net.layers[5].a.weight.requires_grad_(False)


def _parameter_hook(net: Any) -> None:
    net.layers[5].a.weight.register_hook(lambda gradient: gradient * 2)


def _forward_hook(net: Any) -> None:
    net.layers[5].a.register_forward_hook(lambda module, args, output: output * 2)


def _patched(net: Any) -> None:
    layer = net.layers[5]
    layer.forward = lambda x: x + layer.a(x)


@pytest.mark.parametrize(
    "change",
    [
        _other_epsilon,
        slow(_other_class),
        slow(_frozen),
        slow(_parameter_hook),
        _forward_hook,
        slow(_patched),
    ],
)
def test_one_block_that_differs_is_traced_and_named(change: Any, caplog: Any) -> None:
    net = Net(num_blocks=11)
    change(net)
    with caplog.at_level(logging.INFO, logger="shardweave.ir.capture.repeats"):
        seen, text = both_ways(net)
    assert "func.func" in text
    assert len(seen.copied) == 9
    assert set(seen.chains) <= {5}
    assert "block layers.5 is traced on its own: unlike layers.0" in caplog.text


def _tied_to_the_first(net: Any) -> None:
    for layer in net.layers:
        layer.a.weight = net.layers[0].a.weight


def _tied_to_the_last_map(net: Any) -> None:
    net.last.weight = net.layers[4].a.weight


def _tied_within(net: Any) -> None:
    for layer in net.layers:
        layer.b.weight = layer.a.weight


@pytest.mark.parametrize(
    ("tie", "chains"),
    [(_tied_to_the_first, []), slow(_tied_to_the_last_map, []), (_tied_within, [6])],
)
def test_shared_parameters_stay_shared(tie: Any, chains: list[int]) -> None:
    net = Net()
    tie(net)
    seen, text = both_ways(net)
    assert "func.func" in text
    assert seen.chains == chains


def test_a_block_that_is_called_under_another_name_has_both() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        for name in ("layers.0", "again", "layers.1", "layers.2"):
            x = net.get_submodule(name)(x)
        return x

    net = Net(body)
    net.again = net.layers[0]
    seen, text = both_ways(net)
    assert 'layer = "again' in text
    assert seen.copied == ["layers.1", "layers.2"]


def test_values_that_run_beside_the_blocks() -> None:
    def two(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.a(y), torch.tanh(self.b(y))

    def swapped(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.b(y)), self.a(x)

    def with_bias(self: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.b(torch.tanh(self.a(x) + bias)), bias

    def with_sum(self: Any, x: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.change(x), loss + x.square().mean()

    def body(net: Any, x: Tensor) -> Tensor:
        y = x * 2
        for layer in net.layers:
            x, y = layer(x, y)
        return x

    for forward in (two, swapped, with_bias, with_sum):
        seen, text = both_ways(Net(body, block=subclass(forward=forward)))
        assert "func.func" in text
        assert (len(seen.copied), seen.chains) == (5, [6])
