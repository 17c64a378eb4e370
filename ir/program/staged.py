"""Staged programs: a function for each stage and direction, and a step that says when each runs.

The module's first function is `@step`. Its body is the schedule: a `dist.run` for each function and
micro-batch, in an order in which all ranks together can run them; those of one coordinate on the
stage axis are what its ranks run, top to bottom. Values go from function to function by the kinds
and names of slots:

- `param`, `buffer`, `input`, `tangent`: arguments of the step; an input whose sharding names the
  axis of micro-batches is sliced to the micro-batch.
- `whole`: made once, before the first micro-batch, for all of them; if its sharding names their
  axis, it is sliced to the micro-batch.
- `kept`: made by an earlier function of the same stage on the same micro-batch.
- `micro_batch`: the number of the micro-batch, a scalar.
- `sum`: the sum (or maximum) over micro-batches of a result of earlier functions of the stage.
- `part`: the results of earlier functions for all micro-batches, concatenated.
- `same`: the result of an earlier function for the last micro-batch, which is equal for all.

A stage may be at several coordinates of the stage axis, each of which runs some of the
micro-batches. There `before`, `share` and `after` run at each of them, one run after the other;
the `sum`, `part` and `same` values that they read are first combined over these coordinates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from xdsl.dialects import builtin, func
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.dist import RecvOp, RunOp, SendOp
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.program.program import Program, Slot

Direction = Literal["before", "forward", "backward", "inputs", "weights", "share", "after"]
"""The work of a function of a stage: once before the micro-batches; forward; backward as a whole,
or to the inputs and then to the weights; once after the micro-batches, sending their sums to other
stages, and then computing with these sums."""

ONCE = ("before", "share", "after")
"""The directions that run once in a step; the others do for each micro-batch."""

TOTALS = ("sum", "part", "same")
"""Kinds of slots that combine the results of all micro-batches."""

STAGE_KINDS = ("whole", "kept", "micro_batch", *TOTALS)
"""Kinds of slots that only functions of stages have."""

HELD = ("whole", "kept", *TOTALS)
"""Kinds of slots that functions leave for later ones of the same stage."""

RECEIVES_AHEAD = 4
"""Receives that a rank posts ahead for each sender: they hide latency, and take memory."""

MICRO = "micro"
"""The time axis of a pipeline's micro-batches."""


@dataclass(frozen=True)
class StageMessage:
    """A message that a stage function sends or receives. other: the stage at its other end."""

    is_sent: bool
    other: int
    name: str
    value: SSAValue


class StageFunction(Program):
    """A stage's function in a staged program, seen as a program of its own on the same mesh."""

    def __init__(self, module: builtin.ModuleOp, function: func.FuncOp) -> None:
        super().__init__(module)
        self._function = function

    def clone(self) -> StageFunction:
        """Copy the whole program; return the function of the same name in the copy."""
        module = self.module.clone()
        functions = (op for op in module.body.block.ops if isinstance(op, func.FuncOp))
        (function,) = (candidate for candidate in functions if candidate.sym_name.data == self.name)
        return type(self)(module, function)

    @property
    def function(self) -> func.FuncOp:
        return self._function

    @property
    def name(self) -> str:
        return self._function.sym_name.data

    @property
    def alone(self) -> StageFunction:
        """The stage function as a program on the mesh of its stage, without the stage axis."""
        return _AloneFunction(self.module, self.function)

    @property
    def direction(self) -> Direction:
        return cast("Direction", self.name.rpartition("_")[0])

    @property
    def is_once(self) -> bool:
        """True if the function runs once in a step, not for each micro-batch."""
        return self.direction in ONCE

    @property
    def stage(self) -> int:
        return int(self.name.rpartition("_")[2])

    @property
    def sends(self) -> list[SendOp]:
        """The messages to other stages, in order."""
        return [op for op in self.ops if isinstance(op, SendOp)]

    @property
    def receives(self) -> list[RecvOp]:
        """The messages from other stages, in order."""
        return [op for op in self.ops if isinstance(op, RecvOp)]

    @property
    def messages(self) -> list[StageMessage]:
        """The messages that the function sends and receives, in order."""
        return [
            StageMessage(True, op.to, op.message, op.value)
            if isinstance(op, SendOp)
            else StageMessage(False, op.source, op.message, op.value)
            for op in self.ops
            if isinstance(op, SendOp | RecvOp)
        ]


class CopiedFunction(StageFunction):
    """A function under the name of another stage, with that stage's messages and parameters. It
    shares the ops of the function that it copies."""

    def __init__(
        self, like: StageFunction, name: str, messages: list[StageMessage], arguments: list[Slot]
    ) -> None:
        super().__init__(like.module, like.function)
        self._name, self._messages, self._arguments = name, messages, arguments

    @property
    def name(self) -> str:
        return self._name

    @property
    def messages(self) -> list[StageMessage]:
        return self._messages

    @property
    def arguments(self) -> list[Slot]:
        return self._arguments


class CopiedStages(Program):
    """A staged program to be priced: runs of stage functions, most of them copies of functions of
    `like`. The step itself has no ops."""

    def __init__(
        self, like: Program, mesh: Mesh, functions: Mapping[str, StageFunction], runs: Sequence[Run]
    ) -> None:
        super().__init__(builtin.ModuleOp([], dict(like.module.attributes)))
        self.set_mesh(mesh)
        self.functions, self.runs = functions, runs
        self._arguments = like.arguments

    @property
    def arguments(self) -> list[Slot]:
        return self._arguments


