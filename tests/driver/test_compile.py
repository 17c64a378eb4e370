"""compile: from a torch module to a step, on one device, a virtual mesh and real processes."""

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

import shardweave as sw
from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.driver.checking.check import compare, results_of, run_eager
from shardweave.driver.models.gpt import GPT, GPTConfig, build_gpt
from shardweave.driver.processes.launch import launch
from shardweave.ir.capture.capture import capture_step
from shardweave.ir.dialects.types import shape_of
from shardweave.tests.compiled import compile_copy
from shardweave.tests.driver.step.models import two_devices
from shardweave.tests.warm import WarmProcess
from shardweave.tests.zoo import captured

GPT_SPEC = "gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=4"
CNN_SPEC = "cnn:depth=10,channels=4,size=8,batch=4"
COLUMNS = '[{"tensor"}, {}]'
ROWS = '[{}, {"tensor"}]'


class MLP(nn.Module):
    """Two linears and a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_in = nn.Linear(4, 8)
        self.fc_out = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.fc_out(self.fc_in(x).relu()), y)


@pytest.fixture
def mlp() -> MLP:
    return MLP().double()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 4).double(), "y": torch.randn(4, 4).double()}


@pytest.fixture(scope="module")
def gpt() -> tuple[GPT, dict[str, Tensor]]:
    module, batch = build_gpt(GPTConfig(1, hidden=16, heads=2, vocab=32, seq=8, batch=4))
    return module.double(), batch


def assert_equal_to_eager(step: nn.Module, model: nn.Module, batch: dict[str, Tensor]) -> None:
    found = results_of(step, step(**batch))
    result = compare(found, run_eager(model, batch), torch.float64)
    assert result.ok, result


def collectives(step: Any) -> list[str]:
    names = [op.name.replace("start_", "") for op in step.program.ops]
    return [name for name in names if name.startswith("dist.all_")]


def test_one_process_without_a_mesh_runs_the_model_as_it_is(
    mlp: MLP, batch: dict[str, Tensor]
) -> None:
    step = compile_copy(mlp, kwargs=batch)
    assert_equal_to_eager(step, mlp, batch)
    assert collectives(step) == []
    assert isinstance(step, CompiledModule)
    assert "torch.mm" in step.source or "aten.addmm" in step.source


def test_positional_inputs_are_given_by_position(mlp: MLP, batch: dict[str, Tensor]) -> None:
    step = compile_copy(mlp, (batch["x"], batch["y"]))
    assert step(batch["x"], batch["y"]).item() == pytest.approx(mlp(**batch).item(), rel=1e-12)


def test_program_without_gradients_returns_the_models_output(mlp: MLP) -> None:
    x = torch.randn(4, 4).double()
    step = compile_copy(mlp.fc_in, (x,), train=False)
    torch.testing.assert_close(step(x), mlp.fc_in(x))


@pytest.mark.parametrize("backend", ["distributed", "reference"])
def test_gradients_of_two_calls_add_up(backend: str, mlp: MLP, batch: dict[str, Tensor]) -> None:
    step = compile_copy(mlp, kwargs=batch, backend=backend)
    step(**batch)
    first = {name: p.grad.clone() for name, p in step.named_parameters() if p.grad is not None}
    step(**batch)
    assert len(first) == 4
    for name, p in step.named_parameters():
        torch.testing.assert_close(p.grad, 2 * first[name])


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", sw.Mesh(tensor=2), {"data": 4}], ids=str)
@pytest.mark.parametrize("plan", ["megatron", "replicated"])
def test_virtual_mesh_equals_eager(
    mesh: Any, plan: str, gpt: tuple[GPT, dict[str, Tensor]]
) -> None:
    model, batch = gpt
    step = compile_copy(model, kwargs=batch, mesh=mesh, plan=plan, backend="reference")
    assert_equal_to_eager(step, model, batch)


def test_sequence_parallel_scatters_where_the_plain_plan_reduces(
    gpt: tuple[GPT, dict[str, Tensor]],
) -> None:
    model, batch = gpt
    step = compile_copy(
        model, kwargs=batch, mesh="tensor=2", sequence_parallel=True, backend="reference"
    )
    assert "dist.start_reduce_scatter" in {op.name for op in step.program.ops}
    assert_equal_to_eager(step, model, batch)


def hand_written() -> dict[str, str]:
    return {"fc_in.weight": COLUMNS, "fc_in.bias": '[{"tensor"}]', "fc_o*.weight": ROWS}


def in_a_file(folder: Path) -> Path:
    path = folder / "plan.json"
    sw.Plan(mesh={"data": 2, "tensor": 2}, parameters=hand_written()).save(path)
    return path


@pytest.mark.parametrize(
    "make_plan",
    [
        lambda folder: hand_written(),
        lambda folder: sw.Plan(parameters=hand_written()),
        in_a_file,
        lambda folder: str(in_a_file(folder)),
    ],
    ids=["dict", "Plan", "Path", "str"],
)
def test_plan_written_by_hand_shards_what_it_names(
    make_plan: Callable[[Path], Any], tmp_path: Path, mlp: MLP, batch: dict[str, Tensor]
) -> None:
    plan = make_plan(tmp_path)
    step = compile_copy(mlp, kwargs=batch, mesh="data=2,tensor=2", plan=plan, backend="reference")
    shapes = {s.name: shape_of(s.value) for s in step.program.arguments}
    assert shapes["fc_in.weight"] == (4, 4)
    assert shapes["fc_out.weight"] == (4, 4)
    assert_equal_to_eager(step, mlp, batch)


def test_shardings_by_name_leave_the_batch_to_the_data_axis(
    mlp: MLP, batch: dict[str, Tensor]
) -> None:
    plan = {"x": "[{}, {}]"}
    step = compile_copy(mlp, kwargs=batch, mesh={"data": 2}, plan=plan, backend="reference")
    shapes = {s.name: shape_of(s.value) for s in step.program.arguments}
    assert shapes["x"] == (4, 4)
    assert shapes["y"] == (2, 4)
    assert_equal_to_eager(step, mlp, batch)


@dataclass(frozen=True)
class SpyPass(ModulePass):
    """Remembers whether the programs it was run on were local."""

    name = "spy"
    seen: list[bool] = field(default_factory=list)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        self.seen.append(sw.Program(op).is_local)


def test_plan_brings_its_mesh_sub_batches_and_recomputation(
    mlp: MLP, batch: dict[str, Tensor]
) -> None:
    inputs = {name: '[{"data"}, {}]' for name in batch}
    plan = sw.Plan(mesh={"data": 2}, inputs=inputs, batch_split=2, recompute="layer")
    step = compile_copy(mlp, kwargs=batch, plan=plan, backend="reference")
    assert step.program.mesh == sw.Mesh(data=2)
    assert any("copy" in op.properties for op in step.program.ops)
    torch.testing.assert_close(step(**batch), mlp(**batch))


def test_one_value_on_the_meta_device_is_filled_and_the_others_stay(
    mlp: MLP, batch: dict[str, Tensor]
) -> None:
    weight = mlp.fc_in.weight.detach().clone()
    mlp.fc_in.bias = nn.Parameter(torch.empty_like(mlp.fc_in.bias, device="meta"))
    sw.compile(mlp, kwargs=batch, mesh={"data": 2}, backend="reference")
    assert torch.equal(mlp.fc_in.weight, weight)
    assert mlp.fc_in.bias.isfinite().all()


def test_buffer_on_the_meta_device_that_nothing_fills_is_refused_by_name(
    mlp: MLP, batch: dict[str, Tensor]
) -> None:
    mlp.fc_in.register_buffer("scale", torch.empty(8, device="meta"))
    with pytest.raises(ValueError, match=r"^.fc_in\.scale. is on the meta device"):
        sw.compile(mlp, kwargs=batch, mesh={"data": 2}, backend="reference")


def test_zero_without_replicas_is_a_note(mlp: MLP, batch: dict[str, Tensor]) -> None:
    step = compile_copy(mlp, kwargs=batch, plan=sw.Plan(zero=3), backend="reference")
    assert any("zero=3 divides nothing" in note for note in step.notes)


def test_passes_come_after_the_default_ones(mlp: MLP, batch: dict[str, Tensor]) -> None:
    spy = SpyPass()
    compile_copy(mlp, kwargs=batch, mesh={"data": 2}, passes=["dce", spy], backend="reference")
    assert spy.seen == [True]


def test_passes_with_insert_collectives_stand_in_place_of_the_default_ones(
    mlp: MLP, batch: dict[str, Tensor]
) -> None:
    options: dict[str, Any] = {"kwargs": batch, "mesh": {"data": 2}, "backend": "reference"}
    unmerged = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives"
    more = compile_copy(mlp, **options, passes=unmerged)
    fewer = compile_copy(mlp, **options)
    assert len(collectives(more)) > len(collectives(fewer)) > 0


def test_mesh_without_its_processes_is_an_error_that_names_both_and_the_command(
    mlp: MLP, batch: dict[str, Tensor]
) -> None:
    wanted = r"mesh data=2,tensor=2 has 4 devices, but 1 process runs.*torchrun --nproc-per-node 4"
    with pytest.raises(ValueError, match=wanted):
        compile_copy(mlp, kwargs=batch, mesh="data=2,tensor=2")


def test_processes_without_a_mesh_are_an_error(
    monkeypatch: pytest.MonkeyPatch, mlp: MLP, batch: dict[str, Tensor]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="no mesh is given, but 4 processes run"):
        compile_copy(mlp, kwargs=batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "no-such-plan"}, "neither a planner .*megatron.* nor a file"),
        ({"plan": {"fc.weight": COLUMNS}}, "names parameter 'fc.weight', which this program does"),
        ({"plan": {"fc_in.weight": "[{}]"}}, "'fc_in.weight' of shape"),
        ({"plan": "replicated", "sequence_parallel": True}, "has no option 'sequence_parallel'"),
        ({"plan": {}, "sequence_parallel": True}, "sequence_parallel is an option of planners"),
        ({"backend": "magic"}, "backend 'magic' is unknown"),
        ({"passes": "no-such-pass"}, "there is no pass 'no-such-pass'"),
        ({"mesh": "data:2"}, "expected NAME=SIZE"),
        ({"mesh": "data=-1"}, "-1 stands for the processes that are left"),
        ({"max_programs": 0}, "max_programs=0 would keep no program; give 1 or more"),
        (
            {"plan": {"pipeline": {"micro_batches": 1}}},
            "'pipeline' maps to something else. Give a whole plan",
        ),
        ({"loss": "foo"}, "loss='foo' names no tensor among the outputs of forward"),
    ],
)
def test_bad_argument_is_an_error_that_says_what_is_expected(
    options: dict[str, Any], message: str, mlp: MLP, batch: dict[str, Tensor]
) -> None:
    with pytest.raises(ValueError, match=message):
        compile_copy(mlp, kwargs=batch, **{"mesh": "tensor=2", "backend": "reference", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "auto"}, "planner 'auto' needs a cluster"),
        ({"plan": "replicated", "sequence_parallel": True}, "has no option 'sequence_parallel'"),
        ({"plan": {}, "sequence_parallel": True}, "sequence_parallel is an option of planners"),
        ({"mesh": None, "cluster": "testbed", "sequence_parallel": True}, "'auto' has no option"),
    ],
)
def test_plan_that_no_model_has_is_refused_before_the_model_is_captured(
    options: dict[str, Any],
    message: str,
    mlp: MLP,
    batch: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardweave.ir.capture.capture.capture_step", None)
    with pytest.raises(ValueError, match=message):
        compile_copy(mlp, kwargs=batch, **{"mesh": "tensor=2", "backend": "reference", **options})


def test_step_is_no_model(mlp: MLP, batch: dict[str, Tensor]) -> None:
    step = compile_copy(mlp, kwargs=batch, mesh="data=2", backend="reference")
    with pytest.raises(ValueError, match="the model is compiled already"):
        compile_copy(step, kwargs=batch, mesh="data=2", backend="reference")


def test_unknown_planner_is_an_error_that_lists_those_there_are() -> None:
    program = sw.capture(nn.Linear(2, 2), (torch.ones(2, 2),), train=False)
    with pytest.raises(ValueError, match=r"no planner 'nobody'; use one of .*megatron.*replicated"):
        sw.plan(program, "tensor=2", "nobody")


def test_every_public_name_is_there() -> None:
    for name in sw.__all__:
        assert getattr(sw, name) is not None
    assert set(sw.__all__) <= set(dir(sw))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sw.nothing  # pyright: ignore[reportAttributeAccessIssue]


THREE_STEPS = [sys.executable, str(Path(__file__).with_name("three_steps.py"))]


@pytest.mark.parametrize(
    ("mesh", "plan", "spec"),
    [
        ("data=2,tensor=2", "megatron", GPT_SPEC),
        pytest.param("data=2", "replicated", CNN_SPEC, marks=pytest.mark.slow),
    ],
)
def test_three_training_steps_on_real_processes_equal_eager(
    monkeypatch: pytest.MonkeyPatch, mesh: str, plan: str, spec: str
) -> None:
    captured(spec)  # whose trace the processes read
    monkeypatch.setattr("shardweave.driver.processes.launch.subprocess.Popen", WarmProcess)
    launch([*THREE_STEPS, mesh, plan, spec], sw.Mesh.parse(mesh).num_devices, time_limit_s=300)


QUICKSTART = Path(sw.__file__).parent / "examples" / "quickstart.py"


def test_quickstart_loses_what_its_eager_twin_loses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: in its own it would import torch again."""
    monkeypatch.setattr(sys, "argv", [str(QUICKSTART), "data=1"])
    runpy.run_path(str(QUICKSTART), run_name="__main__")
    runpy.run_path(str(QUICKSTART.with_name("quickstart_eager.py")), run_name="__main__")
    sharded, eager = capsys.readouterr().out.splitlines()
    assert sharded == eager


