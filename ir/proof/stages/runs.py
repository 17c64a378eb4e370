"""The producers of what stage functions read, in a staged program whose schedule is verified.

The producer of a value, and the sender of a message, are found by name, so that each name may have
only one. `verify.stages` checks that earlier runs produce each value that a run reads, and that a
value read over all micro-batches is produced once for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.ir import SSAValue

from shardweave.ir.dialects.dist import RunOp
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import HELD, StageFunction, functions_of, runs_of
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.verify.stages import problems_of_stages


@dataclass
class RunOrder:
    """The order of runs, and the producer of each value that a stage function reads.

    givers: producers by stage and name. sent: values by source, destination and message.
    """

    program: Program
    functions: dict[str, StageFunction]
    givers: dict[tuple[int, str], tuple[StageFunction, Slot]] = field(
        default_factory=dict[tuple[int, str], tuple[StageFunction, Slot]]
    )
    sent: dict[tuple[int, int, str], SSAValue] = field(
        default_factory=dict[tuple[int, int, str], SSAValue]
    )

    @staticmethod
    def of(program: Program) -> RunOrder:
        """Read a staged program. Raises ProofError for a wrong schedule, and if two functions of a
        stage produce one name."""
        for op in program.ops:
            if not isinstance(op, RunOp):
                raise ProofError(
                    f"@step may hold dist.run ops only, found {op.name}; move it to a stage."
                )
        problem = next(problems_of_stages(program), None)
        if problem is not None:
            raise ProofError(problem[0])
        order = RunOrder(program, functions_of(program))
        for function in order.functions.values():
            order._read(function)
        return order

    def _read(self, function: StageFunction) -> None:
        for slot in function.results:
            if slot.kind in HELD:
                other = self.givers.setdefault((function.stage, slot.name), (function, slot))
                if other[1] is not slot:
                    raise ProofError(
                        f"@{function.name} and @{other[0].name} both return '{slot.name}'; keep "
                        "one of them."
                    )
        for op in function.sends:
            self.sent[function.stage, op.to, op.message] = op.value

    def giver(self, function: StageFunction, slot: Slot) -> tuple[StageFunction, SSAValue]:
        """Return the function that returns an argument's value, and the value; ProofError if
        none."""
        entry = self.givers.get((function.stage, slot.name))
        if entry is None or entry[1].kind != slot.kind:
            raise ProofError(
                f"stage function @{function.name} reads {slot.kind} '{slot.name}', but no "
                f"function of stage {function.stage} returns a {slot.kind} of that name; return "
                "it, or remove the argument."
            )
        return entry[0], entry[1].value

    def in_order(self) -> list[StageFunction]:
        """Return the functions in order of their first run. Raises ProofError if a value of all
        micro-batches is concatenated whose producer does not run on them in their order."""
        batches: dict[str, list[int]] = {}
        for run in runs_of(self.program):
            batches.setdefault(run.function, []).append(run.micro_batch or 0)
        for function in self.functions.values():
            for slot in function.arguments:
                giver = self.giver(function, slot)[0].name if slot.kind == "part" else ""
                if giver and batches[giver] != sorted(batches[giver]):
                    raise ProofError(
                        f"stage function @{function.name} joins '{slot.name}' of all "
                        f"micro-batches, but @{giver} runs on them in another order; reorder its "
                        "runs."
                    )
        return [self.functions[name] for name in batches]