class _AloneFunction(StageFunction):
    @property
    def mesh(self) -> Mesh | None:
        mesh = super().mesh
        return mesh and mesh.within_stage


@dataclass(frozen=True)
class Run:
    """A run of a stage function. at: coordinate on the stage axis. micro_batch: its index; None for
    a function that runs once in a step."""

    function: str
    at: int
    micro_batch: int | None = None

    @staticmethod
    def of(op: RunOp) -> Run:
        return Run(op.function, op.at, op.micro_batch)


def is_staged(program: Program) -> bool:
    """True if a program has stage functions; a `StageFunction` by itself has none."""
    if isinstance(program, CopiedStages):
        return True
    first = program.module.body.block.first_op
    is_whole = not isinstance(program, StageFunction)
    return is_whole and first is not None and first.next_op is not None


def name_of(direction: Direction, stage: int) -> str:
    """The name of a function of a stage."""
    return f"{direction}_{stage}"


def functions_of(program: Program) -> dict[str, StageFunction]:
    """The functions of a staged program beside the step, by name."""
    if isinstance(program, CopiedStages):
        return dict(program.functions)
    functions: dict[str, StageFunction] = {}
    for op in list(program.module.body.block.ops)[1:]:
        function = StageFunction(program.module, cast(func.FuncOp, op))
        functions[function.name] = function
    return functions


def parts_of(program: Program) -> list[Program]:
    return list(functions_of(program).values()) if is_staged(program) else [program]


def ops_of_parts(program: Program) -> Iterator[Operation]:
    """Yield the ops of all functions of a program; dist.run ops do not count."""
    for part in parts_of(program):
        yield from part.ops


def runs_of(program: Program) -> Sequence[Run]:
    """The runs of a staged program in order."""
    if isinstance(program, CopiedStages):
        return program.runs
    return [run for _, run in run_ops_of(program)]


def run_ops_of(program: Program) -> Iterator[tuple[RunOp, Run]]:
    """The `dist.run` ops of a staged program in order, each with its `Run`."""
    for op in program.ops:
        if isinstance(op, RunOp):
            yield op, Run.of(op)


def num_ops_on_a_rank(program: Program) -> int:
    """Count the ops of a local program on one rank; if staged, on the rank that has the most."""
    if not is_staged(program):
        return sum(1 for _ in program.ops)
    sizes = {name: sum(1 for _ in body.ops) for name, body in functions_of(program).items()}
    counts: Counter[int] = Counter()
    for at, function in {(run.at, run.function) for run in runs_of(program)}:
        counts[at] += sizes[function]
    return max(counts.values())


@dataclass(frozen=True)
class BetweenStages:
    """Traffic between stages in a step: messages, and bytes that one rank of each stage sends."""

    stages: int
    micro_batches: int
    messages: int
    bytes: int


def between_stages(program: Program) -> BetweenStages | None:
    """The traffic between the stages of a program in a step; None if it has no stages."""
    if not is_staged(program):
        return None
    sizes = {
        name: [num_bytes(tensor_type_of(op.value)) for op in function.sends]
        for name, function in functions_of(program).items()
    }
    runs = runs_of(program)
    sent = [size for run in runs for size in sizes[run.function]]
    axis = micro_axis(program)
    return BetweenStages(
        stages=len(StagePlaces.of(program).of_stage),
        micro_batches=axis.size if axis else 1,
        messages=len(sent),
        bytes=sum(sent),
    )


def micro_axis(program: Program) -> Axis | None:
    """The axis of a program's micro-batches: its time axis, if it has one."""
    mesh = program.mesh
    return mesh and next((axis for axis in mesh.axes if axis.kind == "time"), None)


@dataclass(frozen=True)
class StagePlaces:
    """Coordinates of the stages on the stage axis. A stage may have several; each then runs some of
    the micro-batches.

    of_stage: ascending coordinates, by stage. of_batch: by (stage, micro-batch), the coordinate
    that runs it.
    """

    of_stage: Mapping[int, tuple[int, ...]]
    of_batch: Mapping[tuple[int, int], int]

    @staticmethod
    def of(program: Program) -> StagePlaces:
        """Read the coordinates off a staged program. Takes time linear in the runs."""
        functions = functions_of(program)
        of_stage: dict[int, dict[int, None]] = {}
        of_batch: dict[tuple[int, int], int] = {}
        for run in runs_of(program):
            stage = functions[run.function].stage
            of_stage.setdefault(stage, {})[run.at] = None
            if run.micro_batch is not None:
                of_batch[stage, run.micro_batch] = run.at
        places = {stage: tuple(sorted(at)) for stage, at in sorted(of_stage.items())}
        return StagePlaces(places, of_batch)

    def source(self, stage: int, micro_batch: int | None) -> int:
        """The coordinate of a stage that runs, and sends for, a micro-batch; if None, its first."""
        first = self.of_stage[stage][0]
        return first if micro_batch is None else self.of_batch.get((stage, micro_batch), first)

    def goals(self, run: Run, stage: int, to: int) -> tuple[int, ...]:
        """The coordinates that receive the messages for stage `to` from a run of `stage`."""
        if run.micro_batch is not None:
            return (self.source(to, run.micro_batch),)
        return self.of_stage[to] if run.at == self.source(stage, None) else ()
