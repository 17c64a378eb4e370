"""The repeated blocks of a model: found in its module tree, stored, and recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from shardweave.backends.reference.reference import run_reference, values_of
from shardweave.driver.checking.check import run_eager
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.capture.module_tree import block_paths
from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.program.blocks import BLOCKS, Blocks, blocks_of
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.tests.zoo import GRADIENT_BOUND, LOSS_BOUND, SPECS, gradient_errors

HIDDEN = 4


class Mlp(nn.Module):
    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.fc_in = nn.Linear(width, 2 * width)
        self.fc_out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc_out(torch.tanh(self.fc_in(x)))


class Widen(nn.Module):
    """The first block of a stage of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x))


class Stage(nn.Module):
    """As in Swin: blocks of one width, and a change of width behind them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.widen = Widen(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.widen(x)


class Mixture(nn.Module):
    """A block that holds a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 2)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        first, second = self.experts
        return weights[..., :1] * first(x) + weights[..., 1:] * second(x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    """Modules that run one after another, the names of `calls` in this order, and a loss."""

    def __init__(self, modules: dict[str, nn.Module], calls: Sequence[str] = ()) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, HIDDEN)
        for name, module in modules.items():
            self.add_module(name, module)
        self.calls = tuple(calls or modules)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for name in self.calls:
            module = self.get_submodule(name)
            is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
            for member in module.children() if is_list else [module]:
                x = member(x)
        return torch.square(x).sum()


def attributes() -> nn.Module:
    return Net({"first": Mlp(), "second": Mlp()})


def dictionary() -> nn.Module:
    return Net({"parts": nn.ModuleDict({"low": Mlp(), "high": Mlp()})})


def resnet() -> nn.Module:
    stages = [nn.Sequential(Mlp(), Mlp()), nn.Sequential(Mlp(), Mlp())]
    return Net({"stages": nn.ModuleList(stages)})


def swin() -> nn.Module:
    return Net({"stages": nn.ModuleList([Stage(HIDDEN, 2), Stage(2 * HIDDEN, 2)])})


def uneven_stages() -> nn.Module:
    stages = [Stage(HIDDEN, 1), Stage(2 * HIDDEN, 3)]
    return Net({"stages": nn.ModuleList(stages)})


def equal_modules_with_lists() -> nn.Module:
    return Net({"h": nn.ModuleList(Mixture() for _ in range(2))})


def towers() -> nn.Module:
    return Net({"query": Tower(), "key": Tower()})


def one_under_two_names() -> nn.Module:
    block = Mlp()
    return Net({"first": block, "second": block, "third": Mlp()})


def called_twice() -> nn.Module:
    return Net({"body": Mlp()}, ["body", "body"])


def one_in_a_list() -> nn.Module:
    return Net({"h": nn.ModuleList([Mlp()])})


def odd_one_between() -> nn.Module:
    return Net({"down": nn.ModuleList([Mlp(), nn.Linear(HIDDEN, HIDDEN), Mlp()])})


def equal_layers() -> nn.Module:
    return Net({"net": nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(2)))})


def unequal_layers() -> nn.Module:
    fc = nn.Linear(HIDDEN, HIDDEN)
    return Net({"net": nn.Sequential(fc, nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))})


def one_block() -> nn.Module:
    return Net({"body": Mlp()})


CASES: list[tuple[Callable[[], nn.Module], tuple[str, ...], bool]] = [
    (attributes, ("first", "second"), True),
    (dictionary, ("parts.low", "parts.high"), True),
    (resnet, ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"), True),
    (
        swin,
        ("stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"),
        True,
    ),
    (
        uneven_stages,
        ("stages.0.blocks.0", *(f"stages.1.blocks.{n}" for n in range(3))),
        True,
    ),
    (equal_modules_with_lists, ("h.0", "h.1"), False),
    (towers, ("query.layers.0", "query.layers.1", "key.layers.0", "key.layers.1"), False),
    (one_under_two_names, ("first", "second", "third"), True),
    (called_twice, ("body",), True),
    (one_in_a_list, ("h.0",), False),
    (odd_one_between, ("down.0", "down.1", "down.2"), False),
    (equal_layers, ("net.0", "net.1"), False),
    (unequal_layers, (), True),
    (one_block, (), False),
]
"""A model, its blocks, and whether they have to be stored: digits would say something else."""


def made(model: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor], Program]:
    torch.manual_seed(0)
    module = model().double()
    inputs = {"x": torch.randn(2, HIDDEN, dtype=torch.float64)}
    return module, inputs, capture(module, kwargs=inputs)


