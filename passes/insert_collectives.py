"""insert-collectives: from the global program to the one that every rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.passes import ModulePass

from shardweave.ir import dist
from shardweave.ir.annotations import (
    annotate,
    phase_of,
    set_phase,
    set_sharding_attrs,
    set_shardings,
    sharding_attrs_of,
)
from shardweave.ir.aten import AtenOp
from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.literals import Literal
from shardweave.ir.placement import Sharding
from shardweave.ir.program import USED, Program, shardings_of
from shardweave.ir.sharding.assignment import Choice
from shardweave.ir.sharding.flow import Flow, aten_ops
from shardweave.ir.sharding.local_form import LocalForm
from shardweave.ir.sharding.reshard import Step, reshard
from shardweave.ir.sharding.rules import rule_of
from shardweave.ir.sharding.stored_weights import StoredWeights
from shardweave.ir.types import AnyTensor, shape_of, tensor_type_of, with_shape

_KINDS: dict[str, type[dist.DistOp]] = {
    "all_reduce": dist.AllReduceOp,
    "reduce_scatter": dist.ReduceScatterOp,
    "all_gather": dist.AllGatherOp,
    "all_to_all": dist.AllToAllOp,
    "slice": dist.SliceOp,
}


@dataclass(frozen=True)
class InsertCollectivesPass(ModulePass):
    """Give every value its local type, and every mismatch its collective.

    Each op is cut as its operands' and results' shardings say; where a use needs another
    sharding than the producer gives, collectives bring it there, once for all uses that need
    the same. A collective on an operand stands before its first use, one on a result (a
    gradient, say) right after its producer. A parameter that is stored in finer shards than its
    uses read (`dist.used`) is gathered before its first use, and again, with phase recompute,
    before its first use in the backward pass, so that the whole need not be kept in between.

    Requires: a global program on which `propagate-shardings` ran (or every op annotated).
    Ensures: a local program (`dist.local`), equal to the global one on the whole mesh; ops
    keep `sharding`. Linear in the ops.
    """

    name = "insert-collectives"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        program = Program(op)
        if program.mesh is None:
            raise ValueError("the program has no mesh; give one (mesh=..., or --mesh data=2).")
        if program.is_local:
            raise ValueError("the program is local already: its collectives are inserted.")
        _Partition(program).run()


class _Partition:
    def __init__(self, program: Program) -> None:
        assert program.mesh is not None
        self.program = program
        self.mesh = program.mesh
        self.flow = Flow(program, self.mesh)
        self.block = Block()
        self.local: dict[tuple[SSAValue, Sharding], SSAValue] = {}
        self.weights = StoredWeights(self.flow)
        self.is_backward = False
        self.is_made_again = False
        self.returned: dict[SSAValue, list[Sharding]] = {}
        for slot in program.results:
            wanted = program.sharding_of_slot(slot)
            self.returned.setdefault(slot.value, []).append(wanted)

    def run(self) -> None:
        for slot in self.program.arguments:
            sharding = self.flow.stored[slot.value]
            index = len(self.block.args)
            argument = self.block.insert_arg(self._local_type(slot.value, sharding), index)
            argument.name_hint = slot.value.name_hint
            self.local[slot.value, sharding] = argument
        for op in aten_ops(self.program):
            if self.weights.is_view(op):
                continue
            if not self.is_backward and phase_of(op) != "forward":
                self.is_backward = True
                self._free_weights()
            self._op(op)
        old_return = self.program.return_op
        results = [
            self._version(slot.value, self.program.sharding_of_slot(slot), old_return)
            for slot in self.program.results
        ]
        self.block.add_op(func.ReturnOp(*results))
        self._replace_body([r.type for r in results])

    def _op(self, op: AtenOp) -> None:
        for value in op.operands:
            self._bring(value, op)
        goals = shardings_of(op, self.program)
        choice = self.flow.choose(op, goals)
        operands = [
            self._version(value, wanted, op)
            for value, wanted in zip(op.operands, choice.operands, strict=True)
        ]
        results = self._emit(op, choice, operands)
        self.flow.define(op, choice.results)
        for new, old, produced in zip(results, op.results, choice.results, strict=True):
            new.name_hint = old.name_hint
            self.local[old, produced] = new
        for old, goal in zip(op.results, goals, strict=True):
            if goal is not None:
                self._settle(old, goal, op)
            if old.has_one_use():
                for wanted in self.returned.get(old, []):
                    self._version(old, wanted, op)

    # Stored weights

    def _bring(self, value: SSAValue, user: Operation) -> None:
        """Make a stored weight, or a view of one, for a use, unless it is there."""
        if not self.weights.lacks(value):
            return
        outer, self.is_made_again = self.is_made_again, self.weights.is_made_again(value)
        if value in self.weights.stored:
            self._gather(value, user)
        else:
            assert isinstance(value.owner, AtenOp)
            self._op(value.owner)
        self.is_made_again = outer

    def _gather(self, value: SSAValue, user: Operation) -> None:
        """Bring a weight from its shards as stored to those that ops read."""
        if isinstance(value.owner, AtenOp):
            (goal,) = shardings_of(value.owner, self.program)
            self.flow.define(value.owner, [goal or Sharding.replicated(len(shape_of(value)))])
        current, before = self._shards(value), self.weights.stored[value]
        used = self.flow.sharding(value)
        for step in reshard(shape_of(value), before, used, self.mesh):
            current = self._collective(value, current, before, step, user)
            before = step.after
        self.local[value, used] = current

    def _shards(self, value: SSAValue) -> SSAValue:
        """The stored shards of a weight: an argument, or a cast of one."""
        stored = self.weights.stored[value]
        found = self.local.get((value, stored))
        if found is None:
            cast_ = value.owner
            assert isinstance(cast_, AtenOp)
            operands, types = [self._shards(cast_.operands[0])], [self._local_type(value, stored)]
            found = LocalForm(cast_, operands, (), types, self.mesh, self._add).clone()[0]
            found.name_hint = value.name_hint
            self._annotate(found, value, stored)
            self.local[value, stored] = found
        return found

    def _free_weights(self) -> None:
        """Let the backward pass gather weights again, so that memory holds shards in between."""
        freed = self.weights.free()
        for value in freed:
            self.flow.versions[value] = self.flow.versions[value][:1]
        for value, sharding in list(self.local):
            if value in freed and sharding != self.weights.stored.get(value):
                del self.local[value, sharding]

    def _add(self, op: Operation) -> None:
        if self.is_made_again:
            set_phase(op, "recompute")
        self.block.add_op(op)

    def _settle(self, value: SSAValue, goal: Sharding, op: Operation) -> None:
        """Bring a result to its annotated sharding at once; later uses start from there."""
        produced = self.flow.sharding(value)
        if produced != goal:
            self._version(value, goal, op)
            # A version made by viewing another version of the operand is not listed yet.
            others = [v for v in self.flow.versions[value] if v != goal]
            self.flow.versions[value] = [goal, *others]

    def _emit(self, op: AtenOp, choice: Choice, operands: Sequence[SSAValue]) -> list[SSAValue]:
        types = [self._local_type(r, s) for r, s in zip(op.results, choice.results, strict=True)]
        form = LocalForm(op, operands, choice.factors, types, self.mesh, self._add)
        localize = rule_of(op).localize
        if localize is None or not any(choice.factors):
            results = form.clone()
        else:
            results = list(localize(form))
        assert [r.type for r in results] == types, f"local form of {op.name} has wrong types"
        for result, old, sharding in zip(results, op.results, choice.results, strict=True):
            self._annotate(result, old, sharding)
        return results

    def _annotate(self, result: SSAValue, old: SSAValue, sharding: Sharding) -> None:
        """Record the sharding of one result on the op that makes it."""
        owner = result.owner
        assert isinstance(owner, Operation)
        shape = shape_of(old)
        if len(owner.results) == 1:
            set_shardings(owner, [sharding], [shape])
            return
        known = sharding_attrs_of(owner) or ()
        set_sharding_attrs(owner, [*known, ShardingAttr.of(sharding, shape)])

    def _version(self, value: SSAValue, wanted: Sharding, user: Operation) -> SSAValue:
        """The value in a sharding, by collectives added here unless it exists already."""
        found = self.local.get((value, wanted))
        if found is not None:
            return found
        origin = self.flow.origin(value, wanted)
        if origin is not None:
            return self._viewed(value, self._version(*origin, user), wanted)
        version, steps = self.flow.steps(value, wanted)
        current = self._existing(value, version)
        before = version
        for step in steps:
            known = self.local.get((value, step.after))
            if known is None:
                known = self._collective(value, current, before, step, user)
                if self.flow.remember(value, step.after):
                    self.local[value, step.after] = known
            current, before = known, step.after
        self.local[value, wanted] = current
        return current

    def _existing(self, value: SSAValue, version: Sharding) -> SSAValue:
        """A version that needs no message: known, or a view of a known version."""
        found = self.local.get((value, version))
        if found is not None:
            return found
        view = value.owner
        assert isinstance(view, AtenOp)
        source = next(old for new, old in self.flow.moved_versions(value) if new == version)
        return self._viewed(value, self._existing(view.operands[0], source), version)

    def _viewed(self, value: SSAValue, operand: SSAValue, version: Sharding) -> SSAValue:
        """A version of a view's result, made from the right version of its operand."""
        view = value.owner
        assert isinstance(view, AtenOp)
        type_ = self._local_type(value, version)
        made = LocalForm(view, [operand], (), [type_], self.mesh, self._add).clone()[0]
        made.name_hint = value.name_hint
        self._annotate(made, value, version)
        self.local[value, version] = made
        return made

    def _collective(
        self, value: SSAValue, current: SSAValue, before: Sharding, step: Step, user: Operation
    ) -> SSAValue:
        arguments: dict[str, Literal] = {"axes": list(step.axes)}
        if step.kind == "all_reduce" and before.reduction == "max":
            arguments["op"] = "max"
        elif step.kind != "all_reduce":
            arguments |= {"dim": step.dim, "block": step.block}
        if step.kind == "all_to_all":
            arguments |= {"from_dim": step.from_dim, "from_block": step.from_block}
        type_ = self._local_type(value, step.after)
        op = dist.create(_KINDS[step.kind], [current], [type_], **arguments)
        annotate(op, user if not isinstance(user, func.ReturnOp) else _owner(value, user))
        set_shardings(op, [step.after], [shape_of(value)])
        op.results[0].name_hint = step.kind
        self._add(op)
        return op.results[0]

    def _local_type(self, value: SSAValue, sharding: Sharding) -> AnyTensor:
        return with_shape(tensor_type_of(value), sharding.local_shape(shape_of(value)))

    def _replace_body(self, result_types: list[Attribute]) -> None:
        function = self.program.function
        region = function.body
        old = region.blocks[0]
        for op in reversed(list(old.ops)):
            op.detach()
            op.erase(safe_erase=False)
        region.detach_block(old)
        region.add_block(self.block)
        function.function_type = builtin.FunctionType.from_lists(
            [a.type for a in self.block.args], result_types
        )
        arguments = range(len(self.block.args))
        self.program.set_argument_attributes(USED, dict.fromkeys(arguments))
        self.program.set_local()


def _owner(value: SSAValue, user: Operation) -> Operation:
    return value.owner if isinstance(value.owner, Operation) else user
