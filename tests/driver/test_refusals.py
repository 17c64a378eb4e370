"""Refusals that no other test provokes: each names what it refuses, in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from xdsl.dialects.builtin import StringAttr

import shardweave as sw
from shardweave.backends.emit.attention import flash_attention
from shardweave.backends.reference.reference import run_reference
from shardweave.backends.state.saved_state import read_index, take_apart
from shardweave.backends.watch.watchdog import TIMEOUT, timeout_of
from shardweave.driver.explore import explore
from shardweave.driver.models.hf import build_hf
from shardweave.driver.models.models import build_example
from shardweave.driver.step.precision import reducing_in
from shardweave.driver.step.step import Step
from shardweave.ir.mesh.effect import Effect
from shardweave.ir.mesh.mesh import MOST_DEVICES, Axis, Mesh
from shardweave.ir.proof.ops import check_order
from shardweave.ir.proof.prove import prove
from shardweave.passes.pipeline import as_mesh
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.cluster_file import parse_cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.stages.choose import devices_of_plan
from shardweave.planners.lowering.stages.cut_stages import STAGES, stored_stages
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import parse_sharding
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.planning import resolve_plan
from shardweave.planners.predict.predict import predict_plan
from shardweave.planners.registry import register_planner
from shardweave.planners.schedules.schedules import find_schedule
from shardweave.planners.simulate.streams import Streams
from shardweave.planners.trials.trials import FORMAT, TrialFile
from shardweave.tests.compiled import compile_copy
from shardweave.tests.ir_text import step

SMALL = """
    param %w : tensor<8x8xf64>
    input %x : tensor<4x8xf64>
    %y = aten.mm(%x, %w) {layer = "fc"} : tensor<4x8xf64>
    output %y
"""


class Loss(nn.Module):
    """A linear layer and the mean of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).mean()


def plan_in_stages(*ranks: tuple[int, ...], stages: int = 2) -> Plan:
    names = tuple((f"h.{index}",) for index in range(stages))
    return Plan(mesh={"stage": 2, "data": 1}, pipeline=Pipeline(names, 2, ranks=ranks))


def compiled(**options: Any) -> sw.CompiledModule:
    model, x = Loss(), torch.ones(4, 4)
    return compile_copy(model, args=(x,), mesh={"data": 2}, backend="reference", **options)


STARTED = """
    input %x : tensor<4xf64>
    %y = aten.relu(%x) {sharding = [#dist.sharding<[{}], unreduced = ["tensor"]>]} : tensor<4xf64>
    %s = dist.start_all_reduce(%y, axes = ["tensor"]) {sharding = [#dist.sharding<[{}]>]} : tensor<4xf64>
    %z = dist.wait(%s) {sharding = [#dist.sharding<[{}]>]} : tensor<4xf64>
    output %z
"""


def with_stages(stages: str) -> sw.Program:
    program = step(SMALL)
    program.module.attributes[STAGES] = StringAttr(stages)
    return program


def waiting_for_nothing() -> tuple[Any, dict[Any, Any]]:
    """A wait, and the values that the ops before it have made."""
    ops = list(step(STARTED, "tensor=2", local=True).ops)
    return ops[2], {value: None for op in ops[:2] for value in op.results}


def grouped_mm(*, rows: int, starts: list[Any], ends: list[Any]) -> Tensor:
    """The op on tensors without values."""
    numbers = (torch.tensor(each).to("meta") for each in (starts, ends))
    values = torch.empty(rows, 2, device="meta"), torch.empty(len(starts), 2, 2, device="meta")
    return torch.ops.shardweave.grouped_mm(*values, *numbers, groups=4)


def draw_numbers(state: Tensor) -> Tensor:
    return torch.ops.shardweave.random(state.to("meta"), [], draw=0, dtype=torch.float32)


def cluster_of(node: str) -> Cluster:
    device = "{flops: {float32: 1T}, memory_bytes: 1GiB, memory_bandwidth_bytes_s: 1GB/s}"
    return parse_cluster(f"{{name: a, devices: {{d: {device}}}, nodes: [{{device: d, {node}}}]}}")


HALVES = torch.zeros(1, 1, 2, 4)
ONE_HEAD, TWO_HEADS = (torch.empty(1, heads, 2, 4, device="meta") for heads in (1, 2))
FOUR_GROUPS = torch.empty(4, dtype=torch.int64, device="meta").expand(2, 4)