@pytest.mark.parametrize(("model", "names", "is_stored"), CASES)
def test_blocks_of_a_captured_model(
    model: Callable[[], nn.Module], names: tuple[str, ...], is_stored: bool
) -> None:
    _, _, program = made(model)
    assert blocks_of(program).names == names
    assert (BLOCKS in program.module.attributes) == is_stored
    again = Program.parse(str(program))
    assert again == program
    assert blocks_of(again) == blocks_of(program.clone()) == blocks_of(program)
    local = run_passes(program, "propagate-shardings,insert-collectives,cse,dce", mesh="data=1")
    assert blocks_of(local) == blocks_of(program)


@pytest.mark.parametrize(("model", "names"), [case[:2] for case in CASES if case[1]])
def test_every_block_is_recomputed_and_the_step_stays_equal_to_eager(
    model: Callable[[], nn.Module], names: tuple[str, ...]
) -> None:
    module, inputs, program = made(model)
    again = run_passes(program, 'rematerialize{policy="layer"}')
    clones = [op for op in again.ops if phase_of(op) == "recompute"]
    blocks = blocks_of(program)
    # What a single linear map reads and returns is kept anyhow.
    idle = {"down.1", "net.0", "net.1"}
    assert {blocks.of_op(op) for op in clones} == set(names) - idle
    eager = run_eager(module, inputs)
    results = run_reference(again, values_of(again, module, inputs))
    loss = results["output", "0"].item()
    assert abs(loss - eager.loss) <= LOSS_BOUND * abs(eager.loss)
    gradients = {name: value for (kind, name), value in results.items() if kind == "grad"}
    errors = gradient_errors(gradients, eager.gradients)
    assert max(errors.values()) <= GRADIENT_BOUND


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gpt", ("h.0", "h.1")),
        ("gpt2", ("transformer.h.0", "transformer.h.1")),
        ("llama", ("model.layers.0", "model.layers.1")),
        ("bert", ("bert.encoder.layer.0", "bert.encoder.layer.1")),
        ("vit", ("vit.layers.0", "vit.layers.1")),
        ("t5", tuple(f"{part}.block.{n}" for part in ("encoder", "decoder") for n in range(2))),
        ("unet", (*(f"down.{n}" for n in range(3)), *(f"up.{n}" for n in range(5)))),
        ("cnn", tuple(f"stages.{n}.0" for n in range(4))),
    ],
)
def test_blocks_of_the_zoo(model: str, names: tuple[str, ...]) -> None:
    assert tuple(block_paths(build_example(SPECS[model]).module)) == names


TEXT = """
builtin.module {{
  func.func @step(%x: tensor<4xf64> {{dist.kind = "input", dist.name = "x"}}) -> tensor<4xf64> {{
{ops}
    func.return %y : tensor<4xf64>
  }}
}}
"""


def written(*layers: str) -> Program:
    """A program by hand with one op for each layer, alternately tanh and relu."""
    names = ["x", *(f"v{n}" for n in range(len(layers) - 1)), "y"]
    ops = [
        f"    %{names[n + 1]} = aten.{('tanh', 'relu')[n % 2]}(%{names[n]}) "
        f'{{layer = "{layer}", phase = forward}} : tensor<4xf64>'
        for n, layer in enumerate(layers)
    ]
    return Program.parse(TEXT.format(ops="\n".join(ops)))


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (("h.0.a", "h.0.b", "h.1.a", "h.1"), ("h.0", "h.1")),
        (("a.0.b.1", "c"), ("a.0",)),
        (("low.a", "low.b", "high.a", "high.c"), ()),
        (("", "a"), ()),
    ],
)
def test_blocks_of_a_text_without_the_attribute(
    layers: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert blocks_of(written(*layers)).names == names


def test_attribute_wins_over_the_names_of_layers() -> None:
    text = str(written("h.0.a.2", "h.0.b", "h.1.a"))
    attribute = f'builtin.module attributes {{{BLOCKS} = ["h.0.a", "h.1"]}}'
    blocks = blocks_of(Program.parse(text.replace("builtin.module", attribute)))
    assert blocks.names == ("h.0.a", "h.1")
    assert blocks.of_layer("h.0.a.2") == "h.0.a"
    assert blocks.of_layer("h.0.b") is None


def test_attribute_of_another_form_is_refused() -> None:
    text = str(written("a", "b")).replace(
        "builtin.module", 'builtin.module attributes {dist.blocks = ["a", 1]}'
    )
    with pytest.raises(
        ValueError, match=r'dist.blocks is .* expected a list of module paths, as \["h.0"'
    ):
        blocks_of(Program.parse(text))


def test_a_name_is_no_prefix_of_another() -> None:
    blocks = Blocks(("h.1",))
    assert blocks.of_layer("h.1.mlp.fc") == "h.1"
    assert blocks.of_layer("h.10.mlp") is None
    assert blocks.of_layer("") is None
    program = written("h.1.fc", "h.10")
    assert [blocks.of_op(op) for op in program.ops] == ["h.1", None]
    assert layer_of(next(program.ops)) == "h.1.fc"
