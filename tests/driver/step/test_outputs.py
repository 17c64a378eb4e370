"""A step returns what the model returns, and takes what its forward takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardweave as sw
from shardweave.driver.models.models import build_example
from shardweave.tests.driver.step.models import (
    F64,
    Normed,
    assert_same_state,
    batch,
    close,
    compiled,
)


@dataclass
class Result:
    """An output that torch does not take apart by itself."""

    loss: Tensor
    logits: Any
    note: str = "plain"


class Pair(NamedTuple):
    """A tuple with names."""

    loss: Tensor
    logits: Tensor


class Returning(nn.Module):
    """A linear map, and a function that makes the output of its result."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=F64)
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.linear(x))


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "loss": lambda y: y.square().mean(),
    "tuple": lambda y: (y.square().mean(), y, y.sum(1)),
    "list": lambda y: [y.square().mean(), [y, (y + 1,)]],
    "dict": lambda y: {"logits": y, "loss": y.square().mean(), "none": None, "word": "w", "n": 3},
    "only scalar": lambda y: {"hidden": y, "score": y.square().mean(), "count": torch.ones(2)},
    "last in a tuple": lambda y: (y, y.square().mean()),
    "dataclass": lambda y: Result(y.square().mean(), y),
    "nested": lambda y: Result(y.square().mean(), {"parts": [Result(y.sum(), y), None]}, "outer"),
    "named tuple": lambda y: Pair(y.square().mean(), y),
    "the same twice": lambda y: (y.square().mean(), y, y),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_is_that_of_the_model(name: str) -> None:
    model = Returning(OUTPUTS[name])
    x = torch.randn(4, 4, dtype=F64)
    step = compiled(model, {"x": x}, mesh="data=2")
    expected = model(x)
    found = step(x)
    assert type(found) is type(expected)
    _compare(found, expected)
    loss = expected if name == "loss" else _loss(expected)
    loss.backward()
    assert_same_state(step, model)
    step.eval()
    _compare(step(x), model(x))


def _loss(output: Any) -> Tensor:
    leaves = (
        list(output.values())
        if isinstance(output, dict)
        else list(vars(output).values())
        if isinstance(output, Result)
        else output
    )
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim == 0)


def _compare(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        close(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _compare(found[key], expected[key])
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _compare(one, other)
    elif isinstance(expected, Result):
        _compare(vars(found), vars(expected))
    else:
        assert found == expected


def test_hugging_face_output_has_loss_and_logits_and_no_cache() -> None:
    example = build_example(
        "hf:gpt2:n_layer=1,n_embd=8,n_head=2,vocab_size=16,seq=4,batch=2", dtype=F64
    )
    model, inputs = example.module, example.kwargs
    config: Any = model.config
    config.use_cache = True
    step = compiled(model, inputs)
    assert config.use_cache is True
    found, expected = step(**inputs), model(**inputs)
    assert type(found) is type(expected)
    assert set(found) == {"loss", "logits"}
    close(found.loss, expected.loss)
    close(found.logits, expected.logits)
    expected.loss.backward()
    assert_same_state(step, model)
    step.eval()
    only_ids = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    assert set(step(**only_ids)) == {"logits"}
    with pytest.raises(
        TypeError,
        match=r"no parameter 'label', and would take and ignore it .*; did you mean 'labels'\?",
    ):
        step(**only_ids, label=inputs["labels"])


def _two(y: Tensor) -> dict[str, Tensor]:
    return {"ce": y.square().mean(), "aux": y.abs().mean(), "logits": y}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("aux", lambda out: out["aux"]), (lambda out: out["ce"] + 0.5 * out["aux"], None)],
    ids=["key", "function"],
)
def test_loss_is_what_is_chosen(choice: Any, expected: Any) -> None:
    model = Returning(_two)
    x = torch.randn(4, 4, dtype=F64)
    step = compiled(model, {"x": x}, mesh="data=2", loss=choice)
    found, wanted = step(x), model(x)
    if expected is None:
        loss, found = found
        close(loss, choice(wanted))
    (expected or choice)(wanted).backward()
    _compare(found, wanted)
    assert_same_state(step, model)