REFUSALS: Mapping[str, tuple[Callable[[], object], str]] = {
    "long axis": (lambda: Mesh(data=MOST_DEVICES + 1), "mesh axis 'data' must have at most"),
    "large mesh": (lambda: Mesh(data=MOST_DEVICES, tensor=2), "has more than .* devices; use a"),
    "two stage axes": (
        lambda: Mesh([Axis("a", 2, "stage"), Axis("b", 2, "stage")]),
        r"mesh axes \['a', 'b'\]: at most one may be of kind stage",
    ),
    "schedule": (
        lambda: find_schedule("1fb1"),
        "there is no pipeline schedule '1fb1'; did you mean '1f1b'",
    ),
    "planner's name": (
        lambda: register_planner("megatron", print),
        "there is a planner 'megatron' already, .*; give builtins:print another name",
    ),
    "device of two stages": (
        lambda: devices_of_plan(plan_in_stages((0,), (0,)), Mesh.parse("stage=2")),
        "the plan's 'ranks' list device 0 twice; list each device once",
    ),
    "device of two predicted stages": (
        lambda: predict_plan(step(SMALL), plan_in_stages((0,), (0,)), find_cluster("testbed")),
        "list device 0 twice",
    ),
    "more stages than ranks": (
        lambda: predict_plan(step(SMALL), plan_in_stages(stages=3), find_cluster("testbed")),
        "the plan has 3 stages, which is not a multiple of the 2 ranks of the stage axis",
    ),
    "message for ever": (lambda: Streams().start(float("inf"), ["link"]), "has no bandwidth"),
    "no plans": (
        lambda: explore(step(SMALL), {}, "testbed"),
        "there are no plans to show; give one or more",
    ),
    "no value": (
        lambda: run_reference(step(SMALL), {}),
        r"no tensor was given for param 'w'; give a tensor of shape \(8, 8\) and torch.float64 under",
    ),
    "dropout in attention": (
        lambda: flash_attention(*[HALVES.to("meta")] * 3, dropout_p=0.5),
        "attention has dropout 0.5; capture the model with dropout 0",
    ),
    "result that is not returned": (
        lambda: prove(
            step(SMALL), against=step(SMALL.replace("output %y", "output %y\n    grad w = %w"))
        ),
        "grad 'w' is a result of the other program only; return it",
    ),
    "two ZeRO stages": (
        lambda: compiled(plan=Plan(mesh={"data": 2}, zero=1), zero=3),
        "the plan has zero=1, but zero=3 is given; give one of them",
    ),
    "capacity without experts": (
        lambda: build_example("gpt:capacity=2"),
        "gpt: capacity=2 applies to experts only; give experts=",
    ),
    "no layers": (lambda: build_example("gpt:layers=0"), "gpt: layers=0 must be positive"),
    "no model type": (
        lambda: build_example("hf:"),
        "hf: is given without a model type; write hf:TYPE",
    ),
    "image of two sizes": (
        lambda: build_hf("vit", {"image_size": (8, 16)}, torch.float32),  # pyright: ignore[reportArgumentType]
        r"hf:vit: the config's image_size is \(8, 16\), but only square images are supported",
    ),
    "tensors of another": (
        lambda: compiled().load_state_dict({}, assign=True),
        "a compiled model keeps its tensors and copies values into them; remove assign",
    ),
    "mesh that is none": (lambda: as_mesh(object()), "mesh is a object, expected text"),  # pyright: ignore[reportArgumentType]
    "no such plan": (
        lambda: resolve_plan("megatrn", step(SMALL), Mesh(data=2)),
        "plan 'megatrn' is neither a planner .* did you mean 'megatron'",
    ),
    "dtype of reductions beside passes": (
        lambda: reducing_in("float32", "preset:partition"),
        "`passes` has its own insert-collectives; .* put 'reduce-in.* after insert-collectives",
    ),
    "reduction": (
        lambda: Effect(reduces="mean").on_shards([HALVES, HALVES]),  # pyright: ignore[reportArgumentType]
        'found the reduction "mean", expected "sum" or "max"',
    ),
    "stages that are no lists": (
        lambda: stored_stages(with_stages("h.0")),
        "dist.stages is .*, expected lists of layers",
    ),
    "deletion after the start": (
        lambda: sw.run_passes(
            step(STARTED, "tensor=2", local=True), "delete-redundant-collectives"
        ),
        "has started collectives already; run delete-redundant-collectives before",
    ),
    "groups of other lengths": (
        lambda: grouped_mm(rows=4, starts=[0, 2], ends=[2]),
        "starts and ends must be 1-d, with one index for each group",
    ),
    "group numbers that are fractions": (
        lambda: grouped_mm(rows=4, starts=[0.0], ends=[4.0]),
        "starts and ends must have dtype int32 or int64",
    ),
    "blocks that do not divide": (
        lambda: torch.ops.shardweave.row_bounds(*FOUR_GROUPS, rows=8, blocks=3, parts=1),
        "3 blocks do not divide 4 groups",
    ),
    "state of random numbers": (
        lambda: draw_numbers(torch.zeros(3, dtype=torch.int64)),
        "state must be two int64 elements: seed and number of earlier draws",
    ),
    "node without links": (
        lambda: cluster_of("devices: 2"),
        "bandwidth_bytes_s",
    ),
    "nodes without a network": (
        lambda: cluster_of("devices: 1, count: 2"),
        "nic_bandwidth_bytes_s",
    ),
    "mesh of torch without names": (
        lambda: as_mesh(SimpleNamespace(mesh_dim_names=None)),  # pyright: ignore[reportArgumentType]
        "the DeviceMesh has no names for its dims",
    ),
    "sub-batches of a planner": (
        lambda: sw.plan(step(SMALL), "data=2", "oases", cluster="testbed", batch_split=3),
        "batch_split=3, expected 2, .* or 1, for no split",
    ),
    "shards of a dim that does not divide": (
        lambda: parse_sharding('[{"data"}, {}]:strides', (3, 4), Mesh(data=2), "input 'x'"),
        "input 'x': .* is not a sharding",
    ),
    "axis that the mesh lacks": (
        lambda: parse_sharding('[{"tensor"}, {}]', (4, 4), Mesh(data=2), "input 'x'"),
        r"input 'x' of shape \[4, 4\]: .*tensor",
    ),
    "entry that pickles to code": (
        lambda: take_apart({"hook": print}).index(),
        "entry 'hook' of the state cannot be saved: .*Save numbers, text and tensors",
    ),
    "index of a lost tensor": (
        lambda: read_index(take_apart({"m": nn.Linear(1, 1)}).index(), ["m/bias"]),
        "its index lists tensor 'm/weight', but its files do not hold it",
    ),
    "model that is not compiled": (
        lambda: Step.of(nn.Linear(1, 1)),
        "Linear is not compiled; call sw.compile on it first",
    ),
    "odd channels": (lambda: build_example("unet:channels=3"), "unet: channels=3 is odd"),
    "more groups than there are": (
        lambda: grouped_mm(rows=4, starts=[0] * 5, ends=[4] * 5),
        "starts has 5 groups, more than groups=4",
    ),
    "heads of keys that do not divide": (
        lambda: torch.ops.shardweave.attention(ONE_HEAD, TWO_HEADS, TWO_HEADS),
        "keys must have the queries' samples, and a divisor of their heads",
    ),
    "message that is not started": (
        lambda: check_order(*waiting_for_nothing(), set()),
        "waits for no started collective; start one before it",
    ),
    "batch by position and by name": (
        lambda: compiled().local_batch(torch.ones(4, 4), x=torch.ones(4, 4)),
        "local_batch: give all inputs by position, or all by keyword",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_mistake_is_named_in_one_line(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


WRONG_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "args": (3, "the example's args are 3; give a tuple"),
    "kwargs": ({1: 2}, "the example's kwargs are {1: 2}; give a dict of arguments by name"),
    "plan": ([], "the plan is a list; give a planner's name, the path"),
    "plan ": ({3: "[{}]"}, "must map parameter names to shardings, .* but '3' maps to something"),
    "cluster": ({}, "the cluster is a dict; give a preset's name"),
    "passes": (None, "passes are a NoneType; give text such as 'cse,dce'"),
    "zero": ("2", "zero='2' must be an int"),
    "validate": ("no", "validate='no' must be True or False"),
    "train": (1, "train=1 must be True or False or None"),
    "seed": (1.5, "seed=1.5 must be an int or None"),
    "timeout": (float("nan"), "timeout=nan must be a number of 0 or more or None"),
    "weights": (3, "weights=3 must be a path or text or None"),
    "program": (["a"], r"program=\['a'\] must be a Program or a path or text or None"),
    "artifact": (3, "artifact=3 must be an Artifact or a path or text or None"),
    "precision": (torch.bfloat16, "precision=torch.bfloat16 must be text or None"),
    "reduce_dtype": (3, "reduce_dtype=3 must be a torch.dtype or text or None"),
    "device": ("gpu", "device='gpu' is no device of torch; give cpu, cuda, or cuda:0"),
    "optimizers": (
        torch.optim.SGD(Loss().parameters(), 0.1),
        "the SGD holds no parameter of the model, as if it were made for a copy",
    ),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_option_of_a_wrong_type_is_named_with_what_it_takes(name: str) -> None:
    value, message = WRONG_OPTIONS[name]
    given: dict[str, Any] = {"args": (torch.ones(4, 4),), "mesh": "data=2", name.strip(): value}
    with pytest.raises((ValueError, TypeError), match=message):
        sw.compile(Loss(), **given, backend="reference")


@pytest.mark.parametrize(("model", "name"), [(Loss, "the class Loss"), (len, "builtin_func")])
def test_model_that_is_no_module_is_refused(model: Any, name: str) -> None:
    for make in (sw.capture, sw.compile):
        with pytest.raises(TypeError, match=f"the model is {name}.*, not an instance of nn.Module"):
            make(model, (torch.ones(4, 4),))


@pytest.mark.parametrize(
    "call",
    [
        sw.verify,
        lambda value: sw.plan(value, "data=2", "megatron"),
        lambda value: sw.simulate(value, "testbed"),
        lambda value: sw.run_passes(value, "cse"),
        lambda value: sw.prove(value, against=step(SMALL)),
        lambda value: sw.prove(step(SMALL), against=value),
        lambda value: sw.diff(step(SMALL), value),
        lambda value: sw.explore(value, "cse", "testbed"),
    ],
)
def test_what_is_no_program_is_named(call: Callable[[Any], object]) -> None:
    for value, kind in ((Loss(), "Loss"), ("a.mlir", "str"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"a {kind} is given in place of a program; capture"):
            call(value)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.ones(4, 4, device="meta"), "a meta tensor, without values"),
        (torch.eye(4).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_input_without_plain_values_is_refused(tensor: Tensor, kind: str) -> None:
    with pytest.raises(ValueError, match=f"input 'x' is {kind}; give a dense tensor with values"):
        compiled()(tensor)


def test_state_that_is_no_dict_or_holds_a_class_is_refused(tmp_path: Path) -> None:
    for act in (
        lambda: sw.save_checkpoint(tmp_path, 1, [Loss()]),  # pyright: ignore[reportArgumentType]
        lambda: sw.load_checkpoint(tmp_path, [Loss()]),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(sw.CheckpointError, match="the state is a list; give a dict of what"):
            act()
    with pytest.raises(sw.CheckpointError, match="entry 'm' of the state cannot be saved"):
        sw.save_checkpoint(tmp_path, 1, {"m": Loss})


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_timeout_that_cannot_be_waited_is_named(text: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(ValueError, match=f"{TIMEOUT} is '{text}', expected the number of seconds"):
        timeout_of(None)
    with pytest.raises(ValueError, match=r"timeout is 1e\+30, expected .* at most 1e\+08"):
        timeout_of(1e30)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2: not JSON: .*; give a file that a search has written, or a new one"),
        ("{}", r":2: the key 'configuration' is missing"),
        (
            '{"configuration": {}, "outcome": "maybe", "reason": "", "seconds": 1.0}',
            r":2\.outcome must be an object",
        ),
    ],
)
def test_line_that_is_no_trial_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    with TrialFile.open(path, {"a": 1}):
        pass
    assert FORMAT in path.read_text()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message), TrialFile.open(path, {"a": 1}):
        pass


def test_trials_that_another_search_has_open_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    with (
        TrialFile.open(path, {}),
        pytest.raises(ValueError, match="is in use by another search; wait for its end, or give"),
        TrialFile.open(path, {}),
    ):
        pass