@pytest.mark.slow
def test_quickstart_runs_under_torchrun_with_the_same_loss() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command = [*torchrun, str(QUICKSTART), "data=2,tensor=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    eager = [sys.executable, str(QUICKSTART.with_name("quickstart_eager.py"))]
    alone = subprocess.run(eager, capture_output=True, text=True, timeout=300, check=True)
    assert re.findall(r"loss [\d.]{6}", done.stdout) == [alone.stdout.strip()] * 4


def test_cluster_alone_lets_auto_choose_mesh_and_plan(mlp: MLP, batch: dict[str, Tensor]) -> None:
    small = {name: tensor[:2] for name, tensor in batch.items()}
    step = compile_copy(mlp, kwargs=small, cluster=two_devices(), backend="reference")
    assert step.plan is not None
    assert step.plan.planner == "auto"
    assert sw.Mesh(**step.plan.mesh).num_devices == 2
    torch.testing.assert_close(step(**small), mlp(**small))


def test_model_is_captured_once_where_the_plan_is_made_for_a_cluster(
    monkeypatch: pytest.MonkeyPatch, mlp: MLP, batch: dict[str, Tensor]
) -> None:
    captures: list[nn.Module] = []

    def counting(model: nn.Module, *args: Any) -> Any:
        captures.append(model)
        return capture_step(model, *args)

    monkeypatch.setattr("shardweave.ir.capture.capture.capture_step", counting)
    options: dict[str, Any] = {"kwargs": batch, "cluster": two_devices(), "backend": "reference"}
    step = compile_copy(mlp, **options, plan="megatron")
    assert len(captures) == 1
    assert step.plan is not None
    assert step.program.mesh == sw.Mesh(**step.plan.mesh)
    step.eval()
    step(**batch)  # another program, on the mesh that was chosen
    assert step.program.mesh == sw.Mesh(**step.plan.mesh)


def test_cluster_of_other_than_the_processes_is_an_error_before_planning(
    mlp: MLP, batch: dict[str, Tensor]
) -> None:
    with pytest.raises(ValueError, match="has 2 devices, but 1 process runs"):
        compile_copy(mlp, kwargs=batch, cluster=two_devices())


def test_cluster_beside_a_plan_is_refused(mlp: MLP, batch: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="cluster= is for planners, but a plan is given"):
        compile_copy(mlp, kwargs=batch, cluster="testbed", plan={}, backend="reference")
