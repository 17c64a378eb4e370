"""Equal blocks captured once: the program is that of tracing every block, to the letter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.driver.models.models import build_example
from shardweave.tests.ir.capture.stacks import Block, Holder, Net, both_ways, in_a_row, subclass
from shardweave.tests.marks import slow
from shardweave.tests.torch_versions import copied_blocks

pytestmark = copied_blocks()

REGISTRY: Any = []


# Blocks in which nothing is new


@pytest.mark.parametrize("train", [True, False])
def test_blocks_in_a_row_are_copied_and_traced_at_the_ends(train: bool) -> None:
    seen, _ = both_ways(Net(), train=train)
    assert (len(seen.copied), seen.chains, seen.notes) == (5, [6], [])


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("gpt:layers=5,hidden=64,heads=4,vocab=64,seq=16,batch=2", 5),
        pytest.param("hf:gpt2:n_layer=6", 6, marks=pytest.mark.slow),
        slow("hf:llama:num_hidden_layers=5", 5),
        pytest.param("hf:bert:num_hidden_layers=6", 6, marks=pytest.mark.slow),
        pytest.param("hf:vit:num_hidden_layers=6", 6, marks=pytest.mark.slow),
    ],
)
def test_models_are_captured_alike_with_all_blocks_but_one_copied(spec: str, layers: int) -> None:
    with FakeTensorMode():
        example = build_example(spec)
    seen, text = both_ways(example.module, (), example.kwargs)
    assert "func.func" in text
    assert (len(seen.copied), seen.chains) == (layers - 1, [layers])


@pytest.mark.slow
def test_both_stacks_of_t5_are_captured_alike() -> None:
    with FakeTensorMode():
        example = build_example("hf:t5:num_layers=7")
    seen, text = both_ways(example.module, (), example.kwargs)
    assert "func.func" in text
    # The first block of a stack makes the bias of positions, which the others are given.
    assert (len(seen.copied), seen.chains) == (10, [6, 6])


def _slice(net: Any, x: Tensor) -> Tensor:
    for layer in net.layers[:-1]:
        x = layer(x)
    return net.layers[-1](x) * 2


def _stop_early(net: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(net.layers):
        if index == 5:
            break
        x = layer(x)
    return x


def _shuffled(net: Any, x: Tensor) -> Tensor:
    for index in (3, 1, 0, 2, 5, 4):
        x = net.layers[index](x)
    return x


def _mean(net: Any, x: Tensor) -> Tensor:
    return in_a_row(net, x) / len(net.layers)


def _by_index(net: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(net.layers):
        x = layer(x * (index + 1) / len(net.layers))
    return x


def _all_states(net: Any, x: Tensor) -> Tensor:
    states = []
    for layer in net.layers:
        x = layer(x)
        states.append(x)
    return torch.stack(states).mean(0)


def _dense(net: Any, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = x + layer(x) + x.sum()
    return x


def _unet(net: Any, x: Tensor) -> Tensor:
    down = []
    for layer in net.layers[:3]:
        x = layer(x)
        down.append(x)
    for layer in net.layers[3:]:
        x = layer(x + down.pop())
    return x


def _twice(net: Any, x: Tensor) -> Tensor:
    return in_a_row(net, in_a_row(net, x))


def _each_twice(net: Any, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(layer(x))
    return x


def _one_shared(net: Any, x: Tensor) -> Tensor:
    for _ in range(6):
        x = net.layers[0](x)
    return x


def _no_gradient_at_first(net: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(net.layers):
        torch.set_grad_enabled(index > 1)
        x = layer(x)
    return x


def _detached(net: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(net.layers):
        x = layer(x.detach() if index == 2 else x)
    return x


def _in_half_precision(net: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(net.layers):
        with torch.autocast("cpu", torch.bfloat16, enabled=index > 3):
            x = layer(x)
    return x


def _outer_state(net: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(net.layers):
        net.state.factor = index
        x = layer(x)
    net.state.factor = 1
    return x


@pytest.mark.parametrize(
    ("body", "num_blocks", "num_copied", "chains"),
    [
        (_slice, 6, 4, [5]),
        slow(_stop_early, 6, 4, [5]),
        slow(_shuffled, 6, 5, [6]),
        slow(_mean, 6, 5, [6]),
        slow(_by_index, 6, 5, []),
        slow(_all_states, 6, 5, []),
        slow(_dense, 6, 5, []),
        (_unet, 6, 4, []),
        slow(_twice, 6, 5, []),
        slow(_each_twice, 6, 5, []),
        (_one_shared, 6, 0, []),
        slow(_no_gradient_at_first, 8, 4, [5]),
        slow(_detached, 8, 6, [5]),
        slow(_in_half_precision, 6, 0, []),
        slow(_outer_state, 6, 0, []),
    ],
)
def test_code_around_blocks_runs_for_each(
    body: Any, num_blocks: int, num_copied: int, chains: list[int]
) -> None:
    seen, text = both_ways(Net(body, num_blocks))
    assert "func.func" in text
    assert (len(seen.copied), seen.chains) == (num_copied, chains)


# Blocks that read what is their own


def _refused(reads: Callable[[Any], Any], base: type[Block] = Block) -> type[Block]:
    forward = {"forward": lambda self, x: x + self.change(x) * reads(self)}
    return type("Own", (base,), forward)


@pytest.mark.parametrize(
    "reads",
    [
        lambda self: self.index,
        slow(lambda self: 2 if self.index == 5 else 3),
        slow(lambda self: getattr(self, "index", 0) % 2),
        slow(lambda self: self.__dict__["index"]),
        slow(lambda self: vars(self)["index"]),
        slow(lambda self: self.list[0]),
        slow(lambda self: self.object.index),
        lambda self: self.closure(),
    ],
)
def test_a_block_that_reads_its_index_is_not_copied(reads: Any) -> None:
    base = Holder if reads.__code__.co_names[0] in ("list", "object", "closure") else Block
    seen, text = both_ways(Net(block=_refused(reads, base)))
    assert "func.func" in text
    assert (seen.copied, seen.chains) == ([], [])


def test_an_index_that_the_model_has_read_before_counts_as_read() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        return in_a_row(net, x) * sum(vars(layer)["index"] for layer in net.layers)

    def reading(net: Any, x: Tensor) -> Tensor:
        return in_a_row(net, x * sum(vars(layer)["index"] for layer in net.layers))

    for read in (body, reading):
        seen, _ = both_ways(Net(read, block=_refused(lambda self: vars(self)["index"])))
        assert seen.copied == []


def _list_of_blocks(net: Any) -> Any:
    return list(net.layers)


def _by_identity(net: Any) -> Any:
    return {id(layer): index for index, layer in enumerate(net.layers)}


@pytest.mark.parametrize(
    ("registry", "reads"),
    [
        (_list_of_blocks, lambda self: 2 if self is REGISTRY[-1] else 3),
        (_by_identity, lambda self: REGISTRY[id(self)]),
    ],
)
def test_a_block_that_finds_itself_in_a_global_is_not_copied(registry: Any, reads: Any) -> None:
    global REGISTRY
    net = Net(block=_refused(reads))
    REGISTRY = registry(net)
    seen, _ = both_ways(net)
    assert seen.copied == []
    assert "code reads blocks by" in seen.notes[-1]


def test_a_block_that_finds_itself_in_a_shared_object_is_not_copied() -> None:
    net = Net(block=_refused(lambda self: 2 if self is self.shared[0][-1] else 3))
    shared = [list(net.layers)]
    layers: Any = net.layers
    for layer in layers:
        layer.shared = shared
    seen, _ = both_ways(net)
    assert seen.copied == []


def test_state_that_the_model_changes_between_blocks_is_seen() -> None:
    net = Net(_outer_state, block=_refused(lambda self: self.shared.factor))
    layers: Any = net.layers
    for layer in layers:
        layer.shared = net.state
    seen, text = both_ways(net)
    assert "other = 5" in text
    assert seen.copied == []


def test_a_block_that_counts_is_refused_either_way() -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        self.index += 1
        return x + self.change(x) * self.index

    seen, text = both_ways(Net(block=subclass(forward=count)))
    assert "Python state" in text
    assert seen.copied == []


def test_buffers_that_blocks_change_are_not_copied() -> None:
    class Normalised(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.batch_norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.batch_norm(self.change(x).flatten(0, 1)).view_as(x)

    seen, text = both_ways(Net(block=Normalised))
    assert "func.func" in text
    assert seen.copied == []
