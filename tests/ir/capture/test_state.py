"""State that a step changes: what forward assigns is a result; what a program cannot hold is refused."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.ir.notes import CaptureNote
from shardweave.tests.eager import Model, assert_three_steps_equal_eager, rows
from shardweave.tests.torch_versions import new_torch


def _new(self: Any, y: Tensor) -> Tensor:
    return self.ema * 0.9 + y.detach().mean(0) * 0.1


def _assign(self: Any, y: Tensor) -> None:
    self.ema = _new(self, y)


def _assign_unread(self: Any, y: Tensor) -> None:
    self.other = y.detach().square().mean(0)


def _register(self: Any, y: Tensor) -> None:
    self.register_buffer("ema", _new(self, y))


def _set_item(self: Any, y: Tensor) -> None:
    self._buffers["ema"] = _new(self, y)


def _delete_and_register(self: Any, y: Tensor) -> None:
    new = _new(self, y)
    del self.ema
    self.register_buffer("ema", new)


def _set_by_name(self: Any, y: Tensor) -> None:
    for name in ("ema", "other"):
        setattr(self, name, getattr(self, name) + y.detach().mean(0))


def _swap(self: Any, y: Tensor) -> None:
    self.ema, self.other = self.other, self.ema


def _in_place_then_assign(self: Any, y: Tensor) -> None:
    self.other.mul_(0.5)
    self.other = self.other + y.detach().mean(0)


def _assign_then_in_place(self: Any, y: Tensor) -> None:
    self.other = self.other + y.detach().mean(0)
    self.other.mul_(0.5)


@pytest.mark.parametrize(
    "change",
    [
        _assign,
        _assign_unread,
        _register,
        _set_item,
        _delete_and_register,
        _set_by_name,
        _swap,
        _in_place_then_assign,
        _assign_then_in_place,
    ],
)
def test_buffer_that_forward_changes_has_the_value_of_eager(
    change: Callable[[Any, Tensor], None],
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x) * self.ema
        change(self, y)
        return (y + self.other).square().sum()

    assert_three_steps_equal_eager(Model(forward))


class Tracked(nn.Module):
    """Keeps a running mean by assignment, a sum of losses that it only writes, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4, dtype=torch.float64), persistent=False)
        self.register_buffer("steps", torch.tensor(0))
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.steps += 1
        self.loss = x.abs().mean()
        return x * self.mean * self.steps


