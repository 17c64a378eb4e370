"""A plan: how to shard a model, by parameter and layer names.

A plan is JSON that can be read, written by hand, moved to another mesh with the same axis
names, and compared. It names what it decides and leaves the rest to propagation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.suggest import did_you_mean
from shardweave.planners.plan import plan_parts as parts
from shardweave.planners.plan.plan_parts import (
    Candidate,
    Pipeline,
    PlanError,
    Predicted,
    SplitProjection,
)

FORMAT = "shardweave.plan/1"

_UNDONE = ("idle", "whole", "no effect", "no sequence parallelism")
"""Words that mark notes on something that the user asked for and the plan does not do."""


@dataclass(frozen=True)
class Plan:
    """Shardings by name; names may be patterns such as `h.*.mlp.fc_in.weight`.

    mesh: axis sizes that the plan was made for. parameters: qualified parameter names to the
    shardings that store them, in the text form of `dist.sharding`, `[{"tensor"}, {}]`. used: the
    shardings in which ops read parameters, where these are gathered before use; without an entry,
    axes that shard the batch (dim 0 of an input) are gathered. inputs: argument names to
    shardings. activations: layer names to the sharding of the layer's forward output.
    notes: what the planner decided and why.

    batch_split: number of sub-batches (`split-batch`). attention_parts: number of
    slices in which attention reads keys and values that are sharded along the sequence
    (`split-attention`). loss_chunks: number of chunks of tokens in which the loss is computed, so
    that only one chunk's logits exist at once (`chunk-loss`).
    expert_load: rows that each device is assumed to get where experts are sharded, as a multiple of
    a balanced routing (`block-experts`).
    projections: weights of fused projections (such as queries, keys and values in one) to be split
    into one linear map for each projection (`split-projections`), so that numbers of heads that do
    not divide can be sharded.
    passes: the passes after `apply-plan` as pipeline text (`cse,dce,..`), which may hold your own;
    empty: derived from the other fields (`shardweave plan --show-passes`).
    alone_bytes: a weight or a gradient of at least this size travels in a message of its own,
    smaller ones share messages (`bucket-collectives`); 0: the default threshold, for CPUs.
    recompute: policy of `rematerialize`; recompute_in: names or patterns of the blocks that it
    recomputes, empty for all. offload: what the host keeps: `inputs` or `all` (`values` of
    `offload-activations`) until the backward pass, `states` of the optimizer until the update, both
    (`inputs+states`), or `none`. decompose: names or patterns of the layers whose products compute
    while blocks of their operands or sums travel (`decompose-collectives`). schedule: of
    `overlap-communication`; cluster: a preset or a file for which the schedule is optimized.
    pipeline: its stages; None for one stage. zero: ZeRO stage, which shards over the data axis: 1
    optimizer state, 2 also gradients, 3 also parameters. precision: `fp32`, `bf16-mixed` or
    `fp16-mixed`, for the memory of the optimizer (`cost.memory`); empty: the parameters' dtype
    decides. update: the torch.optim class whose update and state are predicted; empty: a step
    without its update, and Adam's state.

    predicted: predicted time and memory of a step. reasons: why this plan won, and why the next
    best lost. candidates: the best plans that were compared, this one first.
    """

    mesh: Mapping[str, int] = field(default_factory=dict[str, int])
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    used: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    activations: Mapping[str, str] = field(default_factory=dict[str, str])
    planner: str = "by hand"
    notes: tuple[str, ...] = ()
    batch_split: int = 1
    attention_parts: int = 1
    loss_chunks: int = 1
    expert_load: float = 1.0
    projections: Mapping[str, SplitProjection] = field(default_factory=dict[str, SplitProjection])
    alone_bytes: int = 0
    passes: str = ""
    recompute: str = "none"
    recompute_in: tuple[str, ...] = ()
    offload: str = "none"
    decompose: tuple[str, ...] = ()
    schedule: str = ""
    cluster: str = ""
    pipeline: Pipeline | None = None
    zero: int = 0
    precision: str = ""
    update: str = ""
    predicted: Predicted | None = None
    reasons: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    @property
    def undone(self) -> list[str]:
        """The notes that say what a plan does not do; its other notes say how the planner chose."""
        return [note for note in self.notes if any(word in note for word in _UNDONE)]

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return len(self.pipeline.stages) if self.pipeline else 1

    @property
    def is_pipeline(self) -> bool:
        """True if a step runs several stages or micro-batches, and so by a schedule."""
        return self.pipeline is not None and (self.num_stages, self.pipeline.micro_batches) != (
            1,
            1,
        )

    @property
    def orders_stages(self) -> bool:
        """True if schedule `list` orders micro-batches by seconds on the plan's cluster."""
        return self.pipeline is not None and self.pipeline.schedule == "list"

    def on_parts_of(self, mesh: Mesh) -> Plan:
        """This plan, in whose mesh each axis is split into the parts that `mesh` has of it."""
        refined = Mesh(**self.mesh).on_parts_of(mesh)
        sizes = {axis.name: axis.size for axis in refined.axes}
        return self if sizes == self.mesh else replace(self, mesh=sizes)

    def to_json(self) -> str:
        """Return the plan as JSON text; fields at their defaults are left out, except shardings."""
        empty = Plan()
        data: dict[str, Any] = {"format": FORMAT}
        for f in fields(Plan):
            value = getattr(self, f.name)
            if f.name in _ALWAYS or value != getattr(empty, f.name):
                data[f.name] = _json(value)
        return json.dumps(data, indent=2)

    @staticmethod
    def from_json(text: str, name: str = "<plan>") -> Plan:
        """Read a plan from JSON text; errors call it `name`. Raises PlanError."""
        try:
            data: object = json.loads(text, object_pairs_hook=_without_repeats)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{name}:{error.lineno}:{error.colno}: not JSON: {error.msg}; a plan is JSON, as "
                "`shardweave plan -o` writes it."
            ) from error
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from error
        except RecursionError as error:
            raise PlanError(f"{name}: brackets are nested too deeply for a plan.") from error
        if not isinstance(data, dict):
            raise PlanError(f"{name}: found {type(data).__name__}, expected a JSON object.")
        return Plan.from_dict(cast("dict[str, Any]", data), name)

    @staticmethod
    def from_dict(data: Mapping[str, Any], name: str = "<plan>") -> Plan:
        """Check and build a plan from JSON data; errors call it `name`. Raises PlanError."""
        unknown = sorted(set(data) - set(_READERS) - {"format"})
        if unknown:
            raise PlanError(
                f"{name}: the plan has unknown keys {unknown}; "
                f"{did_you_mean(unknown[0], _READERS)}its keys can be "
                f"{', '.join(sorted(_READERS))}."
            )
        if data.get("format", FORMAT) != FORMAT:
            raise PlanError(f"{name}: format is {data['format']!r}, expected {FORMAT!r}.")
        values = {
            key: reader(data[key], f"{name}: '{key}'")
            for key, reader in _READERS.items()
            if key in data
        }
        return Plan(**values)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a JSON file. Raises PlanError if the file is missing or malformed."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise PlanError(f"plan '{path}' cannot be read: {reason}; give a JSON file.") from error
        return Plan.from_json(text, str(path))

    def diff(self, other: Plan) -> list[str]:
        """List the changes from this plan to `other` as lines `- key: old` and `+ key: new`."""
        lines: list[str] = []
        for f in fields(Plan):
            before, after = _json(getattr(self, f.name)), _json(getattr(other, f.name))
            if f.name in _TABLES:
                names = dict.fromkeys([*before, *after])
                entries = [(f"{f.name} '{n}'", before.get(n), after.get(n)) for n in names]
            else:
                entries = [(f.name, before, after)]
            for what, old, new in entries:
                lines += [f"{sign} {what}: {_short(v)}" for sign, v in _changed(old, new)]
        return lines


