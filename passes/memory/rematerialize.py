"""Cloning forward ops into the backward pass, so that their results need not be kept."""

from __future__ import annotations

import fnmatch
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from xdsl.dialects.func import ReturnOp
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects.annotations import (
    Copy,
    copy_of,
    follow_makers,
    phase_of,
    set_origin,
    set_phase,
)
from shardweave.ir.dialects.dist import AllGatherOp, CollectiveOp, HostCopyOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.ops.registry import flops_of, is_attention, is_random, spec_of
from shardweave.ir.program.blocks import BLOCKS, Blocks, blocks_of, split_at_backward, weight_ops
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import kept_bytes
from shardweave.passes.notes import note
from shardweave.passes.prepare.cse import merge_where_equal
from shardweave.passes.program_pass import PassOnProgram

POLICIES = ("none", "layer", "after-communication", "after-products", "budget")

Messages = Collection[Operation]


@dataclass(frozen=True)
class Policy:
    """Recomputation policy of a block. kept: maps the block's forward ops, in order, and all
    collectives except gathers of weights, to the ops whose results are kept; each of these ends a
    segment. is_whole: recompute all ops, even those whose results nothing reads. repeats_attention:
    recompute fused attention, which is otherwise kept because it may draw random numbers."""

    kept: Callable[[Sequence[Operation], Messages], Iterable[Operation]] = lambda ops, messages: ()
    is_whole: bool = False
    repeats_attention: bool = False


def messages_of(ops: Iterable[Operation], messages: Messages) -> list[Operation]:
    """Return the collectives among `ops`."""
    return [op for op in ops if op in messages]


def products_of(ops: Iterable[Operation], messages: Messages) -> list[Operation]:
    """Ops whose results are costly: products, attention, and collectives except gathers."""
    return [
        op
        for op in ops
        if (not isinstance(op, AllGatherOp) if op in messages else flops_of(op) > 0)
    ]


NAMED: Mapping[str, Policy | None] = {
    "none": None,
    "layer": Policy(is_whole=True),
    "after-communication": Policy(messages_of),
    "after-products": Policy(products_of),
}

Segment = tuple[str, Copy | None, int]
"""Block, sub-batch and number of a segment: ops up to a kept result, recomputed together."""


def _chosen_blocks(program: Program, text: str) -> Collection[str]:
    """The blocks that match a comma-separated list of names and patterns; all if it is empty."""
    known = blocks_of(program).names
    chosen: set[str] = set()
    for name in filter(None, (word.strip() for word in text.split(","))):
        fitting = fnmatch.filter(known, name)
        if not fitting:
            raise ValueError(
                f"blocks: there is no block '{name}'; the program has "
                f"{', '.join(known[:4]) or 'none'}{', ..' if len(known) > 4 else ''}."
            )
        chosen.update(fitting)
    return chosen or known


def recompute_to_fit(program: Program, budget: int) -> int:
    """Recompute in as few blocks as needed for the kept bytes of one device to fit into `budget`.

    Blocks are taken in the order of the forward pass, first by segments, then whole. Returns the
    number of clones. Raises ValueError, with the least bytes needed, if recomputing all blocks does
    not suffice.
    """
    policies = ("after-communication", "layer")
    blocks = blocks_of(program).names
    escalations = [(block, policy) for policy in policies for block in blocks]

    def recompute_first(count: int, target: Program) -> int:
        chosen = dict(escalations[:count])
        return recompute(target, lambda block: chosen.get(block, "none"))

    def needed(count: int) -> int:
        copy = program.clone()
        recompute_first(count, copy)
        return kept_bytes(copy)

    # Each escalation keeps less, so that few of them need be tried.
    counts = range(len(escalations) + 1)
    fewest = bisect_left(counts, True, key=lambda count: needed(count) <= budget)
    if fewest not in counts:
        least = needed(len(escalations))
        raise ValueError(
            f"bytes={budget} is too small: after recomputing every block, {least} bytes are "
            f"still kept for the backward pass, {least - budget} more; give at least "
            f"bytes={least}, split the batch, or shard more."
        )
    return recompute_first(fewest, program)


def recompute(program: Program, policy_of: Callable[[str], str | Policy]) -> int:
    """Recompute in each block by its policy; returns the number of clones. Takes linear time.

    policy_of: maps a block's name to a name in `NAMED`, or to a Policy. Raises ValueError if the
    program recomputes or offloads already, or has fused regions.
    """
    forward, later = split_at_backward(program)
    weights = set(weight_ops(program))
    again = (op for op in later if phase_of(op) == "recompute" and op not in weights)
    if not all(map(_is_for_attention, again)):
        raise ValueError("the program recomputes activations already; run rematerialize once only.")
    if any(isinstance(op, HostCopyOp) for op in forward):
        raise ValueError("the program is offloaded; run rematerialize before offload-activations.")
    if any(isinstance(op, FusedOp) for op in forward):
        raise ValueError("the program has fused regions; run unfuse-kernels first.")
    messages: set[Operation] = {op for op in forward + later if isinstance(op, CollectiveOp)}
    messages -= weights
    blocks = blocks_of(program)
    count = _Recomputation(forward, later, blocks, policy_of, messages).run()
    return count - _gather_once(program)