class Nested(nn.Module):
    """Tracked in a Sequential, a list and a dict, and read from outside in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), Tracked())
        self.more = nn.ModuleList([Tracked()])
        self.named = nn.ModuleDict({"a": Tracked()})

    def forward(self, x: Tensor) -> Tensor:
        y = self.named["a"](self.more[0](self.net(x)))
        return y.square().sum() + self.net[1].loss + self.named["a"].loss


@pytest.mark.parametrize("mesh", ["data=2", "data=2,tensor=2"])
def test_buffers_of_submodules_and_losses_left_on_them_are_those_of_eager(mesh: str) -> None:
    assert_three_steps_equal_eager(Nested(), mesh=mesh)


def test_buffer_assigned_in_evaluation_mode_is_a_result_too() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.ema = self.ema + 1
        return self.linear(x) * self.ema

    program = capture(Model(forward), rows(), train=False)
    assert [(slot.kind, slot.name) for slot in program.results] == [
        ("output", "0"),
        ("buffer", "ema"),
    ]


def test_buffer_that_forward_sets_to_itself_costs_nothing() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.ema = self.ema
        return (self.linear(x) * self.ema).sum()

    program = capture(Model(forward), rows())
    assert [slot.name for slot in program.results] == ["0", "linear.weight", "linear.bias"]


# Python state.


class Counting:
    """A plain object with a number."""

    def __init__(self) -> None:
        self.n = 0


def _global(self: Any) -> int:
    global _CALLS
    _CALLS += 1
    return _CALLS


_CALLS = 0


def _closure() -> Callable[[Any], int]:
    calls = 0

    def count(self: Any) -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def _counter(self: Any) -> int:
    self.state += 1
    return self.state


def _append(self: Any) -> int:
    self.state.append(1)
    return len(self.state)


def _item(self: Any) -> int:
    self.state["n"] += 1
    return self.state["n"]


def _add(self: Any) -> int:
    self.state.add(len(self.state))
    return len(self.state)


def _attribute(self: Any) -> int:
    self.state.n += 1
    return self.state.n


def _lazy(self: Any) -> int:
    if hasattr(self, "late"):
        return 2
    self.late = True
    return 1


def _default(self: Any, counts: list[int] = [0]) -> int:  # noqa: B006
    counts[0] += 1
    return counts[0]


def _once(self: Any) -> int:
    if self.state is None:
        self.state = 3
        return 1
    return self.state


def _mode(self: Any) -> int:
    scale = 2 if self.training else 1
    self.eval()
    return scale


@pytest.mark.parametrize(
    ("count", "state", "place"),
    [
        (_counter, 0, "state"),
        (_counter, 1.0, "state"),
        (_append, [], "state"),
        (_append, deque(), "state"),
        (_item, {"n": 0}, r"state\['n'\]"),
        (_item, Counter(), "state"),
        (_add, set(), "state"),
        (_attribute, Counting(), r"state\.n"),
        (_lazy, None, "late"),
        (_once, None, "state"),
        (_global, None, "_CALLS"),
        (_closure(), None, r".*__closure__.*"),
        pytest.param(
            *(_default, None, r".*__defaults__\[0\]"),
            marks=new_torch("dynamo does not see that a default argument is changed"),
        ),
        (_mode, None, "training"),
        pytest.param(
            *(lambda self: next(self.state), itertools.count(1), "state"),
            marks=new_torch("dynamo refuses itertools.count by itself"),
        ),
    ],
)
def test_python_state_that_a_step_reads_and_changes_is_refused_with_its_line(
    count: Callable[[Any], int], state: Any, place: str
) -> None:
    model = Model(lambda self, x: self.linear(x).sum() * count(self), state=state)
    expected = rf"^the model.*: forward changes `{place}`, Python state .*register_buffer\("
    with pytest.raises(CaptureError, match=expected) as error:
        capture(model, rows())
    if not isinstance(state, Counter):  # whose update is in C
        assert "(test_state.py:" in str(error.value)


def test_refusal_names_the_submodule_and_shows_the_line() -> None:
    class Inner(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), Inner())
    expected = r"^module 'net\.1' \(test_state\.py:\d+: `self\.calls \+= 1`\): .*`net\.1\.calls`"
    with pytest.raises(CaptureError, match=expected):
        capture(Model(lambda self, x: self.net(x).sum(), net=model), rows())


@pytest.mark.parametrize(
    ("write", "state"),
    [
        (lambda self, x: setattr(self, "state", x.shape[0]), None),
        (lambda self, x: setattr(self, "state", x.sum()), None),
        (lambda self, x: setattr(self, "state", [x]), None),
        (lambda self, x: self.state.update(last=x.sum()), {"last": None}),
        (lambda self, x: setattr(self.state, "n", x.sum()), Counting()),
        (lambda self, x: setattr(self, "state", max(self.state, x.shape[0])), 4),
        (lambda self, x: setattr(self, "state", max(self.state, x.shape[0])), 0),
        (lambda self, x: hasattr(self, "late") or setattr(self, "late", x.shape[0]), None),
        (lambda self, x: self.state.n or setattr(self.state, "n", 3), Counting()),
    ],
    ids=["size", "tensor", "list", "item", "attribute", "settled", "settles", "created", "filled"],
)
def test_python_state_that_is_only_written_or_settles_is_no_obstacle(
    write: Callable[[Any, Tensor], None], state: Any
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        write(self, x)
        return self.linear(x).square().sum()

    assert_three_steps_equal_eager(Model(forward, state=state))


_KINDS: dict[type, Counting] = {}
_TALLY: dict[type, int] = {}
_KIND = Counting()


def test_object_that_is_kept_by_type_at_the_first_call_is_no_obstacle() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if type(weight) not in _KINDS:
            _KINDS[type(weight)] = _KIND
        return self.linear(x).square().sum() * (1 + _KINDS[type(weight)].n)

    assert_three_steps_equal_eager(Model(forward))


def test_count_that_is_kept_by_type_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        kind = type(self.linear.weight)
        _TALLY[kind] = _TALLY.get(kind, 0) + 1
        return self.linear(x).square().sum() * _TALLY[kind]

    with pytest.raises(CaptureError, match=r"forward changes `_TALLY\["):
        capture(Model(forward), rows())
    assert not _TALLY


# Buffers that cannot be held.


def _shared() -> nn.Module:
    sub = nn.Module()
    model = Model(lambda self, x: (_assign(self, x), self.linear(x).sum())[1], sub=sub)
    sub.register_buffer("twin", model.get_buffer("ema"))
    return model


def _assigning(new: Callable[[Any, Tensor], Any]) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.ema = new(self, y)
        return y.square().sum()

    return Model(forward)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (_shared(), "to buffer 'ema', which is also registered as 'sub.twin'.*in place"),
        (_assigning(lambda self, y: None), "removes buffer 'ema'; register it in __init__"),
        (_assigning(lambda self, y: y.mean(0)), r"assigns a buffer that depends .*detach\(\)"),
        (
            _assigning(lambda self, y: self.ema.repeat(2)),
            r"shape \(4,\), .* a tensor of shape \(8,\)",
        ),
        (
            _assigning(lambda self, y: self.ema.float()),
            r"torch.float64\) by a tensor of .*torch.float32",
        ),
        (
            Model(lambda self, x: (self.register_buffer("b", x), self.linear(x).sum())[1]),
            "creates buffer 'b'; register it in __init__",
        ),
        (
            Model(lambda self, x: self.linear(x.mul_(2)).sum()),
            r"changes input 'arg0' in place; copy it first \(clone\)",
        ),
        (
            Model(lambda self, x: (self.linear.weight.detach().mul_(2), self.linear(x).sum())[1]),
            r"changes parameter 'linear.weight' in place; copy it first \(clone\)",
        ),
        (
            Model(
                lambda self, x: self.table(x.argmax(1)).sum(),
                table=nn.Embedding(4, 4, max_norm=1.0, dtype=torch.float64),
            ),
            r"changes parameter 'table.weight' in place; max_norm does so; .* what is looked up",
        ),
        (
            Model(lambda self, x: (setattr(self.ema, "data", x[0]), self.linear(x).sum())[1]),
            r"change the tensor by copy_\(\), not through \.data",
        ),
    ],
)
def test_buffer_that_a_step_cannot_hold_is_refused(model: nn.Module, expected: str) -> None:
    with pytest.raises(CaptureError, match=expected):
        capture(model, rows())


# Tensors that belong to no module.


def test_parameter_that_belongs_to_no_module_is_refused_with_its_line() -> None:
    state = [nn.Parameter(torch.ones(4, dtype=torch.float64))]
    model = Model(lambda self, x: (self.linear(x) * self.state[0]).sum(), state=state)
    expected = r"parameter `state\[0\]`, which model\.parameters\(\) .*nn\.ParameterList"
    with pytest.raises(CaptureError, match=rf"^the model \(test_state\.py:\d+: .*{expected}"):
        capture(model, rows())


def test_constants_that_the_code_writes_out_are_part_of_the_program() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.tensor([1.0, 2.0, 2.0, 5.0])).square().sum()

    assert_three_steps_equal_eager(Model(forward), mesh="data=2,tensor=2")


def test_buffer_of_a_checkpointed_part_is_updated_once_and_a_note_says_so() -> None:
    norm = nn.BatchNorm1d(4, dtype=torch.float64)
    model = Model(lambda self, x: checkpoint(self.norm, x, use_reentrant=False).sum(), norm=norm)
    with pytest.warns(CaptureNote, match=r"\(norm\.num_batches_tracked, .*once in a step; eager"):
        capture(model, rows())