_ALWAYS = ("mesh", "parameters", "inputs", "activations", "planner", "notes")
_TABLES = ("mesh", "parameters", "used", "inputs", "activations", "projections")
_READERS: dict[str, parts.Reader] = {
    "mesh": parts.object_of(parts.at_least(1), "axis sizes"),
    "parameters": parts.object_of(parts.text, "shardings"),
    "used": parts.object_of(parts.text, "shardings"),
    "inputs": parts.object_of(parts.text, "shardings"),
    "activations": parts.object_of(parts.text, "shardings"),
    "planner": parts.text,
    "notes": parts.list_of(parts.text, "strings"),
    "batch_split": parts.at_least(1),
    "attention_parts": parts.at_least(1),
    "loss_chunks": parts.at_least(1),
    "expert_load": parts.factor,
    "projections": parts.object_of(parts.projection, "projections"),
    "alone_bytes": parts.at_least(0),
    "passes": parts.text,
    "recompute": parts.one_of(parts.RECOMPUTE),
    "recompute_in": parts.list_of(parts.text, "names of blocks"),
    "offload": parts.one_of(parts.OFFLOAD),
    "decompose": parts.list_of(parts.text, "names of layers"),
    "schedule": parts.one_of(parts.SCHEDULES),
    "cluster": parts.text,
    "pipeline": parts.optional(parts.pipeline),
    "zero": parts.at_least(0, 3),
    "precision": parts.one_of(parts.PRECISIONS),
    "update": parts.text,
    "predicted": parts.optional(parts.predicted),
    "reasons": parts.list_of(parts.text, "strings"),
    "candidates": parts.list_of(parts.candidate, "candidates"),
}


def _json(value: Any) -> Any:
    if is_dataclass(value):
        return parts.without_defaults(value)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _json(x) for key, x in items}
    if isinstance(value, tuple):
        return [_json(x) for x in cast("tuple[Any, ...]", value)]
    return value


def _changed(old: Any, new: Any) -> list[tuple[str, Any]]:
    if old == new:
        return []
    return [(sign, value) for sign, value in (("-", old), ("+", new)) if value not in (None, [])]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from a JSON object's pairs. Raises PlanError for a key that occurs twice."""
    table = dict(pairs)
    for key, _ in pairs:
        if sum(key == other for other, _ in pairs) > 1:
            raise PlanError(f"the key '{key}' is given twice; keep one of them.")
    return table