def test_loss_alone_is_returned_if_that_is_all_that_is_wanted() -> None:
    model = Returning(_two)
    x = torch.randn(4, 4, dtype=F64)
    step = compiled(model, {"x": x}, mesh="data=2", loss="ce", only_loss=True)
    close(step(x), model(x)["ce"])
    outputs = [slot.name for slot in step.program.results if slot.kind == "output"]
    assert outputs == ["loss"]
    step.eval()
    _compare(step(x), model(x))


def test_loss_may_be_chosen_by_index() -> None:
    model = Returning(lambda y: (y.abs().mean(), y.square().mean()))
    x = torch.randn(4, 4, dtype=F64)
    step = compiled(model, {"x": x}, mesh="data=2", loss=1)
    step(x)
    model(x)[1].backward()
    assert_same_state(step, model)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (_two, "returns several scalars and no 'loss' among them; say which it is: loss="),
        (lambda y: y, "the model's output has no scalar loss"),
        (lambda y: {"loss": y}, r"the loss has shape \(4, 4\); reduce it to a scalar"),
        (lambda y: {"loss": 3.0}, "the loss is a float; return a tensor"),
        (lambda y: {"loss": y.sum(), "what": object()}, "object"),
    ],
    ids=["several", "none", "no scalar", "number", "object"],
)
def test_output_without_a_loss_is_refused(output: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(sw.CaptureError, match=message):
        compiled(Returning(output), {"x": torch.randn(4, 4, dtype=F64)}, mesh="data=2")


def test_function_for_the_loss_takes_the_output_alone() -> None:
    for criterion in (nn.CrossEntropyLoss(), lambda out, y: (out - y).sum()):
        with pytest.raises(TypeError, match="loss= is called with what the model returns, and no"):
            compiled(Normed(), batch(), loss=criterion)


def test_backward_of_the_loss_says_that_it_ran() -> None:
    step = compiled(Normed(), batch())
    loss, out = step(**batch())
    for again in (loss, loss / 4, loss + step.get_parameter("up.bias").sum()):
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"backward ran in the step already: gradients are in"
            ):
                again.backward(retain_graph=True)
    for again in (out.sum(), nn.functional.mse_loss(out, batch()["y"]), loss + out.sum()):
        with pytest.raises(RuntimeError, match=r"or by sw.compile\(.., loss=function\)"):
            again.backward()


def test_gradients_are_not_asked_of_autograd_either() -> None:
    step = compiled(Normed(), batch())
    inputs = batch()
    inputs["x"].requires_grad_()
    loss, out = step(**inputs)
    for wanted in (list(step.parameters()), [inputs["x"]]):
        for result in (loss, out.sum()):
            for unused in (False, True):
                with pytest.raises(RuntimeError, match=r"the step"):
                    torch.autograd.grad(result, wanted, allow_unused=unused, retain_graph=True)


def test_penalty_of_the_parameters_may_have_a_backward_of_its_own() -> None:
    model = Normed()
    step = compiled(model, batch())
    inputs = batch()
    step(**inputs)
    sum(p.square().sum() for p in step.parameters()).backward()  # type: ignore[union-attr]
    penalty = sum(p.square().sum() for p in model.parameters())
    (model(**inputs)[0] + penalty).backward()
    assert_same_state(step, model)


