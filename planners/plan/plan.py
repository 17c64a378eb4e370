"""A plan: how to shard a model, by parameter and layer names.

A plan is JSON that can be read, written by hand, moved to another mesh with the same axis
names, and compared. It names what it decides and leaves the rest to propagation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

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
"""Words of the notes on what was asked for and not done."""


@dataclass(frozen=True)
class Plan:
    """Shardings by name; names may be patterns such as `h.*.mlp.fc_in.weight`.

    mesh: axis sizes that the plan was made for. parameters: qualified parameter names to
    shardings in the text form of `dist.sharding`, `[{"tensor"}, {}]`, as they are stored. used:
    the same as ops read them, where they are gathered before use; without an entry, axes that
    shard the batch, dim 0 of an input, store a parameter and are gathered. inputs: argument names
    to shardings. activations: layer names to the sharding of the layer's forward output.
    notes: what the planner decided and why.

    batch_split: sub-batches run one after another (`split-batch`). attention_parts: parts of keys
    and values, where these are sharded along the sequence, that attention merges
    (`split-attention`). loss_chunks: chunks of the loss along tokens, so that logits exist for one
    (`chunk-loss`).
    expert_load: how many times the rows of a balanced routing each device is counted with, where
    experts are sharded (`block-experts`).
    projections: the weights of fused projections, such as that of queries, keys and values, each of
    whose parts is computed by a linear map of its own (`split-projections`), so that heads that do
    not divide can be sharded.
    passes: what follows `apply-plan`, as the text of a pipeline (`cse,dce,..`), your own passes
    among them; empty: derived from the other fields (`shardweave plan --show-passes`).
    alone_bytes: a weight or a gradient of so many bytes or more travels in a message of its own,
    and smaller ones together (`bucket-collectives`); 0: from where copying takes longer on CPUs.
    recompute: policy of `rematerialize`; recompute_in: names or patterns of the blocks in which,
    none for all. offload: values that the host keeps until the backward pass (`values` of
    `offload-activations`), `none` for none. schedule: of `overlap-communication`; `cluster` (a
    preset or a file) is the one it orders for. pipeline: stages, None for one. zero: how much of
    parameters is also sharded over the data axis: 1 optimizer state, 2 gradients too, 3 parameters
    too. precision: `fp32`, `bf16-mixed` or `fp16-mixed`, for the memory of the optimizer
    (`cost.memory`); without it the parameters' dtype has it all. update: the class of torch.optim
    whose update and state are predicted; empty: a step without its update, and Adam's state.

    predicted: what a step is expected to take. reasons: why this plan, and why not the next
    best. candidates: the best plans that were looked at, this one first.
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
        """The notes on what was asked for and not done; others say how the planner chose."""
        return [note for note in self.notes if any(word in note for word in _UNDONE)]

    @property
    def num_stages(self) -> int:
        """Pipeline stages; 1 without a pipeline."""
        return len(self.pipeline.stages) if self.pipeline else 1

    @property
    def is_pipeline(self) -> bool:
        """Whether a step runs several stages or micro-batches by a schedule."""
        return self.pipeline is not None and (self.num_stages, self.pipeline.micro_batches) != (
            1,
            1,
        )

    @property
    def orders_stages(self) -> bool:
        """Whether micro-batches are ordered by what their passes take, on the plan's cluster."""
        return self.pipeline is not None and self.pipeline.schedule == "list"

    def to_json(self) -> str:
        """The plan as JSON text, without undecided fields except the shardings."""
        empty = Plan()
        data: dict[str, Any] = {"format": FORMAT}
        for f in fields(Plan):
            value = getattr(self, f.name)
            if f.name in _ALWAYS or value != getattr(empty, f.name):
                data[f.name] = _json(value)
        return json.dumps(data, indent=2)

    @staticmethod
    def from_json(text: str, name: str = "<plan>") -> Plan:
        """Read a plan. Raises PlanError saying what is wrong."""
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
            raise PlanError(f"{name}: too many brackets within each other for a plan.") from error
        if not isinstance(data, dict):
            raise PlanError(f"{name}: found {type(data).__name__}, expected a JSON object.")
        return Plan.from_dict(cast("dict[str, Any]", data), name)

    @staticmethod
    def from_dict(data: Mapping[str, Any], name: str = "<plan>") -> Plan:
        """Check and build a plan from JSON data. Raises PlanError saying what is wrong."""
        unknown = sorted(set(data) - set(_READERS) - {"format"})
        if unknown:
            raise PlanError(
                f"{name}: unknown keys {unknown}; {did_you_mean(unknown[0], _READERS)}"
                f"a plan has {', '.join(sorted(_READERS))}."
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
        """Read a plan from a file. Raises PlanError if there is none that can be read."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise PlanError(f"plan '{path}' cannot be read: {reason}; give a JSON file.") from error
        return Plan.from_json(text, str(path))

    def diff(self, other: Plan) -> list[str]:
        """The changes from this plan to another, by name: `- key: old`, `+ key: new`."""
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
    """A field's value as JSON data."""
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
    """A JSON object. Raises PlanError for a key given twice, of which JSON keeps the last."""
    table = dict(pairs)
    for key, _ in pairs:
        if sum(key == other for other, _ in pairs) > 1:
            raise PlanError(f"'{key}' is given twice; keep one of them.")
    return table
