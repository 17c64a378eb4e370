"""Capture: one exact global program of a training step, in which every op knows where it is from."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from xdsl.dialects.builtin import FileLineColLoc

from shardweave.backends.reference.reference import run_reference, values_of
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.ir.capture.trace import trace
from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import verify
from shardweave.tests.compiled import compile_copy
from shardweave.tests.zoo import SPECS, captured

every_model = pytest.mark.parametrize("name", SPECS)


@pytest.fixture(autouse=True)
def own_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace each model here, be it one that another test has traced."""
    monkeypatch.setattr("shardweave.ir.capture.capture.trace", trace)


class Model(nn.Module):
    """A linear map, more modules by name, and a function of these that is the forward pass."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def x() -> Tensor:
    return torch.randn(2, 4, dtype=torch.float64)


def slots(program: Program, kind: str) -> list[str]:
    """Names of the results of one kind."""
    return [slot.name for slot in program.results if slot.kind == kind]


@pytest.mark.parametrize(
    "modules",
    [[("0", "0.weight")], [("Größe", "Größe.weight")], [("a b", "a b.weight"), ("a_b", "")]],
    ids=["number", "letters", "blank"],
)
def test_modules_of_any_name_are_captured_and_read_back(modules: list[tuple[str, str]]) -> None:
    model = nn.Sequential()
    for name, _ in modules:
        model.add_module(name, nn.Linear(4, 4, dtype=torch.float64))
    program = capture(model, [x()], train=False)
    assert modules[0][1] in [slot.name for slot in program.arguments]
    assert Program.parse(str(program)) == program
    value = x()
    results = run_reference(program, values_of(program, model, {"input": value}))
    torch.testing.assert_close(results["output", "0"], model(value).detach())


def test_bare_sequential_is_captured_with_names_that_begin_with_a_letter() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.ReLU())
    program = capture(model, [x()], train=False)
    hints = {slot.name: slot.value.name_hint for slot in program.arguments}
    assert hints["0.weight"] == "param.0.weight"


# Where ops come from. (That programs equal eager is in tests/benchmarks/test_models.py.)


@every_model
def test_every_op_has_a_layer_a_phase_and_its_line_in_the_users_source(name: str) -> None:
    program = captured(SPECS[name]).program
    ops = list(program.ops)
    assert verify(program) == []
    assert all("layer" in op.properties and "phase" in op.properties for op in ops)
    located = [op for op in ops if isinstance(op.location, FileLineColLoc)]
    assert len(located) >= 0.9 * len(ops)


@every_model
def test_layers_are_modules_of_the_model(name: str) -> None:
    case = captured(SPECS[name])
    modules = {module for module, _ in case.example.module.named_modules()}
    assert set(case.program.layers()) <= modules


@every_model
def test_backward_ops_belong_to_the_layers_of_the_forward_pass(name: str) -> None:
    ops = list(captured(SPECS[name]).program.ops)
    forward = {layer_of(op) for op in ops if phase_of(op) == "forward"}
    backward = [layer_of(op) for op in ops if phase_of(op) == "backward"]
    in_layers = [layer for layer in backward if layer]
    assert len(in_layers) >= 0.85 * len(backward)
    prefixes = {layer[:n] for layer in forward for n in range(len(layer) + 1)}
    assert set(backward) <= prefixes


@every_model
def test_backward_ops_are_those_that_depend_on_the_tangent(name: str) -> None:
    program = captured(SPECS[name]).program
    dependent = {slot.value for slot in program.arguments if slot.kind == "tangent"}
    assert len(dependent) == 1
    for op in program.ops:
        is_dependent = not dependent.isdisjoint(op.operands)
        assert (phase_of(op) == "backward") == is_dependent
        if is_dependent:
            dependent.update(op.results)


def test_equal_layers_have_equal_bodies() -> None:
    layers = captured(SPECS["gpt"]).program.layers()
    bodies = [
        [(op.name, str(op.result_types)) for n, ops in layers.items() if n.startswith(f"h.{i}.") for op in ops]
        for i in range(2)
    ]  # fmt: skip
    assert bodies[0] == bodies[1]
    assert len(bodies[0]) > 30


# Arguments and results.


@every_model
def test_every_parameter_is_an_argument_with_a_gradient_of_its_type(name: str) -> None:
    case = captured(SPECS[name])
    parameters = {s.name: s for s in case.program.arguments if s.kind == "param"}
    assert set(parameters) == set(dict(case.example.module.named_parameters()))
    for slot in case.program.results:
        if slot.kind == "grad":
            assert slot.value.type == parameters[slot.name].value.type
    assert set(slots(case.program, "grad")) == set(parameters)


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("gpt", "wte.weight", ("head.weight",)),
        ("gpt2", "transformer.wte.weight", ("lm_head.weight",)),
        (
            "t5",
            "shared.weight",
            ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
        ),
    ],
)
def test_tied_parameters_are_one_argument_that_knows_all_its_names(
    name: str, first: str, others: tuple[str, ...]
) -> None:
    arguments = {slot.name: slot for slot in captured(SPECS[name]).program.arguments}
    assert arguments[first].aliases == others
    assert not set(others) & set(arguments)


def test_updated_buffers_are_results_and_the_model_keeps_its_own() -> None:
    case = captured(SPECS["cnn"])
    updated = slots(case.program, "buffer")
    assert set(updated) == set(dict(case.example.module.named_buffers()))
    assert case.example.module.get_buffer("bn_in.num_batches_tracked").item() == 0


def test_inputs_are_named_as_they_were_passed() -> None:
    model = Model(lambda self, a, b, scale: (self.linear(a + b) * scale).sum())
    program = capture(model, [x(), x()], {"scale": x()})
    assert [s.name for s in program.arguments if s.kind == "input"] == ["arg0", "arg1", "scale"]


def test_unused_input_is_an_argument_and_its_shape_is_checked() -> None:
    model = Model(lambda self, a, unused: self.linear(a).sum())
    assert [s.name for s in capture(model, (x(), x())).arguments if s.kind == "input"] == [
        "arg0", "arg1",
    ]  # fmt: skip
    step = compile_copy(model, (x(), x()), backend="reference", dynamic=False)
    with pytest.raises(ValueError, match="arg1"):
        step(x(), x()[:1])


def test_unused_parameter_is_no_argument_and_has_no_gradient() -> None:
    model = Model(lambda self, a: self.linear(a).sum(), spare=nn.Linear(3, 3))
    program = capture(model, [x()])
    assert [s.name for s in program.arguments if s.kind == "param"] == [
        "linear.weight",
        "linear.bias",
    ]
    assert slots(program, "grad") == ["linear.weight", "linear.bias"]


def test_frozen_parameter_is_an_argument_without_a_gradient() -> None:
    model = Model(lambda self, a: self.linear(a).square().sum())
    model.linear.weight.requires_grad_(False)
    program = capture(model, [x()])
    assert [s.name for s in program.arguments if s.kind == "param"] == [
        "linear.weight",
        "linear.bias",
    ]
    assert slots(program, "grad") == ["linear.bias"]


def test_gradient_of_an_input_that_requires_one_is_an_output() -> None:
    program = capture(Model(lambda self, a: self.linear(a).sum()), [x().requires_grad_()])
    assert slots(program, "grad") == ["linear.weight", "linear.bias"]
    assert slots(program, "output") == ["0", "gradient of arg0"]


@pytest.mark.parametrize(
    "returned",
    [
        lambda loss, y: loss,
        lambda loss, y: (loss, y),
        lambda loss, y: [(loss,), y],
        lambda loss, y: {"logits": y, "loss": loss},
    ],
)
def test_loss_is_found_in_what_the_model_returns(returned: Callable[..., Any]) -> None:
    model = Model(lambda self, a: returned((y := self.linear(a)).square().sum(), y))
    program = capture(model, [x()])
    assert slots(program, "output") == ["0"]
    assert len(slots(program, "grad")) == 2


# What capturing leaves alone.


def test_capturing_changes_nothing_about_the_model() -> None:
    model = Model(lambda self, a: self.norm(self.linear(a)).sum(), norm=nn.BatchNorm1d(4).double())
    model.norm.eval()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, [x()])
    capture(model, [x()], train=False)
    assert [module.training for module in model.modules()] == [True, True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_capturing_twice_gives_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    example = build_example(SPECS["bert"])
    first = capture(example.module, kwargs=example.kwargs)
    monkeypatch.setattr("shardweave.ir.capture.capture.trace", trace)  # no trace that is shared
    assert str(capture(example.module, kwargs=example.kwargs)) == str(first)


def test_failed_capture_does_not_spoil_the_next() -> None:
    with pytest.raises(CaptureError):
        capture(Model(lambda self, a: self.linear(a)), [x()])
    assert slots(capture(Model(lambda self, a: self.linear(a).sum()), [x()]), "output") == ["0"]


# Inference, fake parameters.


def test_inference_has_outputs_alone_and_runs_in_evaluation_mode() -> None:
    model = Model(
        lambda self, a: self.norm(self.drop(self.linear(a))),
        drop=nn.Dropout(0.5),
        norm=nn.BatchNorm1d(4).double(),
    )
    model(x())  # gives batch norm statistics that are not its first ones
    inputs = x()
    program = capture(model, [inputs], train=False)
    assert {slot.kind for slot in program.results} == {"output"}
    assert {phase_of(op) for op in program.ops} == {"forward"}
    values = values_of(program, model, {"arg0": inputs})
    model.eval()
    torch.testing.assert_close(run_reference(program, values)["output", "0"], model(inputs))


def test_inference_gives_every_output_of_a_tuple_and_the_logits_of_a_dict() -> None:
    pair = Model(lambda self, a: (self.linear(a), a + 1))
    assert slots(capture(pair, [x()], train=False), "output") == ["0", "1"]
    logits = Model(lambda self, a: {"hidden": a, "logits": self.linear(a)})
    assert slots(capture(logits, [x()], train=False), "output") == ["0"]


@pytest.mark.parametrize("name", ["gpt", "llama", "cnn"])
def test_fake_parameters_give_the_program_of_real_ones(name: str) -> None:
    with FakeTensorMode():
        example = build_example(SPECS[name], dtype=torch.float64)
        program = capture(example.module, kwargs=example.kwargs)
    assert program == captured(SPECS[name]).program


def test_parameters_larger_than_memory_are_captured_when_fake() -> None:
    with FakeTensorMode():
        example = build_example(
            "gpt:layers=1,hidden=65536,heads=512,vocab=262144,seq=8192,batch=64"
        )
        program = capture(example.module, kwargs=example.kwargs)
    assert program.stats().parameter_bytes > 2**37


# What autograd does that a graph could lose.


class Doubled(torch.autograd.Function):
    """The identity, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.parametrize(
    "function",
    [
        lambda self, a: Doubled.apply(self.linear(a)).square().sum(),
        lambda self, a: checkpoint(self.linear, a, use_reentrant=False).square().sum(),
        lambda self, a: self.linear(a.detach()).square().sum() + self.linear(a).detach().sum(),
        lambda self, a: self.linear(self.linear(a)).square().sum(),
    ],
    ids=["custom-function", "checkpoint", "detach", "used-twice"],
)
def test_gradients_are_those_of_eager(function: Callable[..., Any]) -> None:
    model, inputs = Model(function), x()
    program = capture(model, [inputs])
    results = run_reference(program, values_of(program, model, {"arg0": inputs}))
    loss = model(inputs)
    loss.backward()
    torch.testing.assert_close(results["output", "0"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results["grad", name], parameter.grad)


# Errors.


def test_batch_that_is_no_call_of_forward_is_explained() -> None:
    model = nn.Identity()
    with pytest.raises(
        CaptureError, match=r"forward, which takes input: got an unexpected keyword"
    ):
        capture(model, (x(),), {"ids": x()})
    with pytest.raises(CaptureError, match=r"which takes input: too many positional arguments\.$"):
        capture(model, (x(), x()))
    with pytest.raises(TypeError, match=r"args are a tensor; give a tuple .* \(x,\)"):
        capture(model, x())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"args are a dict; .* as kwargs=, or as \(batch,\)"):
        capture(model, {"a": x()})  # type: ignore[arg-type]


