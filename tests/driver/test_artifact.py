"""Artifacts: a step that starts from a file is the step that is compiled, and others are refused."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.backends.state.mesh_tensor import full_tensor
from shardweave.driver.artifact import artifact as files
from shardweave.driver.cli import main
from shardweave.driver.step import lowering
from shardweave.tests.spawn import run_ranks

FACTORS = torch.tensor([1.0, 2.0])


@dataclass
class Scored:
    loss: Tensor
    logits: list[Tensor]


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


def scaled(x: Tensor) -> Tensor:
    return x * FACTORS.sum()


class Model(nn.Module):
    """Dropout, buffers that are updated, a constant of the code, and outputs in three forms."""

    def __init__(self, returns: str = "tuple", width: int = 16) -> None:
        super().__init__()
        self.fc_in, self.norm = nn.Linear(8, width), nn.BatchNorm1d(width)
        self.fc_out, self.drop = nn.Linear(width, 4), nn.Dropout(0.25)
        self.returns, self.scale = returns, 1.5

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.fc_out(self.drop(self.norm(self.fc_in(x)).relu())) * self.scale
        loss = scaled(nn.functional.cross_entropy(logits, y))
        if self.returns == "dataclass":
            return {"scored": Scored(loss, [logits]), "none": None}
        return Pair(loss, logits) if self.returns == "tuple" else loss


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 8), torch.randint(4, (8,))


def model_of(kind: Callable[..., nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*args).double()


def loss_in(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["scored"].loss
    return output if isinstance(output, Tensor) else output[0]


def three_steps(
    step: sw.CompiledModule, batch: tuple[Tensor, ...], *, in_call: bool
) -> list[Tensor]:
    """Losses of three steps of AdamW, and the values after them."""
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_in(step(*batch))
        if not in_call:
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(full_tensor(x.detach()) for x in (*step.parameters(), *step.buffers()))]


def batch_of(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].double(), batch[1]


def assert_starts_the_same(path: Path, model: nn.Module, **options: Any) -> sw.CompiledModule:
    """Compile twice, once from a file, and train both."""
    batch, backend = batch_of(example()), options["backend"]
    step = sw.compile(copy.deepcopy(model), batch, seed=3, **options)
    ahead = sw.compile(copy.deepcopy(model), batch, seed=3, artifact=path, backend=backend)
    assert str(ahead.program) == str(step.program)
    assert ahead.plan == step.plan
    in_call = options.get("backward") == "in_call"
    expected = three_steps(step, batch, in_call=in_call)
    for ours, theirs in zip(three_steps(ahead, batch, in_call=in_call), expected, strict=True):
        assert torch.equal(ours, theirs)
    return ahead


@pytest.mark.parametrize(
    ("returns", "options"),
    [
        ("tuple", {"mesh": "data=2,tensor=2", "zero": 3}),
        ("dataclass", {"mesh": "tensor=2", "precision": "bf16"}),
        ("loss", {"mesh": "data=2", "backward": "in_call", "passes": "cse"}),
        ("tuple", {}),
    ],
)
def test_step_that_starts_from_a_file_is_the_same_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: str, options: dict[str, Any]
) -> None:
    model, path = model_of(Model, returns), tmp_path / "step"
    sw.precompile(copy.deepcopy(model).to("meta"), batch_of(example()), artifact=path, **options)
    ahead = assert_starts_the_same(path, model, backend="reference", **options)
    if returns == "dataclass":
        ahead.eval()  # another program is captured, by the plan and options of the artifact
        scored = ahead(*batch_of(example()))["scored"]
        assert isinstance(scored, Scored)
    calls: list[str] = []
    for name in ("capture_call", "choose_plan", "lower"):
        monkeypatch.setattr(lowering, name, lambda *_, name=name, **__: calls.append(name))
    sw.compile(model, batch_of(example()), artifact=path, backend="reference")
    assert calls == []


def test_plan_for_a_cluster_and_its_mesh_are_those_of_the_artifact(tmp_path: Path) -> None:
    batch, path = batch_of(example()), tmp_path / "step"
    model = model_of(Model)
    given: dict[str, Any] = {"cluster": "testbed", "plan": "megatron", "backend": "reference"}
    written = sw.precompile(model, batch, artifact=path, **given)
    step = sw.compile(model, batch, artifact=path, **given)
    assert step.plan == written.plan
    assert str(step.program) == str(written.program)


def rename(path: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change the manifest of an artifact, as another maker would have written it."""
    made = files.Artifact.read(path)
    manifest = json.loads(json.dumps(made.manifest))
    change(manifest[name])
    members = {key: value for key, value in made.members.items() if key != files.MANIFEST}
    files.Artifact(str(path), manifest, members).write()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The artifact of a model on data=2."""
    made = tmp_path / "step.artifact"
    sw.precompile(Model(), example(), artifact=made, mesh="data=2", only_loss=True)
    return made


def started(path: Path, model: nn.Module | None = None, **options: Any) -> Any:
    batch = options.pop("batch_given", example())
    given = {"artifact": path, "backend": "reference", **options}
    return sw.compile(Model() if model is None else model, batch, **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "data=4"}, "for mesh data=2, but mesh data=4 is given"),
        ({"zero": 3}, "zero=3 is given, but .* was made with zero=0; leave zero out"),
        (
            {"plan": {"*.weight": "[{}, {}]"}},
            "plan=.* is given, but .* was made with plan=megatron",
        ),
        ({"precision": "bf16"}, "precision=bf16 is given"),
        ({"backend": "inductor"}, "backend=inductor is given"),
        ({"validate": True}, "a given artifact is run unchanged, so that validate would"),
        ({"program": "step.mlir"}, "so that artifact would have no effect"),
        ({"train": False}, "list of modules in evaluation mode is .*fc_in.*, and was empty"),
    ],
)
def test_other_options_are_refused(path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        started(path, **options)


def test_other_models_settings_and_calls_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str, model: nn.Module, **options: Any) -> None:
        with pytest.raises(sw.ArtifactError, match=words):
            started(path, model, **options)

    refused("module 'fc_in' of the model is Linear.*=32.* and was Linear.*=16", Model(width=32))
    refused(r"param 'fc_in.weight' of the model is .*float64, and was .*float32", Model().double())
    other = Model()
    other.drop.p = 0.5
    refused("module 'drop' of the model is Dropout.p=0.5", other)
    other = Model()
    other.scale = 2.0
    refused("setting 'scale' is 2.0, and was 1.5 when .* restore it", other)
    other = Model()
    other.register_forward_hook(lambda *_: None)
    refused("number of forward hooks of the model' is 1, and was 0", other)
    other = Model()
    other.fc_in.requires_grad_(False)
    refused("parameters without gradient is fc_in", other)
    x, y = example()
    refused(r"input 'x' of the example is \(4, 8\)", Model(), batch_given=(x[:4], y[:4]))

    class Other(Model):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y)

    Other.__name__ = "Model"
    refused("code of class", Other())
    with monkeypatch.context() as patch:
        patch.setattr(scaled, "__code__", (lambda x: 2 * x).__code__)
        refused("the code of 'scaled'", Model())
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "FACTORS", torch.tensor([1.0, 3.0]))
        refused("the global 'FACTORS'", Model())
    step = started(path)
    assert step(*example()).ndim == 0  # only_loss, which was not given again


@pytest.mark.parametrize("name", ["shardweave", "torch", "python"])
def test_other_versions_are_refused_by_name(path: Path, name: str) -> None:
    rename(path, "versions", lambda versions: versions.update({name: "0.0"}))
    with pytest.raises(
        sw.ArtifactError, match=f"was made with {name} 0.0, but this process has {name}"
    ):
        started(path)


def test_loss_that_is_a_function_is_given_again(tmp_path: Path) -> None:
    def last(output: Any) -> Tensor:
        return output[0] * 2

    made = tmp_path / "step"
    sw.precompile(Model(), example(), artifact=made, loss=last)
    with pytest.raises(sw.ArtifactError, match=r"was made with loss=.*; give the same loss here"):
        started(made)
    started(made, loss=last)


def test_damaged_and_edited_files_are_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    other = tmp_path / "other"
    for middle in (content[: len(content) // 2], b"", content[:200] + b"?" + content[201:]):
        other.write_bytes(middle)
        with pytest.raises(sw.ArtifactError, match="damaged"):
            started(other)
    with ZipFile(path) as archive, ZipFile(other, "w") as edited:
        edited.comment = archive.comment
        for name in archive.namelist():
            edited.writestr(name, archive.read(name).replace(b"aten.relu", b"aten.tanh"))
    with pytest.raises(sw.ArtifactError, match="was edited"):
        started(other)
    with pytest.raises(sw.ArtifactError, match="cannot be read: No such file"):
        started(tmp_path / "none")
    with pytest.raises(ValueError, match="give it, as artifact="):
        sw.precompile(Model(), example())


def test_command_writes_what_run_starts_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, model = str(tmp_path / "step"), "gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=4"
    assert main(["compile", model, "--mesh", "data=2,tensor=2", "--zero", "1", "-o", made]) == 0
    assert f"wrote {made}" in capsys.readouterr().out
    run = ["run", model, "--artifact", made, "--backend", "reference"]
    assert main([*run, "--check"]) == 0
    said = capsys.readouterr().out
    assert "mesh data=2,tensor=2" in said
    assert f"plan of {made}" in said
    assert "equal to eager" in said
    assert main([*run, "--mesh", "data=4"]) == 1
    assert (
        "the artifact is for mesh data=2,tensor=2, but mesh data=4 is given"
        in capsys.readouterr().err
    )


def in_processes(path: Path, options: dict[str, Any]) -> None:
    assert_starts_the_same(path, model_of(Model), **options)


@pytest.mark.parametrize(
    ("options", "count"),
    [({"mesh": "data=2,tensor=2", "zero": 3}, 4), ({"mesh": "stage=2"}, 2)],
)
def test_processes_start_from_a_file(tmp_path: Path, options: dict[str, Any], count: int) -> None:
    path = tmp_path / "step"
    sw.precompile(model_of(Model), batch_of(example()), artifact=path, **options)
    run_ranks(in_processes, count, path, {**options, "backend": "distributed"})