def _gather_once(program: Program) -> int:
    """Merge equal gathers (of weights, keys, values) in the backward pass; returns ops erased."""
    gathers = [*weight_ops(program), *filter(_is_for_attention, program.ops)]
    again = [op for op in gathers if phase_of(op) == "recompute"]
    return merge_where_equal(again, lambda op: ("copy",))


def _is_for_attention(op: Operation) -> bool:
    """True if an op is a collective that only attention reads, such as a gather of keys or values;
    other collectives and ops that select the rank's heads may stand between them."""
    return isinstance(op, CollectiveOp) and _is_for_attention_alone(op)


def _is_for_attention_alone(op: Operation) -> bool:
    readers = [use.operation for result in op.results for use in result.uses]
    return bool(readers) and all(
        is_attention(reader)
        or (
            (isinstance(reader, CollectiveOp) or reader.name == "aten.index_select")
            and _is_for_attention_alone(reader)
        )
        for reader in readers
    )


class _Recomputation:
    def __init__(
        self,
        forward: list[Operation],
        later: list[Operation],
        blocks: Blocks,
        policy_of: Callable[[str], str | Policy],
        messages: set[Operation],
    ) -> None:
        self.forward = forward
        self.messages = messages
        self.before = set(forward)
        self.later = later
        self.block_of = blocks.of_op
        self.policies: dict[str, Policy | None] = {}
        self.policy_of = policy_of
        self.segments: dict[Operation, Segment] = {}
        self.kept: dict[SSAValue, bool] = {}
        self.clones: dict[SSAValue, SSAValue] = {}
        self.pending: dict[Segment, list[Operation]] = {}
        self.count = 0
        self.keeping: set[Operation] = set()

    def run(self) -> int:
        self._number_segments()
        needed = self._needed()
        for op in self.forward:
            if op in needed:
                self.pending.setdefault(self.segments[op], []).append(op)
        # Where the backward pass of each block began after the last message that it waited for:
        # recomputation needs nothing of it, and can so run beside it.
        beginnings: dict[str | None, Operation] = {}
        for op in self.later:
            beginnings.setdefault(self.block_of(op), op)
            self._redirect(op, beginnings)
            if op in self.messages and _is_read(op):
                beginnings.clear()
        return self.count

    def _policy(self, block: str) -> Policy | None:
        if block not in self.policies:
            given = self.policy_of(block)
            policy = self.policies[block] = NAMED[given] if isinstance(given, str) else given
            if policy is not None:
                ops = [op for op in self.forward if self.block_of(op) == block]
                self.keeping.update(policy.kept(ops, self.messages))
        return self.policies[block]

    def _number_segments(self) -> None:
        """Assign each op that its block's policy allows to recompute to a segment."""
        numbers: dict[tuple[str, Copy | None], int] = {}
        for op in self.forward:
            block = self.block_of(op)
            if block is None:
                continue
            policy = self._policy(block)
            # A random op run again would draw other numbers than the forward pass saw.
            if policy is None or (
                is_random(op) and not (policy.repeats_attention and is_attention(op))
            ):
                continue
            key = (block, copy_of(op))
            number = numbers.setdefault(key, 0)
            self.segments[op] = (*key, number)
            if op in self.keeping:
                numbers[key] = number + 1

    def _is_kept(self, value: SSAValue) -> bool:
        """True if a value is available in the backward pass without recomputation."""
        if value not in self.kept:
            self.kept[value] = self._must_be_kept(value)
        return self.kept[value]

    def _must_be_kept(self, value: SSAValue) -> bool:
        op = value.owner
        if not isinstance(op, Operation) or op not in self.segments:
            return True
        block, _, _ = self.segments[op]
        if op in self.keeping:
            return True
        # A view of a kept value costs neither memory nor time.
        return self._is_free(value) or self._leaves(value, block)

    def _leaves(self, value: SSAValue, block: str) -> bool:
        return any(
            phase_of(use.operation) == "forward"
            and self.block_of(use.operation) != block
            and use.operation in self.before
            for use in value.uses
        )

    def _needed(self) -> set[Operation]:
        """The forward ops to clone: those whose results later ops need and that are not kept."""
        needed: set[Operation] = set()
        stack = [v for op in self.later for v in op.operands]
        seen: set[SSAValue] = set()
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            if not self._is_kept(value):
                assert isinstance(value.owner, Operation)
                needed.add(value.owner)
                stack.extend(value.owner.operands)
        whole = {block for block, policy in self.policies.items() if policy and policy.is_whole}
        rerun = {block for op in needed if (block := self.block_of(op)) in whole}
        for op in self.forward:
            # Megatron runs the whole block again, its last collective too, read or not.
            if op in self.segments and self.block_of(op) in rerun:
                if not all(map(self._is_free, op.results)):
                    needed.add(op)
        return needed

    def _is_free(self, value: SSAValue) -> bool:
        op = value.owner
        return isinstance(op, Operation) and spec_of(op).is_layout and self._is_kept(op.operands[0])

    def _redirect(self, op: Operation, beginnings: Mapping[str | None, Operation]) -> None:
        """Let a later op read clones; inserts their segments where their block's backward began."""
        operands = list(op.operands)
        changed = False
        for index, value in enumerate(operands):
            if self._is_kept(value):
                continue
            assert isinstance(value.owner, Operation)
            segment = self.segments[value.owner]
            self._insert(segment, beginnings.get(segment[0], op))
            operands[index] = self.clones[value]
            changed = True
        if changed:
            op.operands = operands
        follow_makers(op)  # what the backward pass computes of forward values, now clones

    def _insert(self, segment: Segment, before: Operation) -> None:
        """Clone a segment's ops before an op, after the segments that it reads."""
        for op in self.pending.pop(segment, []):
            for value in op.operands:
                # What enters a block is kept: the block that made it is not run again for it.
                if not self._is_kept(value):
                    assert isinstance(value.owner, Operation)
                    self._insert(self.segments[value.owner], before)
            self._clone(op, before)

    def _clone(self, op: Operation, before: Operation) -> None:
        """Clone an op before another; the clone reads clones of its block, originals of others."""
        block = self.block_of(op)
        inside = {
            value: self.clones.get(value, value)
            for value in op.operands
            if isinstance(value.owner, Operation) and self.block_of(value.owner) == block
        }
        clone = op.clone_without_regions(inside)
        self.clones.update(zip(op.results, clone.results, strict=True))
        set_phase(clone, "recompute")
        hint = op.results[0].name_hint
        if hint is not None:
            set_origin(clone, hint)
        Rewriter.insert_op(clone, InsertPoint.before(before))
        self.count += 1