class Scored(nn.Module):
    """A loss, logits, logits once more without a graph, and their accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=F64)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.fc(x)
        right = (out.argmax(1) == y.argmax(1)).double().mean()
        return {
            "loss": nn.functional.mse_loss(out, y),
            "logits": out,
            "detached": out.detach(),
            "accuracy": right,
            "labels": y,
        }


def test_what_is_returned_requires_gradients_where_eager_does() -> None:
    model = Scored()
    step = compiled(model, batch())
    found, wanted = step(**batch()), model(**batch())
    assert {name: x.requires_grad for name, x in found.items()} == {
        name: x.requires_grad for name, x in wanted.items()
    }
    loss = found["loss"]
    loss /= 2
    found["logits"].add_(1)
    step.requires_grad_(False)
    assert not any(x.requires_grad for x in step(**batch()).values())
    step.fc.bias.requires_grad_(True)
    assert step(**batch())["logits"].requires_grad


METRICS: dict[str, Callable[[Tensor], Any]] = {
    "first": lambda y: (y.detach().abs().mean(), y.square().mean()),
    "loss": lambda y: {"loss": y.detach().mean(), "logits": y},
    "constant": lambda y: (torch.ones((), dtype=F64), y, y.square().mean()),
}


@pytest.mark.parametrize("name", METRICS)
def test_gradients_come_from_other_outputs_where_the_first_scalar_has_none(name: str) -> None:
    model = Returning(METRICS[name])
    inputs = {"x": torch.randn(4, 4, dtype=F64)}
    step = compiled(model, inputs, backward="autograd")
    for made in (step, model):
        for _ in range(2):
            leaves = pytree.tree_leaves(made(**inputs))
            assert not leaves[0].requires_grad
            torch.stack([x.square().sum() for x in leaves if x.requires_grad]).sum().backward()
    assert_same_state(step, model)


def test_model_whose_outputs_have_no_gradient_runs_as_in_eager() -> None:
    model = Returning(lambda y: y.detach().mean())
    inputs = {"x": torch.randn(4, 4, dtype=F64)}
    step = compiled(model, inputs, backward="autograd")
    close(step(**inputs), model(**inputs))


def test_arguments_are_those_of_forward() -> None:
    model = Normed()
    inputs = batch()
    step = compiled(model, inputs)
    with torch.no_grad():
        expected = model(**inputs)[0]
        model.norm.reset_running_stats()
    for call in (
        lambda: step(inputs["x"], inputs["y"]),
        lambda: step(inputs["x"], y=inputs["y"]),
        lambda: step(y=inputs["y"], x=inputs["x"]),
    ):
        close(call()[0], expected)
    assert len(step.programs.kept()) == 1
    for kwargs, message in (
        (
            {"x": inputs["x"], "yy": inputs["y"]},
            r"no parameter 'yy'; did you mean 'y'\? it has x, y",
        ),
        (
            {"x": inputs["x"]},
            "takes the arguments of the model's forward, x, y: missing a required argument: 'y'",
        ),
        ({**inputs, "z": inputs["x"]}, "no parameter 'z'"),
    ):
        with pytest.raises(TypeError, match=message):
            step(**kwargs)


def test_input_that_the_model_does_not_read_is_noted() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=F64)

        def forward(self, x: Tensor, **more: Tensor) -> Tensor:
            return self.linear(x).square().sum()

    x = torch.randn(4, 4, dtype=F64)
    with pytest.warns(
        sw.PlanNote, match="input 'weights' has no effect: the model does not read it"
    ):
        compiled(Reader(), {"x": x, "weights": x}, mesh="data=2")


class Deep(nn.Module):
    """Equal blocks, whose outputs are all returned, with constants among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(6)
        )
        self.double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        states: list[Tensor] = []
        for block in self.blocks:
            x = x + block(x)
            states.append(x)
        return {"states": states, "none": None, "loss": x.square().mean(), "more": [None, 6]}


def _assert_deep(model: Deep) -> None:
    x = torch.randn(4, 4, dtype=F64)
    step = compiled(model, {"x": x})
    found, expected = step(x), model(x)
    _compare(found, expected)
    expected["loss"].backward()
    assert_same_state(step, model)


def test_states_of_every_equal_block_are_returned() -> None:
    _assert_deep(Deep())


def test_loss_of_many_equal_blocks_comes_with_constants() -> None:
    class Last(Deep):
        def forward(self, x: Tensor) -> dict[str, Any]:
            output = super().forward(x)
            return {**output, "states": output["states"][-1]}

    _assert_deep(Last())