def test_encoder_is_evaluated_by_ops_that_can_be_cut() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    program = capture(model, [torch.randn(2, 4, 8)], train=False)
    assert [op.name for op in program.ops if "encoder" in op.name] == []
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("value", [3, None, True, "mean", [torch.ones(2)]])
def test_argument_that_is_no_tensor_is_named(value: object) -> None:
    model = Model(lambda self, a, option: self.linear(a).sum())
    with pytest.raises(CaptureError) as error:
        capture(model, [x()], {"option": value})
    assert str(error.value) == (
        f"argument 'option' is a {type(value).__name__}; pass tensors only, and bind the rest with "
        "functools.partial or in the model."
    )


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_model_on_the_meta_device_gives_the_program_of_a_real_one(device: str) -> None:
    def make() -> nn.Module:
        model = Model(
            lambda self, a: self.norm(self.twin(self.linear(a))).square().sum(),
            twin=nn.Linear(4, 4, dtype=torch.float64),
            norm=nn.BatchNorm1d(4).double(),
        )
        model.twin.weight = model.linear.weight  # pyright: ignore[reportAttributeAccessIssue]
        return model

    with torch.device("meta"):
        meta = make()
    assert capture(meta, [x().to(device)]) == capture(make(), [x()])
    assert all(tensor.is_meta for tensor in meta.parameters())


def test_output_of_an_inference_pass_must_be_found() -> None:
    model = Model(lambda self, a: {"hidden": self.linear(a)})
    with pytest.raises(CaptureError, match="output has neither 'loss' nor 'logits'"):
        capture(model, [x()], train=False)


def test_dropout_of_zero_is_nothing() -> None:
    model = Model(lambda self, a: self.drop(self.linear(a)).sum(), drop=nn.Dropout(0.0))
    assert "dropout" not in str(capture(model, [x()]))


def test_capture_leaves_no_reference_to_the_parameters() -> None:
    model = Model(lambda self, a: self.linear(a).sum())
    weight = weakref.ref(model.linear.weight)
    capture(model, [x()])
    model.to("meta")
    gc.collect()
    assert weight() is None