def _is_read(op: Operation) -> bool:
    return any(not isinstance(use.operation, ReturnOp) for r in op.results for use in r.uses)


@dataclass(frozen=True)
class RematerializePass(PassOnProgram):
    """Clone forward ops into the backward pass, so that their results need not be kept.

    Blocks are the repeated modules (`h.0`, `encoder.block.3`). Policies: `none` keeps
    everything; `layer` keeps a block's inputs and outputs and runs the whole block again,
    communication included, also ops that nothing reads (Megatron's full recomputation);
    `after-communication` keeps the results of collectives, too, so that recomputation restarts
    after each (Oases' fine-grained strategy) and runs segment by segment; `after-products` keeps
    the results of matrix products, attention and all collectives but gathers, and recomputes the
    cheap ops between them: norms, activations, casts, gathers (what Megatron's sequence
    parallelism and `--recompute-modules` leave out); `budget` recomputes in as few blocks as
    fit the kept bytes of one device into `bytes`, first by segments, then whole.
    `blocks` lists names or patterns of the blocks to recompute, separated by commas; default all.
    Results of random ops are always kept. Gathered parameters do not count as results of
    collectives: the backward pass gathers them once, for recomputation and gradients alike.

    Requires: a program with forward and backward ops; collectives are recomputed only where
    they are in the program, so run it after `insert-collectives` (and `unroll-time-axes`),
    and before `fuse-kernels`.
    Ensures: numerics unchanged, bit for bit; clones carry phase recompute and `origin`, and
    stand where their block's backward pass begins, or continues after a message. Takes time
    linear in the ops; `budget` tries O(log blocks) times.
    """

    name = "rematerialize"
    policy: str = "layer"
    bytes: int | None = None
    blocks: str = ""

    def run(self, program: Program) -> None:
        if not self.recompute(program):
            note(self._why_nothing(program))

    def recompute(self, program: Program) -> int:
        """Recompute as `run` does, without notes; returns the number of clones."""
        if self.policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"policy '{self.policy}' is unknown; use one of {known}.")
        if (self.bytes is not None) != (self.policy == "budget"):
            raise ValueError("give bytes=N with policy=budget, and with no other policy.")
        chosen = _chosen_blocks(program, self.blocks)
        if self.bytes is None:
            return recompute(program, lambda block: self.policy if block in chosen else "none")
        if self.blocks:
            raise ValueError("policy=budget chooses the blocks itself; remove the option blocks.")
        return recompute_to_fit(program, self.bytes)

    def _why_nothing(self, program: Program) -> str:
        if self.policy == "none":
            return "policy none recomputes nothing; leave the pass out, or give another policy."
        if not blocks_of(program).names:
            return (
                "the program has no repeated blocks, so that nothing is recomputed; name the "
                f'modules to recompute in its text, as in attributes {{{BLOCKS} = ["encoder"]}}.'
            )
        if self.bytes is not None:
            return f"the step fits bytes={self.bytes} as it is; give fewer to recompute anything."
        return (
            "nothing that the blocks compute is kept for a backward pass, so that nothing is "
            "recomputed; capture the step with train=True, or leave the pass out."
        )
